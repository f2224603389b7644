"""ChunkcAccelerator beside accelerate's own: the same loop, in one process and on two ranks, and a loaded state."""

from pathlib import Path

import pytest
import torch
from job import Pool
from rank_trainers import LoopRun, train_loop
from torch import nn
from training import LOSS_TOLERANCE, assert_close_elements

import chunkc

loops = pytest.importorskip("loops")
accelerate = pytest.importorskip("accelerate", reason="runs where accelerate is installed, as `make test` does")
ours = pytest.importorskip("chunkc.integrations.accelerate")

LIMIT = 1e-3 * loops.LR  # of (b): a thousandth of the largest update


def assert_same_run(found: LoopRun, wanted: LoopRun) -> None:
    assert found.losses == pytest.approx(wanted.losses, rel=LOSS_TOLERANCE)
    assert_close_elements(found.values, wanted.values, LIMIT, "parameters")


@pytest.mark.long
def test_the_loop_trains_as_under_accelerate_and_goes_on_from_its_state(tmp_path: Path) -> None:
    """Acceptance (b); the second epoch from the saved state is equal to the bit."""
    plain = LoopRun(*loops.train_by_accelerate(False, tmp_path / "plain"))
    whole = LoopRun(*loops.train_by_accelerate(True, tmp_path / "ours"))
    assert_same_run(whole, plain)
    resumed = LoopRun(*loops.train_by_accelerate(True, tmp_path / "ours", first_epoch=1))
    assert resumed.losses == whole.losses[-len(resumed.losses) :]
    assert all(torch.equal(value, whole.values[name]) for name, value in resumed.values.items())


@pytest.mark.long
@pytest.mark.distributed
def test_two_ranks_train_as_accelerates_ddp(two_ranks: Pool, tmp_path: Path) -> None:
    plain = two_ranks.run(train_loop, "accelerate", False, str(tmp_path / "plain"))
    whole = two_ranks.run(train_loop, "accelerate", True, str(tmp_path / "ours"))
    for found, wanted in zip(whole, plain, strict=True):
        assert_same_run(found, wanted)
    resumed = two_ranks.run(train_loop, "accelerate", True, str(tmp_path / "ours"), 1)
    for found, wanted in zip(resumed, whole, strict=True):
        assert found.losses == wanted.losses[-len(found.losses) :]


@pytest.mark.long
def test_a_norm_over_some_parameters_is_clipped_as_torch_does(tmp_path: Path) -> None:
    """By gathering them; over all of them the plan clips, and plain models are accelerate's."""
    accelerator = ours.ChunkcAccelerator(cpu=True)
    plain = accelerator.prepare(nn.Linear(2, 2))
    model = accelerator.prepare(chunkc.compile(loops.seeded(), loops.HW, **loops.COMPILED))
    batch = next(iter(loops.loader()))
    accelerator.backward(model(**batch).loss)
    some = [p for p in model.parameters() if p.dim() == 1]
    norm = accelerator.clip_grad_norm_(some, 1e9)
    assert norm == pytest.approx(float(torch.stack([p.grad.norm() for p in some]).norm()), rel=1e-5)
    whole = accelerator.clip_grad_norm_(model.parameters(), 1e9)
    assert whole == pytest.approx(float(torch.stack([p.grad.norm() for p in model.parameters()]).norm()), rel=1e-5)
    assert norm < whole and plain in accelerator._models


def test_a_precision_of_accelerate_is_refused() -> None:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = ours.ChunkcAccelerator(cpu=True, mixed_precision="bf16")
    model = chunkc.compile(loops.seeded(), loops.HW, **loops.COMPILED)
    with pytest.raises(chunkc.ChunkcError, match="mixed_precision='bf16' would cast"):
        accelerator.prepare(model)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
