"""Forwards in which data tell sizes break there, and train exactly on both sides, at whatever sizes come."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from data_dependent import FORMS, ExpertsBySplit, MaskedLoss, Mixture, PickedRows, PickedTwice, batch
from pair import Pair
from torch import nn
from torch.utils.checkpoint import checkpoint

import chunkc
from chunkc.compiler import graph_entry
from chunkc.compiler.compiled_model import compiled_of

MAX_SIZES, MAX_COMPILED_SIZES = 8, 2
SLOW = pytest.mark.slow
HW = "emulated-136k-64m"
"""Less than half of the model data of each form."""


def pair_of(kind: type[nn.Module], hw: str = HW, **options: Any) -> Pair:
    torch.manual_seed(0)
    return Pair(hw, kind(), **options)


def train(pair: Pair, seed: int, num_rows: int = 12) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
        loss = model(*batch(seed, num_rows))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    ours, plain = pair.both(step)
    assert ours == pytest.approx(plain, rel=1e-5)


def least_peak_nbytes(pair: Pair, repeat: Callable[[], None]) -> int:
    """The least of three readings of one batch: malloc counts what other threads of the process take meanwhile."""
    readings = []
    for _ in range(3):
        repeat()
        readings.append(chunkc.stats(pair.model)["measured_peak_nbytes"])
    return min(readings)


COMPILED = (MaskedLoss,)
"""Those whose compiled segments run in every test; of the others, with ``--soak``."""
CASES = [
    pytest.param(kind, backend, marks=SLOW if backend == "inductor" and kind not in COMPILED else ())
    for kind in FORMS
    for backend in ("eager", "inductor")
]


@pytest.mark.long(but="WithoutSelfLoops-eager")
@pytest.mark.parametrize(("kind", "backend"), CASES)
def test_training_is_exact_in_a_small_budget(kind: type[Mixture], backend: str) -> None:
    pair = pair_of(kind, backend=backend)
    for seed in range(6):
        train(pair, seed)
        pair.check()
    stats = chunkc.stats(pair.model)
    assert least_peak_nbytes(pair, lambda: train(pair, seed)) <= stats["planned_peak_nbytes"] <= stats["budget_nbytes"]
    assert stats["budget_nbytes"] < stats["model_data_nbytes"] / 2
    plans = [planned.plan for planned in compiled_of(pair.model).session.planned]
    assert any(plan.moved_nbytes("h2d") > 0 for plan in plans), "the budget is meant to force moves"


def picking(seed: int, count: int, num_rows: int = 60) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A batch whose mask picks ``count`` rows."""
    x, labels, _ = batch(seed, num_rows)
    return x, labels, torch.arange(num_rows) < count


