"""ChunkcTrainer over two ranks beside Trainer with DDP, and batches that shrink until a plan fits."""

from pathlib import Path

import pytest
import torch
from job import Pool
from rank_trainers import find_batch_size, resume_trainer, train_by_trainer
from trainers import (
    HW,
    SEARCHING,
    arguments,
    compiled,
    logged,
    plain,
    seeded,
    transformers,
)
from training import LOSS_TOLERANCE, UPDATE_TOLERANCE, assert_close_elements

import chunkc

RANKS = {"gradient_accumulation_steps": 2}


@pytest.mark.long
@pytest.mark.distributed
def test_two_ranks_train_save_and_resume_as_trainer_does(two_ranks: Pool, tmp_path: Path) -> None:
    """Acceptance (b) with accumulation, a shorter last window, clipping and a schedule; saved once, for all."""
    runs = two_ranks.run(train_by_trainer, str(tmp_path), RANKS)
    for exact, ours in runs:
        assert ours.losses == pytest.approx(exact.losses, rel=1e-4)
        limit = UPDATE_TOLERANCE * exact.largest_update
        assert_close_elements(ours.values, exact.values, limit, "parameters")
    values = [ours.values for _, ours in runs]
    assert all(torch.equal(value, values[1][name]) for name, value in values[0].items())
    again = two_ranks.run(resume_trainer, str(tmp_path), RANKS)
    for (_, ours), resumed in zip(runs, again, strict=True):
        assert all(torch.equal(value, ours.values[name]) for name, value in resumed.values.items())
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours" / "checkpoint-4").state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in values[0].items())


@pytest.mark.long
def test_auto_find_batch_size_takes_the_largest_batch_that_has_a_plan(tmp_path: Path) -> None:
    args = arguments(tmp_path, **SEARCHING)
    trainer = compiled(model := seeded(), args)
    trainer.train()
    found = trainer._train_batch_size
    assert 1 < found < 8 and chunkc.stats(model)["measured_peak_nbytes"] <= chunkc.stats(model)["budget_nbytes"]
    exact = plain(seeded(), arguments(tmp_path, **(SEARCHING | {"per_device_train_batch_size": found})))
    exact.train()
    assert logged(trainer, "loss") == pytest.approx(logged(exact, "loss"), rel=LOSS_TOLERANCE)
    with pytest.raises(chunkc.BudgetError):
        compiled(seeded(), arguments(tmp_path, **(SEARCHING | {"auto_find_batch_size": False}))).train()


@pytest.mark.long
def test_a_search_ends_with_what_is_missing(tmp_path: Path) -> None:
    """The device has no room for one sample, or the host none for the model."""
    for hw, place in (("emulated-20k-16m", "device"), ("emulated-320k-150k", "host")):
        with pytest.raises(chunkc.BudgetError, match=place):
            compiled(seeded(), arguments(tmp_path, **SEARCHING), hw=hw).train()


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_find_one_batch_size(two_ranks: Pool, tmp_path: Path) -> None:
    found = two_ranks.run(find_batch_size, str(tmp_path), HW)
    assert found[0] == found[1] and 1 < found[0][0] < 8
