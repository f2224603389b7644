"""Losses over several forwards: all that they save is planned for, and fits in the budget, or is refused."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence

import pytest
import torch
from pair import Pair
from torch import nn

import chunkc
from chunkc.compiler.compiled_model import compiled_of
from chunkc.runtime.devices.malloc_meter import NonModelMeter

WIDTH, NUM_LAYERS = 96, 6
ROWS = 256
SLACK_NBYTES = 64 << 10  # objects of the interpreter, which malloc counts like tensors

Loss = Callable[[Sequence[torch.Tensor]], torch.Tensor]


class Encoder(nn.Module):
    """Saves 2 * ROWS * WIDTH * NUM_LAYERS floats; breaks after the first layer where ``breaks``."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = torch.sigmoid(layer(x)) * torch.cos(x)
            if self.breaks and i == 0:
                torch._dynamo.graph_break()
        return x.mean(0)


def spread(outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """How far the outputs are from each other: each depends on all."""
    stacked = torch.stack(tuple(outputs))
    return (stacked - stacked.mean(0)).square().sum() + stacked.sum() * 0.1


def pair_of(hw: str, num: int, *, breaks: bool = False, **options: object) -> Pair:
    torch.manual_seed(0)
    return Pair(hw, Encoder(breaks), accumulate=num, **options)


def train(pair: Pair, rows: Sequence[int], seed: int, *, apart: bool = False) -> None:
    """One step on a loss over a forward for each of ``rows``; ``apart``: a backward for each, the first first."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
        generator = torch.Generator().manual_seed(seed)
        outputs = [model(torch.randn(n, WIDTH, generator=generator)) for n in rows]
        losses = [o.square().sum() for o in outputs] if apart else [spread(outputs)]
        value = sum(loss.item() for loss in losses)
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value

    ours, plain = pair.both(step)
    assert ours == pytest.approx(plain, rel=1e-5)


def check_measured(pair: Pair) -> None:
    stats = chunkc.stats(pair.model)
    assert stats["measured_peak_nbytes"] <= stats["planned_peak_nbytes"] + SLACK_NBYTES
    assert stats["planned_peak_nbytes"] <= stats["budget_nbytes"]


HW = {1: "emulated-2200k-64m", 2: "emulated-4000k-64m", 3: "emulated-5800k-64m", 8: "emulated-15m-64m"}
QUICK = {(2, "eager", True), (3, "inductor", False), (3, "inductor", True), (8, "eager", False)}
"""Cases of every test: each number of forwards and graphs, interpreted and compiled; the others run with ``--soak``."""
TOGETHER = [
    pytest.param(
        *case,
        id="-".join([str(case[0]), case[1], "two graphs" if case[2] else "one graph"]),
        marks=() if case in QUICK else pytest.mark.slow,
    )
    for case in itertools.product((2, 3, 8), ("eager", "inductor"), (False, True))
]


@pytest.mark.long
@pytest.mark.skipif(not NonModelMeter().available, reason="no reading of malloc on this system")
@pytest.mark.parametrize(("num", "backend", "breaks"), TOGETHER)
def test_forwards_of_one_loss_are_planned_together(
    num: int, backend: str, breaks: bool, caplog: pytest.LogCaptureFixture
) -> None:
    pair = pair_of(HW[num], num, breaks=breaks, backend=backend)
    with caplog.at_level(logging.WARNING, "chunkc"):
        for seed in range(4):
            train(pair, [ROWS] * num, seed)
            pair.check()
            if seed > (1 if breaks else 0):
                check_measured(pair)
    assert not [r for r in caplog.records if "more than the budget" in r.getMessage()]


@pytest.mark.long
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_forwards_of_different_lengths_are_planned_together(backend: str) -> None:
    pair = pair_of(HW[3], 3, backend=backend)
    for seed, rows in enumerate([(64, 256, 64), (256, 64, 128), (128, 128, 256), (256, 256, 64)]):
        train(pair, rows, seed)
        pair.check()
    check_measured(pair)


@pytest.mark.long(but="one graph")
@pytest.mark.parametrize("breaks", [False, True], ids=["one graph", "two graphs"])
def test_backwards_in_the_order_of_the_forwards_run_beside_later_ones(breaks: bool) -> None:
    pair = pair_of(HW[3], 3, breaks=breaks)
    for seed in range(3):
        train(pair, [64, 256, 128], seed, apart=True)
        pair.check()


@pytest.mark.long
def test_live_forwards_that_do_not_fit_are_refused_before_they_run() -> None:
    pair = pair_of(HW[1], 2)
    train_alone = [ROWS]
    train(pair, train_alone, 0)
    model = pair.model
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    first = model(torch.randn(ROWS, WIDTH))
    with pytest.raises(chunkc.BudgetError) as refusal:
        model(torch.randn(ROWS, WIDTH))
    assert refusal.value.min_device_nbytes > 2200 << 10
    first.sum().backward()  # what ran before goes on
    chunkc_grads = [p.grad for p in model.parameters()]
    assert all(g is not None and bool(g.isfinite().all()) for g in chunkc_grads)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), before[name], rtol=0, atol=0)
    for p in model.parameters():
        p.grad = None
    del first
    for seed in range(2):
        train(pair, train_alone, 1 + seed)
    pair.check()

    pair = pair_of(f"emulated-{-(-refusal.value.min_device_nbytes // 1024)}k-64m", 2)
    for seed in range(2):
        train(pair, [ROWS, ROWS], seed)
        pair.check()


def test_a_steady_state_plans_no_more() -> None:
    pair = pair_of(HW[3], 3)
    train(pair, [ROWS] * 3, 0)
    num_planned, layout = compiled_of(pair.model).session.num_planned, compiled_of(pair.model).runtime.layout
    for seed in range(1, 4):
        train(pair, [ROWS] * 3, seed)
    assert compiled_of(pair.model).session.num_planned == num_planned
    assert compiled_of(pair.model).runtime.layout is layout


@pytest.mark.skipif(not NonModelMeter().available, reason="no reading of malloc on this system")
def test_more_than_the_budget_is_said(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    pair, kept = Pair("emulated-520k-64m", nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid())), []
    with caplog.at_level(logging.WARNING, "chunkc"):
        for _ in range(16):
            kept.append(pair.model(torch.randn(ROWS, WIDTH)))
            kept[-1].sum().backward()
            pair.optimizer.step()
            pair.optimizer.zero_grad()
    told = [r.getMessage() for r in caplog.records if "more than the budget of" in r.getMessage()]
    assert 1 <= len(told) < 8 and "let go of outputs" in told[0]


def test_detached_outputs_hold_no_forward() -> None:
    """Stop-gradients, and predictions that are collected in grad mode: what was saved is gone."""
    pair, kept = pair_of(HW[1], 1), []
    train(pair, [ROWS], 0)
    for seed in range(6):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
        kept.append(pair.model(x).detach())
        torch.testing.assert_close(kept[-1], pair.plain(x).detach())
        train(pair, [ROWS], seed)
    pair.check()


class Head(nn.Module):
    """A trunk, a break, and a linear head, whose graph saves nothing but its input."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.trunk(x)
        torch._dynamo.graph_break()
        return self.head(x)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_graph_that_saves_only_its_input_is_told_apart(accumulate: int) -> None:
    torch.manual_seed(0)
    pair = Pair("emulated-2m-64m", Head(), accumulate=accumulate)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        first, second = (torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(n)) for n in (1, 2))
        losses = [model(first).square().sum(), model(second).square().sum()]
        del losses[accumulate:]  # a second forward in grad mode whose output goes
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(4):
        pair.both(step)
        pair.check()


def test_measured_gradients_keep_the_bytes_of_live_forwards_in_the_plan() -> None:
    pair = pair_of("emulated-7m-64m", 3)
    for seed in range(3):
        outputs = [pair.model(torch.randn(ROWS, WIDTH)) for _ in range(3)]
        spread(outputs).backward()
        if seed:
            chunkc.clip_grad_norm_(pair.model, 1.0)
        pair.optimizer.step()
        pair.optimizer.zero_grad()
        del outputs
    check_measured(pair)
