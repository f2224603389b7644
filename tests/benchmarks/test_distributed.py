"""The benchmark of several ranks: its flow at toy size, and the arithmetic of its figures and of its verdict."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import distributed
import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "distributed.py"
TOY = ["--layers=2", "--hidden=128", "--batch=2", "--seq=16", "--rounds=2", "--block=1", "--warm-up=2", "--limit=1000"]
NUM_PARAMS = 2 * (12 * 128**2 + 13 * 128) + 256 * 128 + 16 * 128 + 2 * 128


@pytest.mark.slow
@pytest.mark.distributed
def test_toy_run_counts_what_is_planned_and_times_all_sides(tmp_path: Path) -> None:
    options = [*TOY, "--moving-hw=3m-1g", "--sides=chunkc,fsdp2_eager", f"--out={tmp_path / 'found.json'}"]
    env = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run([sys.executable, str(SCRIPT), *options], env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert {"date", "command", "commit", "hardware", "versions", "options"} <= found.keys()
    resident, moving = found["jobs"]["resident"], found["jobs"]["moving"]
    for job in (resident, moving):
        assert job["num_params"] == NUM_PARAMS and set(job["step_s"]) == {"chunkc", "fsdp2_eager"}
        assert job["exchanged"]["zero_nbytes"] == 12 * NUM_PARAMS / 2
        assert job["exchanged"]["total_nbytes"] == job["exchanged"]["planned_nbytes"] > 4 * NUM_PARAMS
        assert job["stats"]["comm_nbytes"] == job["exchanged"]["total_nbytes"]
    assert resident["stats"]["h2d_nbytes"] == 0 < moving["stats"]["h2d_nbytes"]


def test_ratios_are_those_of_rounds_and_the_fastest_other_counts() -> None:
    found = distributed.compared({"chunkc": [1.0, 2.0, 3.0], "fsdp2": [2.0, 2.0, 2.0], "fsdp2_keep": [1.0, 1.0, 9.0]})
    assert found["median_s"] == {"chunkc": 2.0, "fsdp2": 2.0, "fsdp2_keep": 1.0}
    assert found["ratios"]["fsdp2"]["median"] == 1.0 and found["ratios"]["fsdp2"]["max"] == 1.5
    assert found["ratios"]["fsdp2_keep"]["median"] == 1.0 and found["ratios"]["fsdp2_keep"]["min"] == 0.3333
    assert found["fastest_other"] == "fsdp2_keep"


def job(**changes: Any) -> dict[str, Any]:
    """A job of which nothing is wrong, but for ``changes``."""
    exchanged = {"total_nbytes": 100, "planned_nbytes": 100, "padded_nbytes": 120}
    losses = {"chunkc": [5.0], "fsdp2": [5.00005]}
    comparison = {"fastest_other": "fsdp2", "ratios": {"fsdp2": {"median": 0.9}}}
    return {"exchanged": exchanged, "losses": losses, "comparison": comparison} | changes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"losses": {"chunkc": [5.0], "fsdp2": [5.0002]}}, "the losses of chunkc and fsdp2 differ by 2.0e-04"),
        ({"exchanged": {"total_nbytes": 100, "planned_nbytes": 99, "padded_nbytes": 120}}, "99 were planned"),
        ({"exchanged": {"total_nbytes": 130, "planned_nbytes": 130, "padded_nbytes": 120}}, "more than 120"),
        ({"comparison": {"fastest_other": "fsdp2", "ratios": {"fsdp2": {"median": 1.1}}}}, "1.1 x of fsdp2's"),
    ],
)
def test_each_check_fails_alone(changes: dict[str, Any], words: str) -> None:
    failures = distributed.failures_of("resident", job(**changes), distributed.parse([]))
    assert len(failures) == bool(words) and words in "".join(failures)