def train_picking(pair: Pair, seed: int, *counts: int) -> None:
    """One step on the mean loss of as many micro-batches as there are counts; all forwards before all backwards."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
        losses = [model(*picking(seed + i, count)) for i, count in enumerate(counts)]
        for loss in losses:
            (loss / len(counts)).backward()
        optimizer.step()
        optimizer.zero_grad()
        return sum(loss.item() for loss in losses)

    ours, plain = pair.both(step)
    assert ours == pytest.approx(plain, rel=1e-5)


@pytest.mark.long
def test_many_sizes_are_captured_once_and_what_is_kept_of_them_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_entry, "MAX_SIZES", MAX_SIZES)
    monkeypatch.setattr(graph_entry, "MAX_COMPILED_SIZES", MAX_COMPILED_SIZES)
    pair = pair_of(MaskedLoss, "emulated-512k-64m")
    compiled = compiled_of(pair.model)
    counts = [*range(3, 3 + MAX_SIZES + 8), 5, 4, 18, 17, 6]  # the last ones come again: forgotten, or still known
    for seed, count in enumerate(counts):
        train_picking(pair, seed, count)
        if seed == 1:
            num_captured = compiled.breaks.shapes.num_programs
    pair.check()
    assert compiled.breaks.shapes.num_programs == num_captured <= 2, "one for the first size, one for all others"
    assert len(compiled.runtime.executors) <= MAX_SIZES + 2


@pytest.mark.long
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=SLOW)])
def test_micro_batches_of_several_sizes_are_alive_together(backend: str) -> None:
    pair = pair_of(MaskedLoss, "emulated-640k-64m", backend=backend, accumulate=3)
    for seed, counts in enumerate([(9, 5, 9), (5, 9, 4), (4, 4, 5), (9, 4, 5)]):
        train_picking(pair, 10 * seed, *counts)
        pair.check()


@pytest.mark.long
def test_an_evaluation_gathers_its_parameters_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    pair = pair_of(MaskedLoss)
    train(pair, 0)
    with caplog.at_level(logging.WARNING, "chunkc"):
        for seed in (1, 2, 1, 2):
            with torch.no_grad():
                ours, plain = pair.both(lambda model, _, seed=seed: model(*batch(seed)).item())
            assert ours == pytest.approx(plain, rel=1e-5)
    told = [r.getMessage() for r in caplog.records if "outside the plan" in r.getMessage()]
    assert len(told) == 1 and "depends on the data" in told[0]
    train(pair, 3)
    pair.check()


@pytest.mark.parametrize("kind", [MaskedLoss, ExpertsBySplit])
def test_one_graph_is_refused_before_anything_changes(kind: type[Mixture]) -> None:
    pair = pair_of(kind, fullgraph=True)
    with pytest.raises(chunkc.CaptureError, match=r"(?s)fullgraph=True.*data"):
        pair.model(*batch(0))
    pair.check()


@pytest.mark.long
def test_a_budget_without_room_is_refused_by_its_numbers_and_the_model_goes_on() -> None:
    pair = pair_of(PickedRows, "emulated-160k-64m")
    for seed, count in enumerate((6, 9, 5)):
        train_picking(pair, seed, count)
    with pytest.raises(chunkc.BudgetError, match=r"with the \d graphs of all its calls, cannot be trained") as refused:
        pair.model(*picking(1, 59))
    assert refused.value.min_device_nbytes > 160 * 1024
    for seed, count in enumerate((4, 6, 9), 3):
        train_picking(pair, seed, count)
    pair.check()


@pytest.mark.long
def test_a_graph_is_planned_again_where_those_before_it_hold_more() -> None:
    """Its own sizes stay, but the activations beside it grow."""
    pair = pair_of(PickedTwice, "emulated-512k-64m")
    compiled = compiled_of(pair.model)
    numbers = []
    for count in (6, 8, 40, 40, 40):
        train_picking(pair, 0, count)
        numbers.append(compiled.session.num_planned)
    pair.check()
    assert numbers[2] - numbers[1] == 2, "two graphs of the new size; beside them those that run after them have room"
    assert numbers[4] == numbers[3] == numbers[2]
    planned_nbytes = max(e.plan.memory.device_peak_nbytes for e in compiled.runtime.executors.values())
    assert least_peak_nbytes(pair, lambda: train_picking(pair, 0, 40)) <= planned_nbytes


class Dropped(nn.Module):
    """Rows picked by a mask, dropped by a checkpointed layer: linear in each weight, so that loss is ``w * w.grad``."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Parameter(torch.ones(16)), nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        def drop(rows: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(rows * self.before, 0.5) * self.after

        loss: torch.Tensor = checkpoint(drop, x[mask], use_reentrant=False).sum()
        return loss


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=SLOW)])
def test_dropout_that_is_computed_again_has_the_masks_of_forward_at_every_size(backend: str) -> None:
    """Before there is a plan, at new sizes, and at those that come again."""
    model = chunkc.compile(Dropped(), "emulated-1m-64m", dtype=torch.float32, backend=backend)
    optimizer = chunkc.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    for count in (7, 9, 11, 13, 11):
        loss = model(torch.rand(20, 16), torch.arange(20) < count)
        loss.backward()
        for weight in model.parameters():
            torch.testing.assert_close(weight.grad.sum(), loss.detach(), rtol=1e-5, atol=0)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.long
def test_one_backward_over_forwards_of_several_sizes_is_refused_as_of_one_size() -> None:
    """A forward that breaks is alive once in a backward; what data tell must not hide the second one."""
    pair = pair_of(MaskedLoss, "emulated-512k-64m")
    for seed in range(3):
        train_picking(pair, seed, 7 + seed)
    with pytest.raises(chunkc.AccumulationError):
        (pair.model(*picking(0, 7)) + pair.model(*picking(1, 12))).backward()
    pair.model.zero_grad()
    pair.check()
    train_picking(pair, 4, 12)
    pair.check()
