"""Forwards that run before the backward of earlier ones, as in a stage of a pipeline: planned for, and exact."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from pair import Pair
from torch import nn

import chunkc
from chunkc.compiler.compiled_model import compiled_of
from chunkc.errors import PlanError
from chunkc.ir.verify import verify
from chunkc.runtime.devices.malloc_meter import NonModelMeter

WIDTH, ROWS, NUM = 48, 128, 4
MAX_NORM = 0.5
ORDERS = {1: "FBFBFBFB", 2: "FFBFBFBB", 3: "FFFBFBBB", 4: "FFFFBBBB"}
"""Of a stage by 1F1B with so many micro-batches in flight; the last is GPipe's."""
SLACK_NBYTES = 64 << 10
TIGHT = "emulated-3700k-64m"
"""Chunks move where four micro-batches are in flight, and where three are, all fits."""


class Stage(nn.Module):
    """Layers that take hidden states and give them out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(3)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return hidden


def pair_of(in_flight: int, hw: str = TIGHT, **options: Any) -> Pair:
    return Pair(hw, Stage(), accumulate=NUM, in_flight=in_flight, **options)


def run_micro_batches(model: nn.Module, order: str, seed: int, num_rows: int = ROWS) -> list[torch.Tensor]:
    """Forwards and backwards in ``order``, with tangents that the next stage would send; gradients of the inputs."""
    generator = torch.Generator().manual_seed(seed)
    inputs, tangents = torch.randn(2, NUM, num_rows, WIDTH, generator=generator).unbind()
    leaves = [each.clone().requires_grad_() for each in inputs]
    outputs: dict[int, torch.Tensor] = {}
    for position, kind in enumerate(order):
        number = order[:position].count(kind)
        if kind == "F":
            outputs[number] = model(leaves[number])
        else:
            torch.autograd.backward([outputs.pop(number)], [tangents[number]])
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def train(pair: Pair, order: str, seed: int, num_rows: int = ROWS) -> None:
    """One clipped step of both models; gradients of the inputs are equal."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        grads = run_micro_batches(model, order, seed, num_rows)
        clip = torch.nn.utils.clip_grad_norm_ if model is pair.plain else None
        if clip is None:
            chunkc.clip_grad_norm_(model, MAX_NORM)
        else:
            clip(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return grads

    ours, plain = pair.both(step)
    assert len(ours) == len(plain) == NUM
    for found, wanted in zip(ours, plain, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def check_stats(pair: Pair, *, is_measured: bool) -> dict[str, int]:
    stats = chunkc.stats(pair.model)
    for stream in ("h2d", "d2h"):
        assert stats[f"{stream}_nbytes"] == stats[f"planned_{stream}_nbytes"]
    if is_measured:
        assert stats["measured_peak_nbytes"] <= stats["planned_peak_nbytes"] + SLACK_NBYTES
    assert stats["planned_peak_nbytes"] <= stats["budget_nbytes"]
    return stats


@pytest.mark.long
@pytest.mark.parametrize("activations", ["keep", "offload"])
def test_micro_batches_in_flight_are_planned_once(activations: str, caplog: pytest.LogCaptureFixture) -> None:
    """Chunks and, by ``offload``, activations move; what transitions between two forwards copy is planned, too."""
    with caplog.at_level(logging.INFO, "chunkc"):
        pair = pair_of(4, activations=activations)
        for seed in range(3):
            train(pair, ORDERS[4], seed)
        pair.check()
    stats = check_stats(pair, is_measured=NonModelMeter().available)
    assert min(stats["h2d_nbytes"], stats["d2h_nbytes"]) > 0
    assert (stats["moved_saved_nbytes"] > 0) == (activations == "offload")
    assert compiled_of(pair.model).session.num_planned == 1
    assert not [r for r in caplog.records if "planned again" in r.getMessage()]


@pytest.mark.long
def test_a_stage_by_1f1b_trains_as_plain_pytorch_does() -> None:
    """Other orders with as many in flight, or fewer, need no other plan."""
    pair = pair_of(3, "emulated-2900k-64m")
    for seed, in_flight in enumerate((3, 3, 2, 1, 3)):
        train(pair, ORDERS[in_flight], seed)
    pair.check()
    stats = check_stats(pair, is_measured=NonModelMeter().available)
    assert stats["h2d_nbytes"] > 0 and compiled_of(pair.model).session.num_planned == 1
    assert [p.name for p in chunkc.plan_of(pair.model).iteration()] == (
        "forward abandon forward abandon forward backward forward accumulate resume accumulate resume accumulate step"
    ).split()


@pytest.mark.long
def test_more_in_flight_than_declared_are_planned_again_or_refused() -> None:
    pair = pair_of(2, "emulated-6m-64m")
    for seed, in_flight in enumerate((2, 4, 2)):
        train(pair, ORDERS[in_flight], seed)
    pair.check()
    pair = pair_of(2, "emulated-2300k-64m")
    train(pair, ORDERS[2], 0)
    with pytest.raises(chunkc.BudgetError, match="held by other forwards of the model") as refusal:
        train(pair, ORDERS[4], 1)
    assert refusal.value.min_device_nbytes < 3800 << 10


def test_a_backward_for_the_inputs_alone_is_refused() -> None:
    """As zero-bubble schedules run it; what is in flight goes on."""
    pair = pair_of(2, "emulated-6m-64m")
    train(pair, ORDERS[2], 0)
    hidden = torch.randn(ROWS, WIDTH, requires_grad=True)
    output = pair.model(hidden)
    with pytest.raises(chunkc.ChunkcError, match=r"leaves out the gradients of .* that does not split backward"):
        torch.autograd.grad(output, hidden, torch.ones_like(output))
    del output
    train(pair, ORDERS[2], 1)
    pair.check()


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", [2, 4])
def test_compiled_segments_count_what_waits(in_flight: int) -> None:
    pair = pair_of(in_flight, "emulated-3400k-64m" if in_flight == 4 else "emulated-2m-64m", backend="inductor")
    for seed in range(3):
        train(pair, ORDERS[in_flight], seed)
    pair.check()
    check_stats(pair, is_measured=NonModelMeter().available)
    assert compiled_of(pair.model).session.num_planned == 1


@pytest.mark.slow
def test_sizes_that_change_stay_within_their_plans() -> None:
    pair = pair_of(3, "emulated-6m-64m")
    for seed, num_rows in enumerate((ROWS, 32, ROWS, 64)):
        train(pair, ORDERS[3], seed, num_rows)
    pair.check()


@pytest.fixture(scope="module")
def plan() -> chunkc.Plan:
    options = {"dtype": torch.float32, "backend": "eager", "activations": "keep", "chunk_size": 2048}
    inputs = (torch.randn(ROWS, WIDTH, requires_grad=True),)
    return chunkc.plan(Stage(), TIGHT, example_inputs=inputs, accumulate=NUM, in_flight=3, **options)


def test_a_plan_is_saved_with_what_is_in_flight(plan: chunkc.Plan, tmp_path: Any) -> None:
    plan.save(tmp_path / "plan.json")
    loaded = chunkc.Plan.load(tmp_path / "plan.json")
    assert loaded == plan and (loaded.in_flight, loaded.digest()) == (3, plan.digest())
    assert loaded.waiting_nbytes >= sum(value.nbytes for value in plan.saved) > 0
    assert "3 micro-batches are in flight, each but the one that runs with" in plan.summary()
    assert "resume" in plan.text() and chunkc.simulate(plan, "v100-240g").step_ms > 0


MUTATIONS = {
    "no bytes": ({"waiting_nbytes": 0}, "keeps [0-9]+ bytes for backward on the device, and 0 are counted"),
    "one more": ({"in_flight": 4}, "and the other 3 micro-batches in flight hold"),
    "too many": ({"in_flight": 5}, "of 4 micro-batches, 5 cannot be in flight"),
    "one alone": ({"in_flight": 1}, "one micro-batch is in flight, and others are to hold"),
}


@pytest.mark.parametrize("change", MUTATIONS)
def test_the_verifier_refuses_bytes_that_are_not_counted(plan: chunkc.Plan, change: str) -> None:
    fields, problem = MUTATIONS[change]
    verify(plan)
    with pytest.raises(PlanError, match=problem):
        verify(replace(plan, **fields))


@pytest.mark.parametrize("in_flight", [0, 5, 1.5])
def test_a_number_that_no_schedule_has_is_refused(in_flight: Any) -> None:
    with pytest.raises(chunkc.ChunkcError, match=f"in_flight={in_flight}: give the micro-batches"):
        pair_of(in_flight)
