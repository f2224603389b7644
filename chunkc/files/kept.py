"""Small documents kept between runs, each under a key that names all that it follows from.

They spare work and decide nothing: one that is missing, unreadable or cannot be written is made again.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from chunkc.files.reading import FormatError, read_json
from chunkc.files.writing import replace_file

VARIABLE: Final = "CHUNKC_CACHE"
_MAX_NBYTES: Final = 2**16


@dataclass(frozen=True, slots=True)
class KeptDocuments:
    """Documents of JSON in files of one folder, which is made when the first is kept."""

    folder: Path

    def find(self, key: str) -> Any:
        """The document under ``key``, as JSON gives it; None where there is none, or ``CHUNKC_CACHE=0``."""
        if os.environ.get(VARIABLE) == "0":
            return None
        try:
            return read_json(self._path(key), max_nbytes=_MAX_NBYTES)
        except (OSError, FormatError):
            return None

    def keep(self, key: str, document: Any) -> None:
        """Keep ``document`` under ``key``, a name of letters and digits."""
        if os.environ.get(VARIABLE) == "0":
            return
        with suppress(OSError):  # a full disk or a folder of somebody else's ends no run
            self.folder.mkdir(parents=True, exist_ok=True)
            replace_file(self._path(key), json.dumps(document).encode())

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"
