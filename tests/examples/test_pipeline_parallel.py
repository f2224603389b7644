"""The pipeline example under torchrun: its stages together have the losses of plain PyTorch."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = ["--layers=2", "--hidden=64", "--seq=16", "--steps=4", "--backend=eager", "--compare"]


def torchrun(num_ranks: int, *arguments: str) -> tuple[str, str]:
    """What the ranks print and say."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1"}
    script = str(EXAMPLES / "pipeline_parallel.py")
    done = subprocess.run(
        [*command, script, *TINY, *arguments], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("num_ranks", "arguments"),
    [
        (2, ["--hw=emulated-1m-64m"]),
        pytest.param(2, ["--hw=emulated-2m-64m", "--schedule=gpipe"], marks=pytest.mark.slow),
        pytest.param(4, ["--hw=emulated-1m-64m", "--mesh=pp=2,dp_shard=2"], marks=pytest.mark.slow),
    ],
    ids=["1f1b", "gpipe", "mesh"],
)
def test_stages_have_the_losses_of_plain_pytorch(num_ranks: int, arguments: list[str]) -> None:
    printed, said = torchrun(num_ranks, *arguments)
    losses = [float(loss) for loss in re.findall(r"^step \d+ loss (.*)$", printed, re.MULTILINE)]
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert len(re.findall("^ok: ", printed, re.MULTILINE)) == num_ranks // 2
    assert len(re.findall(r"^stage [01]: .* bytes of device memory; a step copies", said, re.MULTILINE)) == num_ranks
