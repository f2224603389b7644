"""``torchrun --max-restarts``: a job that loses a rank goes on from its last checkpoint, to the bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import restarted_run
import torch
from job import Pool

pytestmark = pytest.mark.distributed


def test_a_job_that_lost_a_rank_goes_on_from_its_checkpoint(two_ranks: Pool, tmp_path: Path) -> None:
    """Rank 1 is killed in the fourth step of the first life; the second ends with what no kill would have given."""
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    wanted = two_ranks.run(restarted_run.train, str(tmp_path / "whole"))[0]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    script = [str(Path(restarted_run.__file__)), str(tmp_path / "killed"), "3"]
    paths = os.pathsep.join([str(Path(restarted_run.__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *script], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    lives = sorted(line for line in done.stdout.splitlines() if line.endswith("ends well"))
    assert lives == ["life 1 of rank 0 ends well", "life 1 of rank 1 ends well"]
    found = torch.load(tmp_path / "killed.pt")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
