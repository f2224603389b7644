"""The benchmark of the GPU at toy sizes, without one: the whole flow, and the arithmetic of its figures."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, the benchmark itself is run")


@pytest.mark.slow
def test_quick_run_writes_what_ran_and_what_did_not(tmp_path: Path) -> None:
    systems = "kernels,chunkc,eager,torchao"
    options = ["--quick", "--hw", "emulated-64m-1g", "--only", systems, "--out", str(tmp_path)]
    env = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run([sys.executable, str(SCRIPT), *options], env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("gpu-*.json")
    report = json.loads(path.read_text())
    assert {"date", "command", "commit", "hardware", "versions", "environment", "mfu_formula"} <= report.keys()
    cases = report["cases"]
    assert list(cases) == ["kernels", "toy chunkc", "toy eager", "toy torchao"]
    for row in cases["kernels"]["kernels"].values():
        assert 0 < row["ratio_20_80"][0] <= row["ratio"] <= row["ratio_20_80"][1]
    ours, plain = cases["toy chunkc"], cases["toy eager"]
    assert ours["settings"]["hw"] == "emulated-64m-1g" and ours["stats"]["budget_nbytes"] == 64 << 20
    assert ours["num_params"] == plain["num_params"] == 110336
    for found in (ours, plain):
        assert found["outcome"] == "ran" and found["settings"] and abs(found["losses"]["first"] - 4.85) < 0.1
        assert found["tokens_per_s"] == pytest.approx(64 / found["step_ms"] * 1000, rel=0.01)
    if importlib.util.find_spec("torchao") is None:
        assert cases["toy torchao"]["outcome"] == "not importable"


def test_a_case_that_fails_or_takes_too_long_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import gpu

    args = gpu.parse(["--quick", "--hw", "emulated-1k-1k"])
    ours = next(case for case in gpu.cases_of(True, args.hw) if case.system == "chunkc")
    failed = gpu.in_child(ours, args, 100.0)
    assert failed["outcome"] == "failed" and "BudgetError" in failed["why"]
    assert gpu.in_child(ours, args, 5.0)["outcome"] == "not run"


def test_a_child_that_dies_or_leaves_others_behind_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its children, which hold its output; figures that were printed before are kept, silence is told."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import gpu

    child = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
    started_s = time.monotonic()
    ends: dict[int | None, str] = {
        0: "print('result: {\"a\": 1}')",
        -9: "import os; os.kill(os.getpid(), 9)",
        None: "import time; time.sleep(60)",
    }
    for code, end in ends.items():
        found, said, errors = gpu.bounded([sys.executable, "-c", child + end], dict(os.environ), 8.0)
        assert (found, errors) == (code, "")
        assert gpu.result_in(said) == ({"a": 1} if code == 0 else None)
    assert time.monotonic() - started_s < 50

    args = gpu.parse(["--quick"])
    case = gpu.cases_of(True, args.hw)[0]
    for code, said, outcome in ((-9, "", "failed"), (1, 'result: {"a": 1}', "failed"), (None, "", "timed out")):
        monkeypatch.setattr(gpu, "bounded", lambda *_, found=(code, said, ""): found)
        result = gpu.in_child(case, args, 100.0)
        assert result["outcome"] == outcome and gpu.outcome(result).startswith(outcome)
        assert ("a" in result) == bool(said)


def test_step_flops_are_those_of_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand for a model of two layers, and close to the published size of a large one."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    from gpu_models import Shape

    shape = Shape(layers=2, hidden=64, heads=2, batch=2, length=32, vocabulary=128)
    block = 12 * 64 * 64 + 13 * 64
    assert shape.num_params() == 128 * 64 + 32 * 64 + 2 * block + 2 * 64
    matmul = 128 * 64 + 2 * block + 2 * 64
    assert shape.step_flops() == (6 * matmul + 12 * 2 * 64 * 32) * 64
    assert Shape(layers=24, hidden=2048, heads=16, batch=1).num_params() == pytest.approx(1.31e9, rel=0.01)
