"""A pseudo-terminal in place of standard error, and the screen that a person would see on it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

_ESCAPES = re.compile(r"\x1b\[([0-9]*)([A-Za-z])")


class Terminal:
    """A terminal of ``columns``; ``stream`` is what a program writes to."""

    def __init__(self, stream: TextIO, main: int) -> None:
        self.stream = stream
        self._main = main
        self._chunks: list[bytes] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                chunk = os.read(self._main, 65536)
            except OSError:  # the program's side is closed
                return
            if not chunk:
                return
            self._chunks.append(chunk)

    def end(self) -> str:
        """Close the program's side and return everything that was written."""
        if not self.stream.closed:
            self.stream.close()
        self._reader.join(10)
        return b"".join(self._chunks).decode()

    def screen(self) -> list[str]:
        """The lines of the screen at the end, without colours."""
        return played(self.end())


def played(written: str) -> list[str]:
    """The screen after ``written``: carriage returns and line feeds move, all else is put where the cursor is."""
    lines, row, column = [""], 0, 0
    for character in _ESCAPES.sub(lambda m: "\x00" if m[2] == "A" else "", written):
        if character == "\r":
            column = 0
        elif character == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif character == "\x00":
            row -= 1
        else:
            lines[row] = lines[row][:column].ljust(column) + character + lines[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]


@contextmanager
def terminal(columns: int = 80) -> Iterator[Terminal]:
    """A terminal for the block."""
    main, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    made = Terminal(os.fdopen(other, "w", encoding="utf-8", buffering=1), main)
    try:
        yield made
    finally:
        made.end()
        os.close(main)
