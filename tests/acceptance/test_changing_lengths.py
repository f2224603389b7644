"""Inputs whose sizes change from call to call: captured for any size at the third, and planned for each as it comes."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from pair import Pair, Tower, batch
from torch import nn
from torch.utils.checkpoint import checkpoint

import chunkc
from chunkc.compiler import graph_entry
from chunkc.compiler.compiled_model import compiled_of
from chunkc.compiler.graph_entry import GraphEntry
from chunkc.compiler.graph_set import GraphSet
from chunkc.compiler.shape_cache import MAX_PROGRAMS

HW = "emulated-640k-16m"
NUM_CAPTURES = 3
"""Of a form of call: its first size, its second, and all sizes."""


def num_captures(model: nn.Module) -> int:
    return compiled_of(model).session.shapes.num_programs


def num_plans(model: nn.Module) -> int:
    return compiled_of(model).session.num_planned


class Counted(nn.Module):
    """A recurrence by cells, whose forward reads the length as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.take, self.keep = nn.Linear(8, 32), nn.Linear(32, 32)
        self.head = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x.new_zeros(x.shape[1], 32)
        for step in range(x.shape[0]):
            hidden = torch.tanh(self.take(x[step]) + self.keep(hidden))
        loss: torch.Tensor = self.head(hidden).square().mean()
        return loss


def sequence(length: int, rows: int = 4) -> torch.Tensor:
    return torch.randn(length, rows, 8, generator=torch.Generator().manual_seed(length))


def low(hw: str = HW, **options: Any) -> Pair:
    """Two layers, which compile in seconds."""
    return Pair(hw, model=Tower(depth=2, width=32), **options)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_forty_lengths_are_exact_and_captured_three_times(backend: str) -> None:
    pair = low(backend=backend)
    for length in range(41, 1, -1):
        pair.train(length, length)
    pair.check()
    assert num_captures(pair.model) == NUM_CAPTURES
    stats = chunkc.stats(pair.model)
    assert stats["h2d_nbytes"] > 0, "the budget is meant to force moves"
    assert stats["measured_peak_nbytes"] <= stats["budget_nbytes"]


@pytest.mark.long
def test_lengths_that_are_known_are_planned_and_compiled_no_more() -> None:
    pair = Pair("emulated-130k-16m", model=Tower(depth=1, width=16), backend="inductor")
    for seed, length in enumerate((12, 8, 10, 10)):
        pair.train(seed, length)
    known = num_plans(pair.model), compiled_of(pair.model).settings.compiler.num_compiles
    for seed, length in enumerate((8, 12, 10)):
        pair.train(seed, length)
    assert (num_plans(pair.model), compiled_of(pair.model).settings.compiler.num_compiles) == known
    pair.check()
    assert chunkc.stats(pair.model)["h2d_nbytes"] > 0, "the budget is meant to force moves"


@pytest.mark.long
def test_plans_are_kept_for_the_lengths_used_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_entry, "MAX_SIZES", 4)
    pair = low()
    for length in (*range(20, 4, -1), 20, 5, 20):
        pair.train(length, length)
    pair.check()
    session = compiled_of(pair.model).session
    assert len(session.graphs.graphs) == len(session.runtime.executors) == 2 + 4, "two of one length, four of any"


@pytest.mark.long
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_forwards_of_several_new_lengths_in_one_loss(backend: str) -> None:
    pair = low("emulated-1m-16m", backend=backend, accumulate=3)
    for seed, lengths in enumerate(((8, 8, 8), (12, 9, 10), (9, 12, 20), (5, 5, 6))):
        pair.step_on(lambda model, n=lengths, s=seed: sum(model(*batch(s + i, k)) for i, k in enumerate(n)) / 3)
    pair.check()
    assert num_captures(pair.model) == NUM_CAPTURES
    stats = chunkc.stats(pair.model)
    assert stats["measured_peak_nbytes"] <= stats["budget_nbytes"]


