"""A file of JSON lines that keeps whatever was written before a kill.

A record is one line, on the disk before `Journal.write` returns. A kill in the middle of a write costs that record
only: the cut line stands by itself, and `records` leaves it out. Several processes may write to one file at the same
time: the file is locked around each line.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class Journal:
    """Append records to ``path``, whose folder is made.

    Each has its ``kind``, the Unix time ``at_s`` and ``common``.
    """

    def __init__(self, path: Path, **common: Any) -> None:
        self.path = path
        self._common = common
        path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, kind: str, **fields: Any) -> Record:
        """Append one record and return it. Values that JSON lacks are written as their text."""
        record = {"kind": kind, "at_s": round(time.time(), 3), **self._common, **fields}
        with self.path.open("ab+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
            separator = b"" if _ends_a_line(file) else b"\n"
            file.write(separator + json.dumps(record, default=str).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        return record


def records(path: Path) -> list[Record]:
    """The complete records of a journal, none where there is no file."""
    if not path.exists():
        return []
    found = []
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
        except ValueError:  # cut by a kill
            continue
        if isinstance(record, dict):
            found.append(record)
    return found


def _ends_a_line(file: Any) -> bool:
    """Whether what stands in ``file`` ends with a newline; ``file`` is positioned at its end afterwards."""
    if not file.seek(0, os.SEEK_END):
        return True
    file.seek(-1, os.SEEK_END)
    return bool(file.read(1) == b"\n")
