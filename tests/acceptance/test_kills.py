"""ACCEPTANCE 15: killed at any moment of saving and training, the last complete checkpoint loads and goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import killed_runs
import pytest
import torch
from child_environment import environment

SCRIPT = Path(killed_runs.__file__)
KEEP = 3


@pytest.mark.long
@pytest.mark.skipif(os.name != "posix", reason="needs fork and SIGKILL")
@pytest.mark.parametrize("num_kills", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_killed_runs_go_on_as_if_they_had_not_been(tmp_path: Path, num_kills: int) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), str(tmp_path), str(num_kills), str(num_kills)],
        capture_output=True, text=True, timeout=300 + 6 * num_kills, check=False, env=environment(),
    )  # fmt: skip
    if torch.version.cuda is not None and "fork-based multiprocessing" in done.stderr:
        pytest.skip("runs where torch lets a forked process run backward: CPU builds do, this one for CUDA does not")
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    reference, runs = found["reference"], found["runs"]
    assert len(runs) == num_kills and len(set(reference.values())) > 200
    saved, num_resumed = 0, 0
    for number, run in enumerate(runs):
        for step, loss in run["losses"].items():
            assert loss == reference[step], f"run {number} begun at {run['begun']} differs in step {step}"
        if run["begun"] is not None:
            assert run["begun"] >= saved, f"run {number} went on from {run['begun']} although {saved} was saved"
            num_resumed += run["begun"] > 0
        saved = 0 if run["restarted"] else max(saved, run["saved"])
    assert num_resumed >= num_kills // 2, "most runs go on from a checkpoint"
    assert sum(run["under_way"] for run in runs) >= num_kills // 10, "some were killed in the middle of a save"
    assert len(list(tmp_path.glob("0*"))) <= KEEP + 3
