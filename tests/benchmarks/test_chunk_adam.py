"""The benchmark of the host update runs, says what it measured, and its exit code follows the ratios."""

import json
import subprocess
import sys
from pathlib import Path

import bench_chunk_adam
import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "bench_chunk_adam.py"


@pytest.mark.long
def test_exit_code_follows_the_ratios(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 of the script where a ratio does not hold, 0 of its ``main`` in this process where both do."""
    out = tmp_path / "result.json"
    small = ["--numel=100003", "--rounds=3", "--warm-up=1", f"--threads={torch.get_num_threads()}", f"--out={out}"]

    def check(code: int, expected: int, said: str = "") -> None:
        assert code == expected, said
        result = json.loads(out.read_text())
        assert result["holds"] == (expected == 0)
        assert len(result["rounds_ms"]) == 3
        assert all(ms > 0 for r in result["rounds_ms"] for ms in r.values())
        out.unlink()

    done = subprocess.run([sys.executable, str(SCRIPT), *small, "--move=1000", "--fused=0"], capture_output=True)
    check(done.returncode, 1, done.stderr.decode())
    check(bench_chunk_adam.main([*small, "--move=0", "--fused=0"]), 0)