@pytest.mark.long
def test_micro_batches_of_new_lengths_are_accumulated() -> None:
    pair = low(accumulate=2)
    for seed, lengths in enumerate(((8, 6), (12, 9), (7, 30), (30, 7), (9, 9))):

        def step(model: nn.Module, optimizer: torch.optim.Optimizer, *, s: int = seed, n: Any = lengths) -> None:
            for number, length in enumerate(n):
                (model(*batch(s + number, length)) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()

        pair.both(step)
    pair.check()


class Dropping(nn.Module):
    """A layer with dropout, whose mask is the same in plain PyTorch where operators run one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 256), nn.Linear(256, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(nn.functional.dropout(torch.tanh(self.up(x)), 0.3, self.training))
        return y.square().mean()


def test_dropout_has_the_masks_of_plain_pytorch_at_every_length() -> None:
    pair = Pair("emulated-300k-16m", model=Dropping())
    for length in (8, 6, 12, 9, 17, 6, 12):

        def loss_of(model: nn.Module, n: int = length) -> torch.Tensor:
            torch.manual_seed(n)
            loss: torch.Tensor = model(torch.randn(2, n, 16))
            return loss

        pair.step_on(loss_of)
    pair.check()
    assert num_captures(pair.model) == NUM_CAPTURES


class Repeated(nn.Module):
    """Rows dropped by a checkpointed layer: linear in each weight, so that the loss is ``(w * w.grad).sum()``."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Parameter(torch.ones(16)), nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def drop(rows: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(rows * self.before, 0.5) * self.after

        loss: torch.Tensor = checkpoint(drop, x, use_reentrant=False).sum()
        return loss


@pytest.mark.long(but="eager")
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_masks_drawn_again_are_those_of_forward_where_a_length_is_planned_anew_in_between(backend: str) -> None:
    """The second forward of a length has its segments compiled, before the backward of the first."""
    model = chunkc.compile(Repeated(), "emulated-1m-64m", dtype=torch.float32, backend=backend, accumulate=2)
    optimizer = chunkc.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    for lengths in ((7, 9), (11, 13), (17, 17), (17, 11), (19, 17)):
        losses = [model(torch.rand(length, 16)) for length in lengths]
        for loss in losses:
            loss.backward()
        for weight in model.parameters():
            torch.testing.assert_close(weight.grad.sum(), sum(losses).detach(), rtol=1e-5, atol=0)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.long
def test_batches_of_one_row_are_captured_apart(caplog: pytest.LogCaptureFixture) -> None:
    """Torch takes sizes of 0 and 1 for constants, which does not tell of the others."""
    pair = Pair("emulated-300k-16m", model=Dropping().eval())
    with caplog.at_level(logging.WARNING, "chunkc"):
        for rows, length in ((4, 8), (3, 8), (1, 8), (5, 9), (2, 12), (1, 9), (6, 7), (1, 5)):
            pair.step_on(lambda model, shape=(rows, length, 16): model(torch.ones(shape)))
    pair.check()
    assert num_captures(pair.model) <= 5
    assert not [record for record in caplog.records if "captured anew" in record.getMessage()]


@pytest.mark.long
def test_a_forward_that_reads_sizes_as_numbers_says_what_each_costs(caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair("emulated-200k-16m", model=Counted())
    with caplog.at_level(logging.WARNING, "chunkc"):
        for length in (3, 4, 5, 6, 2, 4):
            pair.step_on(lambda model, n=length: model(sequence(n)))
            told = [m for m in (r.getMessage() for r in caplog.records) if "captured anew" in m]
            assert len(told) == (length != 3 and num_captures(pair.model) >= 3)
    assert "Counted is captured anew for each size of its inputs (" in told[0] and " s this time" in told[0]
    assert "Pad inputs to few lengths" in told[0]
    pair.check()


@pytest.mark.long
def test_a_forward_that_reads_one_of_two_sizes_makes_each_program_once(caplog: pytest.LogCaptureFixture) -> None:
    """Its graphs serve any number of rows, but one number of steps each: more than Dynamo keeps for one function."""
    pair = Pair("emulated-200k-16m", model=Counted())
    shapes = [(steps, rows) for steps in range(2, 9) for rows in (4, 5)]

    def train() -> None:
        for steps, rows in shapes:
            pair.step_on(lambda model, n=steps, r=rows: model(sequence(n, r)))

    with caplog.at_level(logging.WARNING, "chunkc"):
        for _ in range(2):
            train()
        made = num_captures(pair.model)
        train()
    assert num_captures(pair.model) == made <= len(shapes)
    assert len([r for r in caplog.records if "captured anew" in r.getMessage()]) == 1
    pair.check()


class Bounded(nn.Module):
    """Refuses inputs of more than 16 rows, as models with positions do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 16:
            raise ValueError("too long")
        y: torch.Tensor = torch.tanh(self.layer(x)).square().mean()
        return y


@pytest.mark.parametrize("before", [(4, 5), (4, 5, 6, 7)])
def test_a_batch_that_the_forward_refuses_changes_nothing_for_others(before: tuple[int, ...]) -> None:
    pair = Pair("emulated-300k-16m", model=Bounded())
    for rows in (*before, 0, 8, 9, 10):
        if rows == 0:
            with pytest.raises(ValueError, match="too long"):
                pair.model(torch.ones(20, 16))
        else:
            pair.step_on(lambda model, n=rows: model(torch.ones(n, 16)))
    pair.check()
    assert num_captures(pair.model) == NUM_CAPTURES


def test_strides_that_change_leave_sizes_to_change() -> None:
    pair = Pair("emulated-300k-16m", model=Bounded())
    wide = torch.randn(12, 32, generator=torch.Generator().manual_seed(0))
    for x in (wide[:4, :16].clone(), wide[:6, :16].clone(), wide[:4, :16], wide[:7, :16], wide[:9, :16], wide[:8, :16]):
        pair.step_on(lambda model, x=x: model(x))
    pair.check()
    assert num_captures(pair.model) <= NUM_CAPTURES + 1


class Sloped(nn.Module):
    """A float that its operator takes for a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, slope: float) -> torch.Tensor:
        y: torch.Tensor = nn.functional.leaky_relu(self.layer(x), slope).square().mean()
        return y


@pytest.mark.long
def test_floats_that_are_constants_are_captured_once_each_where_lengths_change_too() -> None:
    pair = Pair("emulated-300k-16m", model=Sloped())
    for number in range(24):
        rows, slope = (7, 5, 6, 7, 8)[min(number, 4)], 0.1 + 0.1 * (number % 6)
        pair.step_on(lambda model, n=rows, s=slope: model(torch.ones(n, 16), s))
        if number == 17:
            known = num_captures(pair.model)
    pair.check()
    assert num_captures(pair.model) == known


@pytest.mark.long
def test_declared_lengths_are_captured_once_and_others_are_planned_from_one_graph() -> None:
    declared = [batch(0, length) for length in (6, 8, 10, 12)]
    pair = low(example_inputs=declared)
    for length in (8, 12, 6, 10):
        pair.train(length, length)
    assert num_captures(pair.model) == num_plans(pair.model) == len(declared)
    for length in (7, 9, 11):
        pair.train(length, length)
    pair.check()
    assert num_captures(pair.model) == len(declared) + 1


@pytest.mark.long
def test_a_size_that_fits_only_alone_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a capture for it alone computes more of it again."""
    pair = low()
    for length in (12, 8, 10, 7):
        pair.train(length, length)
    session = compiled_of(pair.model).session
    plan, num_refused = GraphSet.plan, 0

    def refuse_shared(graphs: GraphSet, entry: GraphEntry) -> None:
        nonlocal num_refused
        if graphs.graphs[entry].captured.symbolic is not None:
            num_refused += 1
            numbers = {"missing_nbytes": 1, "min_device_nbytes": 1, "min_host_nbytes": 1}
            raise chunkc.BudgetError("does not fit", moment="fwd.0", tensors=(), **numbers)
        plan(graphs, entry)

    monkeypatch.setattr(GraphSet, "plan", refuse_shared)
    for seed in range(3):
        pair.train(seed, 9)
    assert num_refused == 1 and session.shapes.num_programs == NUM_CAPTURES + 1
    monkeypatch.undo()
    pair.train(3, 11)
    pair.check()
    assert session.shapes.num_programs == NUM_CAPTURES + 1, "other sizes are planned from the graph for any"


@pytest.mark.long
def test_too_many_sizes_of_such_a_forward_are_refused_before_anything_changes() -> None:
    pair = Pair("emulated-200k-16m", model=Counted())
    shapes = compiled_of(pair.model).session.shapes
    assert shapes.max_programs == MAX_PROGRAMS == 64
    shapes.max_programs = 4
    for length in (3, 4, 5, 6):
        pair.step_on(lambda model, n=length: model(sequence(n)))
    saved = pair.model.state_dict()
    with pytest.raises(chunkc.ShapeLimitError, match=r"\[7, 4, 8\].*4 are made.*\[6, 4, 8\].*Pad"):
        pair.model(sequence(7))
    assert all(torch.equal(value, saved[name]) for name, value in pair.model.state_dict().items())
    pair.step_on(lambda model: model(sequence(4)))
    pair.check()


@pytest.mark.long
def test_a_size_that_does_not_fit_is_refused_by_its_numbers_and_the_model_goes_on() -> None:
    pair = low()
    for length in (12, 8, 10, 7):
        pair.train(length, length)
    with pytest.raises(chunkc.BudgetError, match="cannot be trained") as caught:
        pair.model(*batch(0, 400))
    assert caught.value.min_device_nbytes > 640 << 10
    for length in (9, 7):
        pair.train(length, length)
    pair.check()


@pytest.mark.long
def test_evaluations_between_new_lengths() -> None:
    pair = low()
    for length in (12, 8, 10, 7, 20):
        pair.train(length, length)
        with torch.no_grad():
            ours, plain = pair.model(*batch(3, length)), pair.plain(*batch(3, length))
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)
    pair.check()
