"""The recipe beside itself by plain PyTorch: the same losses and parameters, resumed, and over two ranks."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from training import UPDATE_TOLERANCE, assert_close_elements
from transformers import AutoModelForCausalLM

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["backend=eager", "hw=emulated-700k-16m"]
LR = 1e-2


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import recipe

    return recipe


def run(recipe: ModuleType, *arguments: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    found = recipe.run(recipe.Config.parse([*SMALL, *arguments]))
    return found.losses, {name: value.detach().clone() for name, value in found.model.state_dict().items()}


@pytest.mark.long
def test_the_recipe_trains_as_plain_pytorch_and_goes_on_to_the_bit(recipe: ModuleType, tmp_path: Path) -> None:
    plain, values = run(recipe, "plain=True")
    whole, found = run(recipe, f"out={tmp_path}")
    assert len(whole) == 8 and whole == pytest.approx(plain, rel=1e-5)
    assert_close_elements(found, values, UPDATE_TOLERANCE * LR, "parameters")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert all(torch.equal(value, exported[name]) for name, value in found.items())
    newest = max(tmp_path.glob("0*"))
    newest.rename(tmp_path.parent / "later")
    resumed, again = run(recipe, f"out={tmp_path}", "resume=True")
    assert resumed == whole[4:]
    assert all(torch.equal(value, found[name]) for name, value in again.items())


@pytest.mark.long
@pytest.mark.distributed
def test_two_ranks_have_the_losses_of_one(recipe: ModuleType) -> None:
    plain, _ = run(recipe, "plain=True", "epochs=1")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(EXAMPLES / "recipe.py"), *SMALL, "epochs=1"],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (.*)$", done.stdout, re.MULTILINE)]
    assert losses == pytest.approx(plain, abs=1e-4) and len(losses) == 4


def test_an_argument_that_there_is_none_of_is_refused(recipe: ModuleType) -> None:
    with pytest.raises(ValueError, match="batchsize=2: the recipe has hw, backend"):
        recipe.Config.parse(["batchsize=2"])
