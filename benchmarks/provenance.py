"""Where a figure comes from: the command, the commit and the machine, as results tell them."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

_TOLD = ("OMP_WAIT_POLICY", "OMP_NUM_THREADS")


def command() -> str:
    """That of this process, with the environment variables that decide how fast it is."""
    return " ".join([*(f"{name}={os.environ[name]}" for name in _TOLD if name in os.environ), "python", *sys.argv])


def commit() -> str:
    """The checkout's, and whether the library's sources have changed since."""
    changes = " with changes" if _git("status", "--porcelain", "chunkc", "passes", "triton_kernels") else ""
    return _git("rev-parse", "HEAD") + changes


def processor() -> str:
    """Its name; on Linux the kernel's."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _git(*arguments: str) -> str:
    folder = Path(__file__).parent.parent
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()
