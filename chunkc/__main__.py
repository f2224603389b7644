"""The command ``chunkc``, also as ``python -m chunkc``; Ctrl-C ends it while it imports, too.

A KeyboardInterrupt inside an import may be shown, turned into an ImportError or lost; so the signal ends the process
until the import of the command line, and of torch, has ended.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def main() -> int:
    """Run the command of this process's arguments and return its exit code; 130 where it is interrupted."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    from chunkc.cli import main as run

    try:
        signal.signal(signal.SIGINT, before)
        return run()
    except KeyboardInterrupt:  # between two lines of this function; the command line handles all others
        return 130


def _end(signal_number: int, frame: FrameType | None) -> None:
    os.write(sys.__stderr__.fileno() if sys.__stderr__ is not None else 2, b"interrupted\n")
    os._exit(128 + signal_number)


if __name__ == "__main__":
    raise SystemExit(main())
