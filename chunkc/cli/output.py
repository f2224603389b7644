"""Standard output and error of a command: whole results or an error, control characters escaped.

A result that cannot be written is an error. A reader that has seen enough (``| head``) is none: the rest is dropped.
Progress goes to standard error as far as somebody takes it.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TextIO

from chunkc.errors import ChunkcError
from chunkc.progress import make_way
from chunkc.report.units import printable


def show(result: object) -> None:
    """Print ``result`` on standard output, whole; escape what a terminal would obey or its encoding lacks.

    Raises:
        ChunkcError: when it cannot be written, for example since the disk is full.
    """
    stream: TextIO | None = sys.stdout  # None where the process began with it closed
    if stream is None:
        raise ChunkcError("the result cannot be written: standard output is closed")
    try:
        _print(str(result), stream)
    except BrokenPipeError:
        _discard(stream)
    except OSError as error:
        _discard(stream)
        raise ChunkcError(f"the result cannot be written to standard output: {error.strerror}") from error


def tell(text: str) -> None:
    """Print progress or an error on standard error, escaped as in `show`; drop it where nothing fits."""
    stream: TextIO | None = sys.stderr
    if stream is None:
        return
    try:
        _print(text, stream)
    except OSError:
        _discard(stream)


def one_line(text: str) -> str:
    return " ".join(text.split())


def _print(text: str, stream: TextIO) -> None:
    make_way()
    escaped = "\n".join(map(printable, text.split("\n")))
    encoding = stream.encoding or "utf-8"
    print(escaped.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)


def _discard(stream: TextIO) -> None:
    """Send the buffer of ``stream``, and what follows, to nowhere: Python writes it at exit."""
    with suppress(OSError):  # a stream in memory has no descriptor
        descriptor = stream.fileno()
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), descriptor)
