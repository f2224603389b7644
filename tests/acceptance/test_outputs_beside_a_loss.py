"""Outputs beside a scalar loss: backward counts no gradients of them.

It is right all the same where a loss uses them. Every element is compared with plain PyTorch.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
import torch
from heads import WIDTH, Loss, rows
from pair import Pair
from torch import nn

import chunkc
from chunkc.compiler.compiled_model import compiled_of

PLACES = {"resident": "emulated-64m-1g", "moving": "emulated-96k-16m"}
SAID = "a loss uses outputs beside the scalar one"


class WithLogits(nn.Module):
    """As models of transformers with labels: the loss, and what it is made from."""

    def __init__(self, num_classes: int = 5, depth: int = 1) -> None:
        super().__init__()
        inner = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(depth)]
        self.trunk = nn.Sequential(nn.Linear(16, WIDTH), nn.Tanh(), *inner)
        self.head = nn.Linear(WIDTH, num_classes)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(self.trunk(x))
        return logits.pow(2).mean(), logits


def scalar(outputs: Any) -> torch.Tensor:
    return outputs[0]  # type: ignore[no-any-return]


def distilled(outputs: Any) -> torch.Tensor:
    return outputs[0] + (outputs[1] - 0.5).abs().mean()  # type: ignore[no-any-return]


def logits_only(outputs: Any) -> torch.Tensor:
    return outputs[1].exp().mean()  # type: ignore[no-any-return]


def loss_on(loss: Loss, step: int, model: nn.Module) -> torch.Tensor:
    return loss(model(rows(step)))


def train(pair: Pair, losses: list[Loss]) -> None:
    for step, loss in enumerate(losses):
        pair.step_on(partial(loss_on, loss, step))
    pair.check()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_losses_that_use_outputs_beside_the_scalar(place: str, backend: str, caplog: pytest.LogCaptureFixture) -> None:
    """From any step on; the plan is made again once, and then serves losses of either kind."""
    pair = Pair(PLACES[place], WithLogits(), backend=backend)
    with caplog.at_level(logging.INFO, "chunkc"):
        train(pair, [scalar, scalar, distilled, logits_only, scalar, distilled])
    assert caplog.text.count(SAID) == 1
    assert (chunkc.stats(pair.model)["h2d_nbytes"] > 0) == (place == "moving")


def test_micro_batches_and_forwards_that_are_alive() -> None:
    pair = Pair(PLACES["moving"], WithLogits(), accumulate=2)
    for step in range(3):
        for model in (pair.model, pair.plain):
            outputs = [model(rows(2 * step + part)) for part in range(2)]
            (distilled if step else scalar)(outputs[0]).backward()
            (logits_only if step == 1 else scalar)(outputs[1]).backward()
        for optimizer in (pair.optimizer, pair.plain_optimizer):
            optimizer.step()
            optimizer.zero_grad()
    pair.check()


def test_values_in_host_memory_come_back_for_another_plan() -> None:
    """The plan that takes all tangents moves other values than that of the forward under way."""
    pair = Pair("emulated-64m-1g", WithLogits(depth=8), {"moved_share": 1.0, "os_home": "host"})
    pair.step_on(lambda model: scalar(model(rows(0, 64, 16))))
    moved = [value.nbytes for value in chunkc.plan_of(pair.model).moves]
    pair.step_on(lambda model: distilled(model(rows(1, 64, 16))))
    pair.step_on(lambda model: distilled(model(rows(2, 64, 16))))
    pair.check()
    assert moved


class WithScaled(WithLogits):
    """Backward reads scales, which are saved before all else, for the second output only."""

    def __init__(self) -> None:
        super().__init__(depth=6)
        self.register_buffer("mix", torch.randn(2, 16, WIDTH))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales = [x @ mix for mix in self.mix]
        hidden = self.trunk(x)
        return self.head(hidden).pow(2).mean(), sum(hidden * scale for scale in scales)


def test_values_of_other_forwards_come_back_for_another_plan_too() -> None:
    pair = Pair("emulated-64m-1g", WithScaled(), {"os_home": "host"}, accumulate=2, activations="offload")
    for loss in (scalar, distilled, distilled):
        for model in (pair.model, pair.plain):
            outputs = [model(rows(part, 64, 16)) for part in range(2)]
            for one in outputs:
                loss(one).backward()
        for optimizer in (pair.optimizer, pair.plain_optimizer):
            optimizer.step()
            optimizer.zero_grad()
        assert chunkc.plan_of(pair.model).moves
    pair.check()


def test_values_that_do_not_fit_when_they_come_back_are_an_error_and_change_nothing() -> None:
    pair = Pair("emulated-64m-1g", WithLogits())
    pair.step_on(lambda model: scalar(model(rows(0))))
    graphs = compiled_of(pair.model).session.graphs
    ((entry, graph),) = graphs.graphs.items()
    before = entry.plan, graph.captured, graph.beside_nbytes, graph.is_in_flight
    with pytest.raises(chunkc.BudgetError, match=f"{1 << 30} bytes of saved values come back"):
        graphs.widen(entry, 1 << 30)
    assert before == (entry.plan, graph.captured, graph.beside_nbytes, graph.is_in_flight)
    pair.step_on(lambda model: distilled(model(rows(1))))
    graph.captured = before[1]
    graphs.widen(entry, 60 << 20)
    memory = chunkc.plan_of(pair.model).memory
    assert memory.device_peak_nbytes + (60 << 20) <= memory.device_budget_nbytes
    pair.step_on(lambda model: distilled(model(rows(2))))
    pair.check()


@pytest.mark.long
def test_sizes_that_come_later_are_planned_with_all_tangents_at_once(caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair("emulated-64m-1g", WithLogits())
    with caplog.at_level(logging.INFO, "chunkc"):
        for num_rows in (4, 5, 6, 7):
            pair.step_on(lambda model, n=num_rows: scalar(model(rows(n, n, 16))))  # type: ignore[misc]
        for num_rows in (8, 9, 10):
            pair.step_on(lambda model, n=num_rows: distilled(model(rows(n, n, 16))))  # type: ignore[misc]
    assert caplog.text.count(SAID) == 1
    pair.check()


def test_a_gradient_that_does_not_fit_is_an_error_and_changes_nothing() -> None:
    """Logits of 8 MiB: their gradient has no room, and without it there is."""
    pair = Pair("emulated-36m-1g", WithLogits(num_classes=512))
    batch = (1024, 16)
    pair.step_on(lambda model: scalar(model(rows(0, *batch))))
    with pytest.raises(chunkc.BudgetError, match="outputs beside the scalar one"):
        logits_only(pair.model(rows(1, *batch))).backward()
    pair.step_on(lambda model: scalar(model(rows(2, *batch))))
    pair.check()


def test_planning_ahead_counts_no_gradient_of_the_logits() -> None:
    """As the run's plan, whose bytes are those that it was measured to take."""
    example = (torch.empty(4, 1024, 16),)
    planned = chunkc.plan(
        WithLogits(512), "emulated-64m-1g", example_inputs=example, dtype=torch.float32, backend="eager"
    )
    pair = Pair("emulated-64m-1g", WithLogits(512), chunk_size="auto")
    pair.step_on(lambda model: scalar(model(rows(0, 1024, 16))))
    plan = chunkc.plan_of(pair.model)
    assert plan.digest() == planned.digest()
    stats = chunkc.stats(pair.model)
    assert stats["measured_peak_nbytes"] <= plan.memory.device_peak_nbytes
