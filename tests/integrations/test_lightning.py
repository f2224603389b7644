"""ChunkcStrategy beside Lightning's own: the same fit, in one process and on two ranks, and a run that goes on."""

from pathlib import Path
from typing import Any

import pytest
import torch
from job import Pool
from rank_trainers import LoopRun, train_loop
from training import LOSS_TOLERANCE, assert_close_elements

import chunkc

pl = pytest.importorskip("lightning.pytorch", reason="runs where lightning is installed, by the extra `lightning`")
loops = pytest.importorskip("loops")
ours = pytest.importorskip("chunkc.integrations.lightning")

LIMIT = 1e-3 * loops.LR  # of (b): a thousandth of the largest update
pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own, on loaders and devices


def assert_same_run(found: LoopRun, wanted: LoopRun) -> None:
    assert found.losses == pytest.approx(wanted.losses, rel=LOSS_TOLERANCE)
    assert_close_elements(found.values, wanted.values, LIMIT, "parameters")


@pytest.mark.long
def test_fits_as_lightning_does_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """Acceptance (b); the second epoch from the checkpoint is equal to the bit."""
    plain = LoopRun(*loops.train_by_lightning(False, tmp_path / "plain"))
    whole = LoopRun(*loops.train_by_lightning(True, tmp_path / "ours"))
    assert_same_run(whole, plain)
    resumed = LoopRun(*loops.train_by_lightning(True, tmp_path / "ours", resume=True))
    assert resumed.losses and resumed.losses == whole.losses[-len(resumed.losses) :]
    assert all(torch.equal(value, whole.values[name]) for name, value in resumed.values.items())


@pytest.mark.long
@pytest.mark.distributed
def test_two_ranks_fit_as_lightnings_ddp(two_ranks: Pool, tmp_path: Path) -> None:
    plain = two_ranks.run(train_loop, "lightning", False, str(tmp_path / "plain"))
    whole = two_ranks.run(train_loop, "lightning", True, str(tmp_path / "ours"))
    for found, wanted in zip(whole, plain, strict=True):
        assert_same_run(found, wanted)
    resumed = two_ranks.run(train_loop, "lightning", True, str(tmp_path / "ours"), 1)
    for found, wanted in zip(resumed, whole, strict=True):
        assert found.losses and found.losses == wanted.losses[-len(found.losses) :]


def trainer(folder: Path, **options: Any) -> Any:
    strategy = ours.ChunkcStrategy(loops.HW, compile_options={"backend": "eager"})
    quiet = {name: False for name in ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")}
    return pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, default_root_dir=folder, max_steps=1, **quiet, **options
    )


@pytest.mark.long
def test_precision_is_that_of_the_plan(tmp_path: Path) -> None:
    module = loops.loop_module(chunkc.AdamW)
    trainer(tmp_path, precision="bf16-mixed").fit(module, loops.loader())
    assert {p.dtype for p in chunkc.plan_of(module.model).layout.params} == {"bfloat16"}
    assert {p.dtype for p in module.state_dict().values()} == {torch.float32}
    with pytest.raises(chunkc.ChunkcError, match="cannot honour precision='64-true'"):
        trainer(tmp_path, precision="64-true")


def test_what_would_not_be_in_the_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(chunkc.ChunkcError, match=r"returned SGD: return chunkc\.AdamW"):
        trainer(tmp_path).fit(loops.loop_module(lambda params, lr, eps: torch.optim.SGD(params, lr=lr)), loops.loader())
    module = loops.loop_module(chunkc.AdamW)
    module.head = torch.nn.Linear(2, 2)
    with pytest.raises(chunkc.ChunkcError, match="has parameters in model, head"):
        trainer(tmp_path).fit(module, loops.loader())
    with pytest.raises(chunkc.ChunkcError, match="sync_batchnorm"):
        trainer(tmp_path, sync_batchnorm=True).fit(loops.loop_module(chunkc.AdamW), loops.loader())
