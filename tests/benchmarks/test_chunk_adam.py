"""The benchmark of the host update runs, says what it measured, and its exit code follows the ratios."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "bench_chunk_adam.py"


@pytest.mark.parametrize(("least", "code"), [("0", 0), ("1000", 1)])
def test_exit_code_follows_the_ratios(tmp_path: Path, least: str, code: int) -> None:
    out = tmp_path / "result.json"
    small = ["--numel=100003", "--rounds=3", "--warm-up=1", f"--out={out}"]
    done = subprocess.run([sys.executable, str(SCRIPT), *small, f"--move={least}", "--fused=0"], capture_output=True)
    assert done.returncode == code, done.stderr.decode()
    result = json.loads(out.read_text())
    assert result["holds"] == (code == 0)
    assert len(result["rounds_ms"]) == 3
    assert all(ms > 0 for r in result["rounds_ms"] for ms in r.values())
