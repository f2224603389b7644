"""ACCEPTANCE 17: many shapes in one run are exact, planned once each, over one layout."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from training import assert_close_elements

import chunkc
from chunkc.compiler.compiled_model import compiled_of

OPTIONS = {"lr": 1e-2, "eps": 1e-4}


class Reader(nn.Module):
    """Embedding, a mixed layer, a head; small, since every length compiles."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 64)
        self.mix = nn.Linear(64, 64)
        self.head = nn.Linear(64, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.mix(self.embed(tokens)).cumsum(1))
        return nn.functional.cross_entropy(self.head(hidden)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@dataclass
class Twins:
    """The model under chunkc, too small a device for all of it, and in plain PyTorch."""

    model: nn.Module
    plain: nn.Module
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)

    def train(self, length: int) -> None:
        """One step of both, whose losses agree."""
        tokens = torch.randint(50, (2, length), generator=torch.Generator().manual_seed(length))
        losses = [model(tokens) for model in (self.model, self.plain)]
        for loss in losses:
            loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)

    def check(self) -> None:
        """Every element within a thousandth of one update."""
        assert_close_elements(self.model.state_dict(), self.plain.state_dict(), 1e-3 * OPTIONS["lr"], "parameters")


@pytest.fixture
def twins() -> Twins:
    torch.manual_seed(0)
    plain = Reader()
    model = chunkc.compile(copy.deepcopy(plain), "emulated-176k-16m", dtype=torch.float32, backend="eager")
    optimizers = [chunkc.AdamW(model.parameters(), **OPTIONS), torch.optim.AdamW(plain.parameters(), **OPTIONS)]
    return Twins(model, plain, optimizers)


@pytest.mark.long
@pytest.mark.parametrize("num_lengths", [10, pytest.param(20, marks=pytest.mark.slow)])
def test_many_lengths_are_exact_and_planned_once_each(num_lengths: int, twins: Twins) -> None:
    shapes = compiled_of(twins.model).session.shapes
    layouts = []
    for length in range(num_lengths + 2, 2, -1):
        twins.train(length)
        layouts.append(chunkc.plan_of(twins.model).layout)
    assert shapes.num_programs == 3, "one length, another one, and any"
    assert all(layout == layouts[0] for layout in layouts), "all shapes share one layout"
    before = chunkc.stats(twins.model)
    assert before["h2d_nbytes"] > 0, "the budget is meant to force moves"
    for length in (3, num_lengths + 1, 7):
        twins.train(length)
    assert chunkc.stats(twins.model)["num_compiles"] == before["num_compiles"]
    assert chunkc.stats(twins.model)["num_slot_allocations"] == 0
    twins.check()


def test_a_refused_shape_does_not_count(twins: Twins) -> None:
    """Activations that fit beside no arena: numbers, nothing changed, and room for shapes that do."""
    shapes = compiled_of(twins.model).session.shapes
    shapes.max_programs = 2
    twins.train(12)
    executor = compiled_of(twins.model).runtime.executor
    for length in (400, 500):
        with pytest.raises(
            chunkc.BudgetError, match=r"Reader, with the 2 graphs of all its calls, cannot be trained"
        ) as caught:
            twins.model(torch.zeros(2, length, dtype=torch.int64))
        assert caught.value.missing_nbytes == caught.value.min_device_nbytes - (176 << 10) > 0
    assert compiled_of(twins.model).runtime.executor is executor
    twins.train(8)
    twins.train(12)
    twins.check()
    assert (shapes.num_programs, len(shapes)) == (2, 2)


def test_another_shape_does_not_ask_for_the_memory_of_the_chunks_again(
    twins: Twins, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arena and homes are there already; only the activations of the new shape must be free on this machine."""
    twins.train(12)
    plan = chunkc.plan_of(twins.model)
    wanted = plan.memory.nonmodel_nbytes
    monkeypatch.setattr("chunkc.compiler.device_selection.free_host_nbytes", lambda: wanted)
    twins.train(8)
    monkeypatch.setattr("chunkc.compiler.device_selection.free_host_nbytes", lambda: wanted // 10)
    with pytest.raises(chunkc.HardwareError, match=f"where {wanted // 10} bytes are free"):
        twins.model(torch.zeros(2, 11, dtype=torch.int64))
    twins.train(8)
    twins.check()
