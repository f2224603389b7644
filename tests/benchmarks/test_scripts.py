"""All scripts of the benchmarks find what they import, also those that only a GPU carries out."""

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_every_script_can_be_imported() -> None:
    names = sorted(path.stem for path in BENCHMARKS.glob("*.py"))
    assert "gpu_kernels" in names
    lines = ["import importlib, sys", f"sys.path.insert(0, {str(BENCHMARKS)!r})"]
    lines += [f"for name in {names!r}: importlib.import_module(name)"]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
