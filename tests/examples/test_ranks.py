"""The examples under torchrun: two ranks train as one does on the batches of both."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = ["--layers=2", "--hidden=64", "--seq=16", "--backend=eager", "--hw=emulated-700k-64m", "--seed=3"]
TRAINING = [*TINY, "--steps=6", "--compare=6", "--target=6.0"]


def torchrun(script: str, *arguments: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(EXAMPLES / script), *arguments], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(printed: str) -> list[float]:
    (table,) = re.findall(r"^ +step +chunkc .*\n[ -]+\n((?: +\d+ .*\n)+)", printed, re.MULTILINE)
    return [float(line.split()[1]) for line in table.splitlines()]


@pytest.fixture
def train_gpt(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import train_gpt

    return train_gpt


@pytest.mark.long
@pytest.mark.distributed
def test_two_ranks_have_the_losses_of_one_with_their_batches(
    train_gpt: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = torchrun("train_gpt.py", *TRAINING, "--batch=1")
    assert "rank 0 of 2" in printed and printed.count("\nok ") == 3 and "FAILED" not in printed
    assert train_gpt.main([*TRAINING, "--batch=2"]) == 0
    out, progress = capsys.readouterr()
    for text in (out, printed):
        assert "LlamaForCausalLM on " in text and "emulated-700k-64m" in text
        assert "moved per step: " in text and "model data" in text
    assert out.count("\nok ") == 3 and "FAILED" not in out
    assert "tokens/s, device peak" in progress and "6/6" in progress
    alone = losses(out)
    assert losses(printed) == pytest.approx(alone, abs=1e-5) and len(set(alone)) == 6


def told(printed: str) -> list[float]:
    found = re.fullmatch(r"eval_loss=(.*)\nfinal_loss=(.*)\n", printed)
    assert found, printed
    return [float(loss) for loss in found.groups()]


@pytest.mark.slow
@pytest.mark.distributed
def test_fine_tuning_on_two_ranks_is_that_of_one_also_after_a_resume(
    train_gpt: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The export is that of plain transformers; the resumed run begins with the first of its two checkpoints."""
    import finetune

    ranks = [*TINY, "--steps=4", "--save-every=2", "--resume", "--batch=1", f"--out={tmp_path / 'ranks'}"]
    assert finetune.main([*TINY, "--steps=4", "--batch=2", f"--out={tmp_path / 'one'}"]) == 0
    alone = told(capsys.readouterr().out)
    assert told(torchrun("finetune.py", *ranks)) == pytest.approx(alone, abs=1e-5)
    (newest,) = tmp_path.glob("ranks/checkpoints/0*step-4")
    shutil.rmtree(newest)
    assert told(torchrun("finetune.py", *ranks)) == pytest.approx(alone, abs=1e-5)
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / name / "model") for name in ("one", "ranks")]
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


def test_parts_of_a_batch_are_all_of_it_in_order(train_gpt: ModuleType) -> None:
    batch = torch.arange(12).view(6, 2)
    parts = [train_gpt.Ranks(rank, 3).part(batch) for rank in range(3)]
    assert all(len(part) == 2 for part in parts) and torch.equal(torch.cat(parts), batch)
    assert train_gpt.Ranks().is_first and not train_gpt.Ranks(1, 3).is_first
    assert train_gpt.Ranks().mean(torch.tensor(2.5)) == 2.5
    assert train_gpt.Ranks().any(True) and not train_gpt.Ranks().any(False)
