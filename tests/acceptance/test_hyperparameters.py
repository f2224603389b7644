"""Case 3: parameter groups, schedules and groups that change, while updates of the step before may still run.

The streams of the device are slow, so that ``step()`` returns long before its updates are done; a scheduler that then
changes the learning rate must not reach them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from models import CASES, loss_of
from placements import smallest
from plan_runner import GetRunner, PlanRunner, Setup
from torch import nn
from training import (
    SEMANTICS,
    AfterStep,
    Trained,
    assert_same_semantics,
    read_state,
    train_measured,
)

import chunkc
from chunkc.runtime.devices.debug_settings import DebugSettings

RECIPE = replace(SEMANTICS, num_steps=6)
SLOW = DebugSettings(poison=True, max_delay_ms=0.1, seed=5)
PAIRS = [(chunkc.AdamW, torch.optim.AdamW), (chunkc.Adam, torch.optim.Adam)]
NAME = "odd"


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """As trainers do: no decay for vectors, and another learning rate for the embedding."""
    named = dict(model.named_parameters())
    embedding = named.pop("embed.weight")
    vectors = [p for p in named.values() if p.dim() < 2]
    matrices = [p for p in named.values() if p.dim() >= 2]
    return [
        {"params": matrices, "weight_decay": 0.3},
        {"params": vectors, "weight_decay": 0.0, "lr": 3e-3},
        {"params": [embedding], "lr": 2e-4, "betas": (0.8, 0.99)},
    ]


def _slow(runner: PlanRunner) -> Setup:
    return replace(smallest(runner), settings=SLOW)


class Schedule:
    """Steps a scheduler right after ``optimizer.step()``; learning rates differ in every step."""

    def __init__(self) -> None:
        self._scheduler: Any = None

    def __call__(self, step: int, optimizer: torch.optim.Optimizer) -> None:
        if self._scheduler is None:
            factors = [lambda s: 0.5**s, lambda s: 1 + s, lambda s: 1 / (1 + s)]
            lrs = [g["lr"] for g in optimizer.param_groups]
            self._scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factors[: len(lrs)])
        self._scheduler.step()


def _both(
    runner: PlanRunner, pair: tuple[Any, Any], after_step: tuple[AfterStep | None, AfterStep | None] = (None, None)
) -> tuple[Trained, Trained]:
    """The same training by chunkc and by torch."""
    found = runner.train(_slow(runner), RECIPE, lambda m: pair[0](_groups(m), **RECIPE.options), after_step[0])
    model = CASES[NAME].build()
    optimizer = pair[1](_groups(model), **RECIPE.options)
    return found, train_measured(model, CASES[NAME].batches(), optimizer, RECIPE, after_step[1])


@pytest.mark.parametrize("pair", PAIRS)
def test_groups_have_their_own_hyperparameters(pair: tuple[Any, Any], runner_of: GetRunner) -> None:
    assert_same_semantics(*_both(runner_of(NAME), pair))


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
@pytest.mark.parametrize("pair", PAIRS)
def test_hyperparameters_are_those_at_the_call_of_step(pair: tuple[Any, Any], runner_of: GetRunner) -> None:
    """A new learning rate in every step, set while updates run, also when all have finished first."""
    runner = runner_of(NAME)
    found, wanted = _both(runner, pair, (Schedule(), Schedule()))
    assert_same_semantics(found, wanted)
    drained = Schedule()

    def drain_first(step: int, optimizer: torch.optim.Optimizer) -> None:
        runner.compiled.runtime.parameters.drain()
        drained(step, optimizer)

    again = runner.train(_slow(runner), RECIPE, lambda m: pair[0](_groups(m), **RECIPE.options), drain_first)
    assert_same_semantics(again, wanted)
    for name, value in found.params.items():
        assert torch.equal(value, again.params[name])


def test_changed_groups_are_honoured(runner_of: GetRunner) -> None:
    """Every hyperparameter of a group, changed by hand between steps."""

    def change(step: int, optimizer: torch.optim.Optimizer) -> None:
        group = optimizer.param_groups[step % 3]
        group.update(weight_decay=0.05 * step, betas=(0.9 - 0.01 * step, 0.98), eps=1e-4 * (1 + step))

    assert_same_semantics(*_both(runner_of(NAME), PAIRS[0], (change, change)))


def test_groups_added_before_the_first_step(runner_of: GetRunner) -> None:
    runner, model = runner_of(NAME), CASES[NAME].build()

    def build(kind: Any, model: nn.Module) -> torch.optim.Optimizer:
        first, *others = _groups(model)
        optimizer = kind([first], **RECIPE.options)
        for group in others:
            optimizer.add_param_group(group)
        return optimizer

    found = runner.train(_slow(runner), RECIPE, lambda m: build(chunkc.AdamW, m))
    wanted = train_measured(model, CASES[NAME].batches(), build(torch.optim.AdamW, model), RECIPE)
    assert_same_semantics(found, wanted)


def test_group_that_is_missing_refuses_the_step_until_it_is_added(runner_of: GetRunner) -> None:
    """Nothing changes by the refused step; with the group added the same gradients are stepped."""
    runner, model, recipe = runner_of(NAME), CASES[NAME].build(), replace(RECIPE, num_steps=1)
    wanted = train_measured(model, CASES[NAME].batches(), torch.optim.AdamW(_groups(model), **RECIPE.options), recipe)
    runner.reset(_slow(runner))
    first, second, third = _groups(runner.model)
    optimizer = chunkc.AdamW([first, second], **RECIPE.options)
    before = {n: p.detach().clone() for n, p in runner.model.named_parameters()}
    loss = loss_of(runner.model(**runner.batches[0]))
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in runner.model.named_parameters() if p.grad is not None}
    with pytest.raises(chunkc.ChunkcError, match="embed"):
        optimizer.step()
    for name, p in runner.model.named_parameters():
        assert torch.equal(p.detach().clone(), before[name])
        assert p.grad is None or torch.equal(p.grad.clone(), gradients[name])
    optimizer.add_param_group(third)
    optimizer.step()
    found = Trained(losses=[loss.item()], gradients=gradients)
    read_state(found, runner.model, optimizer)
    assert_same_semantics(found, wanted)
