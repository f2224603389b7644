"""``python -m chunkc``: the command line of `chunkc.cli`."""

from __future__ import annotations

from chunkc.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
