"""The digest of the sources changes with each of them, and with nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from child_environment import environment

ROOT = Path(__file__).parents[2]
FOLDERS = {"chunkc": "chunkc", "passes": "chunkc/passes", "triton_kernels": "chunkc/triton_kernels"}


def digest(copy: Path) -> str:
    """That of the package below ``copy``, in a process that imports nothing else of it."""
    program = "from chunkc.files.sources import package_digest; print(package_digest())"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env={**environment(), "PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.long
def test_each_source_counts(tmp_path: Path) -> None:
    for folder, place in FOLDERS.items():
        shutil.copytree(ROOT / folder, tmp_path / place, ignore=shutil.ignore_patterns("__pycache__"))
    before = digest(tmp_path)
    (tmp_path / "chunkc" / "notes.txt").write_text("no source")
    assert digest(tmp_path) == before
    found = {before}
    for name in ("passes/search.py", "capture/graphs.py"):
        path = tmp_path / "chunkc" / name
        path.write_text(path.read_text() + "# changed\n")
        found.add(digest(tmp_path))
    assert len(found) == 3
