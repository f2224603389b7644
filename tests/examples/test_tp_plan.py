"""The example of transformers' parallel plan under torchrun: its losses are those of the model without chunkc."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "tp_plan.py"


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_losses_are_those_of_the_model_without_chunkc(num_ranks: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1"}
    arguments = ["--hw=emulated-1m-64m", "--backend=eager", "--compare", "--steps=4"]
    done = subprocess.run(
        [*command, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"^step \d: loss (.*), without chunkc (.*)$", done.stdout, re.MULTILINE)
    assert len(found) == 4 and len(set(found)) == 4
    for ours, plain in found:
        assert float(ours) == pytest.approx(float(plain), abs=2e-5)
    part, whole = (int(count.replace(",", "")) for count in re.findall(r"[\d,]+", done.stdout.partition("\n")[0]))
    assert 0.5 <= part / whole < 0.6, "all but norms is divided"
