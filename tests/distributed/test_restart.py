"""``torchrun --max-restarts``: a job that loses a rank goes on from its last checkpoint, to the bit."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
import restarted_run
import torch
from child_environment import environment
from job import Pool

pytestmark = pytest.mark.distributed


def restart(directory: Path, killed_rank: int, delay_s: float) -> dict[str, torch.Tensor]:
    """What rank 0 leaves after two lives."""
    directory.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    script = [str(Path(restarted_run.__file__)), str(directory), str(killed_rank), str(delay_s)]
    env = environment(OMP_WAIT_POLICY="passive", OMP_NUM_THREADS="1")
    done = subprocess.run([*command, *script], capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"life 1 of rank {rank} ends well" in done.stdout for rank in range(2)), done.stdout
    found: dict[str, torch.Tensor] = torch.load(f"{directory}.pt")
    return found


@pytest.fixture(scope="module")
def wanted(two_ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """What no kill would have given."""
    found: dict[str, torch.Tensor] = two_ranks.run(restarted_run.train, str(tmp_path_factory.mktemp("whole")))[0]
    return found


@pytest.mark.long
def test_a_job_that_lost_a_rank_goes_on_from_its_checkpoint(wanted: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """Rank 1 is killed between forward and backward; the second life ends with the bits of a job that lost none."""
    check(restart(tmp_path / "killed", 1, 0.0), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_a_job_that_lost_a_rank_at_any_moment_goes_on(
    seed: int, wanted: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """Also rank 0, and in the midst of saves."""
    generator = random.Random(seed)
    check(restart(tmp_path / "killed", generator.randrange(2), generator.uniform(0.001, 0.3)), wanted)


def check(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """The same bits."""
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
