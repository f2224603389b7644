"""Activations that are computed again: a model that does not fit otherwise trains exactly, by the plan made ahead."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from costs import calibration
from torch import nn

import chunkc
from chunkc import BudgetError, Hardware

WIDTH, BATCH, LAYERS = 32, 512, 6
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
    with pytest.raises(BudgetError) as caught:
        chunkc.plan(
            model, machine(1, calibrated=False), example_inputs=(batch(0),), backend="eager", dtype=torch.float32
        )
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


def test_a_model_that_fits_only_with_recomputation_trains_exactly_by_the_plan_made_ahead(deep: Deep) -> None:
    hw = machine(least_nbytes(deep) * 3 // 4)
    with pytest.raises(BudgetError):
        planned(deep, replace(hw, rates=None))
    ahead = planned(deep, hw)
    assert "1: does not fit" in notes(ahead) and not notes(ahead).startswith("1 of")
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


def test_what_is_computed_again_is_more_work_for_less_memory(deep: Deep) -> None:
    plans = [planned(deep, machine(nbytes)) for nbytes in (1 << 30, least_nbytes(deep) * 3 // 4)]
    operators = [sum(s.end_op - s.first_op for s in p.segments) for p in plans]
    assert operators[0] < operators[1]
    assert plans[0].memory.nonmodel_nbytes > plans[1].memory.nonmodel_nbytes


@pytest.mark.parametrize("case", ["dropout", "checkpointed"])
def test_what_the_model_decides_itself_is_left_to_it(case: str) -> None:
    model = Deep(dropout=0.1 if case == "dropout" else 0.0)
    if case == "checkpointed":
        for layer in model.layers:
            plain = layer.forward
            layer.forward = lambda x, plain=plain: torch.utils.checkpoint.checkpoint(plain, x, use_reentrant=False)
    assert notes(planned(model, machine(1 << 30))) == ""
