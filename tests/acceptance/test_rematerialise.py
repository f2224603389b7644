"""Activations that are computed again: a model that does not fit otherwise trains exactly, by the plan made ahead.

With dropout the masks are replayed: the run is that of the machine where everything is kept, bit for bit, through
micro-batches, two shapes, an evaluation between them, and a checkpoint.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from costs import calibration
from schedules import target
from torch import nn
from torch.fx import GraphModule

import chunkc
from chunkc import BudgetError, Hardware
from chunkc._torch_compat.partitioning import replays_random_state
from chunkc.capture import partition
from chunkc.compiler.compiled_model import compiled_of
from chunkc.compiler.plan_ahead import capture_ahead
from chunkc.passes import make_plan

WIDTH, BATCH, LAYERS = 32, 512, 6
NUM_STEPS = 4
OPTIONS = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.1}


class Layer(nn.Module):
    """Keeps several activations of the batch's size inside."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(torch.nn.functional.gelu(self.linear(x)).softmax(-1)) + x


class Deep(nn.Module):
    """Layers whose activations are many times larger than their parameters."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x**2).mean()


def machine(nbytes: int, *, calibrated: bool = True) -> Hardware:
    hw = replace(Hardware.parse("emulated-1m-1g"), name=f"emulated-{nbytes}-1g", gpu_memory_nbytes=nbytes)
    return replace(hw, rates=calibration({})) if calibrated else hw


def batch(seed: int) -> torch.Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(seed))


def planned(model: nn.Module, hw: Hardware) -> chunkc.Plan:
    return chunkc.plan(model, hw, example_inputs=(batch(0),), backend="eager", dtype=torch.float32)


def least_nbytes(model: nn.Module) -> int:
    """Device bytes that it takes with what the partitioner keeps by itself."""
    schedule = capture_ahead(model, torch.float32, (batch(0),), "eager").schedule
    with pytest.raises(BudgetError) as caught:
        make_plan(schedule, target(1))
    return caught.value.min_device_nbytes


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Three steps; the losses."""
    losses = []
    for step in range(3):
        loss = model(batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def notes(plan: chunkc.Plan) -> str:
    return next((s.note for s in plan.stages if s.name == "rematerialise"), "")


@pytest.fixture
def deep() -> Deep:
    torch.manual_seed(0)
    return Deep()


@pytest.mark.long
def test_a_model_that_fits_only_with_recomputation_trains_exactly_by_the_plan_made_ahead(deep: Deep) -> None:
    hw = machine(least_nbytes(deep) * 3 // 4)
    assert "1: does not fit" in notes(planned(deep, replace(hw, rates=None)))
    ahead = planned(deep, hw)
    assert notes(ahead) and not notes(ahead).startswith("1 of")
    plain = copy.deepcopy(deep)
    model = chunkc.compile(deep, hw, backend="eager", dtype=torch.float32)
    ours, theirs = chunkc.AdamW(model.parameters(), **OPTIONS), torch.optim.AdamW(plain.parameters(), **OPTIONS)
    losses = [train(m, optimizer) for m, optimizer in ((model, ours), (plain, theirs))]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert chunkc.plan_of(model).digest() == ahead.digest()
    found = chunkc.stats(model)
    assert found["measured_peak_nbytes"] <= hw.gpu_memory_nbytes
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.detach().clone(), q.detach(), rtol=0, atol=1e-6, msg=name)


@pytest.mark.long
def test_what_is_computed_again_is_more_work_for_less_memory(deep: Deep) -> None:
    plans = [planned(deep, machine(nbytes)) for nbytes in (1 << 30, least_nbytes(deep) * 3 // 4)]
    operators = [sum(s.end_op - s.first_op for s in p.segments) for p in plans]
    assert operators[0] < operators[1]
    assert plans[0].memory.nonmodel_nbytes > plans[1].memory.nonmodel_nbytes


@pytest.mark.long
def test_the_least_budget_is_that_of_layers_computed_again_and_works(deep: Deep) -> None:
    with pytest.raises(BudgetError) as caught:
        planned(deep, machine(1, calibrated=False))
    nbytes = caught.value.min_device_nbytes
    assert nbytes < 0.6 * least_nbytes(deep)
    assert planned(deep, machine(nbytes, calibrated=False)).memory.device_peak_nbytes <= nbytes
    with pytest.raises(BudgetError):
        planned(deep, machine(nbytes - 1, calibrated=False))


def checkpointed(model: Deep, num_layers: int) -> Deep:
    for layer in model.layers[:num_layers]:
        plain = layer.forward
        layer.forward = lambda x, plain=plain: torch.utils.checkpoint.checkpoint(plain, x, use_reentrant=False)
    return model


def test_a_model_that_decides_everything_itself_is_left_to_it() -> None:
    assert notes(planned(checkpointed(Deep(dropout=0.1), LAYERS), machine(1 << 30))) == ""


@pytest.mark.long
def test_layers_beside_those_that_the_model_recomputes_are_recomputed_too() -> None:
    """Down to what the model takes where all layers are computed again; borders may differ by a mask."""
    found = []
    for num_layers in (0, 2, LAYERS):
        with pytest.raises(BudgetError) as caught:
            planned(checkpointed(Deep(dropout=0.1), num_layers), machine(1, calibrated=False))
        found.append(caught.value.min_device_nbytes)
    assert max(found) < 1.05 * min(found) < 0.6 * least_nbytes(Deep(dropout=0.1))


# --- random numbers ---------------------------------------------------------------------------------------------------


class Steps:
    """Training of `Deep` with dropout, on one machine: two micro-batches of two shapes a step, an evaluation behind."""

    def __init__(self, hw: Hardware, backend: Any) -> None:
        torch.manual_seed(3)
        self.model = chunkc.compile(Deep(dropout=0.3), hw, backend=backend, dtype=torch.float32, accumulate=2)
        self.optimizer = chunkc.AdamW(self.model.parameters(), **OPTIONS)
        self.losses: list[float] = []
        torch.manual_seed(7)

    def run(self, steps: range) -> None:
        for step in steps:
            for part in (batch(step), batch(step + 100)[: BATCH // 2]):
                loss = self.model(part)
                loss.backward()
                self.losses.append(loss.item())
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.model.eval()
            with torch.no_grad():
                self.losses.append(self.model(batch(50)).item())
            self.model.train()

    def bits(self) -> list[torch.Tensor]:
        values = [p.detach().clone() for p in self.model.parameters()]
        return [torch.tensor(self.losses, dtype=torch.float64), *values]

    def num_operators(self) -> int:
        """Operators of the first shape's programs."""
        planned = compiled_of(self.model).session.planned[0]
        return sum(s.end_op - s.first_op for s in planned.plan.segments)


def small_machine() -> Hardware:
    return machine(least_nbytes(Deep(dropout=0.3)) * 3 // 4, calibrated=False)


def trained(hw: Hardware, backend: str = "eager") -> Steps:
    steps = Steps(hw, backend)
    steps.run(range(NUM_STEPS))
    return steps


def are_equal(found: Steps, wanted: Steps) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found.bits(), wanted.bits(), strict=True))


@pytest.fixture(scope="module")
def kept() -> Steps:
    return trained(machine(1 << 26, calibrated=False))


@pytest.fixture(scope="module")
def again() -> Steps:
    return trained(small_machine())


@pytest.mark.long
def test_masks_that_are_drawn_again_are_those_of_a_run_that_keeps_them(kept: Steps, again: Steps) -> None:
    assert again.num_operators() > kept.num_operators()
    assert are_equal(again, kept)


@pytest.mark.slow
def test_masks_of_fused_operators_are_those_of_a_run_that_keeps_them() -> None:
    """Where segments are cut decides how sums are rounded, so a mask is told from rounding by its size."""
    runs = [trained(hw, "inductor") for hw in (machine(1 << 26, calibrated=False), small_machine())]
    assert runs[0].num_operators() < runs[1].num_operators()
    for a, b in zip(*(run.bits() for run in runs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.long
def test_a_replay_with_the_state_of_another_operator_is_told_apart(
    kept: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop = partition.drop_idle_states

    def confuse(forward: GraphModule, backward: GraphModule) -> None:
        drop(forward, backward)
        replays = [n for n in backward.graph.nodes if replays_random_state(n)]
        for node, other in zip(replays[::2], replays[1::2], strict=False):
            node.args, other.args = (other.args[0], *node.args[1:]), (node.args[0], *other.args[1:])

    monkeypatch.setattr(partition, "drop_idle_states", confuse)
    confused = trained(small_machine())
    assert confused.losses[:2] == kept.losses[:2], "forwards of the first step draw the same"
    assert not are_equal(confused, kept)


@pytest.mark.long
def test_a_resumed_run_draws_the_same_masks(again: Steps, tmp_path: Path) -> None:
    first, second = (Steps(small_machine(), "eager") for _ in range(2))
    first.run(range(NUM_STEPS // 2))
    chunkc.save_checkpoint(tmp_path, first.model, first.optimizer).result()
    chunkc.load_checkpoint(tmp_path, second.model, second.optimizer)
    second.losses = first.losses
    second.run(range(NUM_STEPS // 2, NUM_STEPS))
    assert are_equal(second, again)
