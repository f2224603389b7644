"""Forwards without gradients that make no program: gathered, exact, with the reason in the log, and nothing is held."""

from __future__ import annotations

import gc
import logging
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from evaluating import ROOMY, VOCABULARY, Tower, messages, tokens, twins
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import chunkc


@pytest.mark.long
def test_a_shape_gets_a_program_when_it_comes_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "chunkc")
    pair = twins()
    for length in (8, 12, 10):
        pair.evaluate(tokens(50, length))
    assert (pair.num_programs, pair.num_runs) == (0, 0)
    for length in (10, 12, 10):
        pair.evaluate(tokens(50, length))
    assert (pair.num_programs, pair.num_runs) == (2, 3)
    assert len(messages(caplog)) == 1 and "shapes are new" in messages(caplog)[0]


@pytest.mark.long
def test_past_the_bound_evaluations_are_gathered_with_one_message(caplog: pytest.LogCaptureFixture) -> None:
    pair = twins()
    pair.evaluator.shapes.max_programs = 1
    for _ in range(3):
        for length in (8, 12, 16, 20):
            pair.evaluate(tokens(50, length))
    assert (pair.num_programs, pair.num_runs) == (1, 2)
    (message,) = messages(caplog, logging.WARNING)
    assert "[4, 12]" in message and "1 are made" in message
    pair.train(2, length=6)
    pair.check()


def test_a_batch_too_large_for_the_budget_is_gathered_with_the_numbers(caplog: pytest.LogCaptureFixture) -> None:
    pair = twins()
    for _ in range(3):
        pair.evaluate(tokens(50, length=200))
    assert (pair.num_programs, pair.num_runs) == (0, 0)
    (message,) = messages(caplog, logging.WARNING)
    assert f"beside the arena of {chunkc.plan_of(pair.model).layout.arena_nbytes} bytes" in message
    assert f"gives {204 << 10}" in message
    pair.train(2)
    pair.check()


class Breaking(Tower):
    """Breaks its graph in evaluation only, twice, and reads a parameter that training does not."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.extra = nn.Parameter(torch.randn(VOCABULARY))

    def forward(self, tokens: torch.Tensor, extra: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        loss, logits = super().forward(tokens)
        if self.training:
            return loss, logits
        if self.mode == "breaks" and logits.sum().item() > 1e9:  # the line that breaks
            return loss, logits
        if self.mode == "unused":
            logits = logits * self.extra
        if self.mode == "mutates":
            self.head.bias.add_(0.5)
        if self.mode == "gradients":
            with torch.enable_grad():
                logits = logits + torch.autograd.grad((self.head.bias * 2).sum(), self.head.bias)[0]
        return loss, self.head.bias.unsqueeze(0) if self.mode == "returns" else logits


REASONS = {
    "breaks": r"not captured as one graph.*test_evaluation\.py.*the line that breaks|logits\.sum\(\)\.item\(\)",
    "unused": r"laid the model out.*'extra' was used nowhere then",
    "mutates": r"mutates its own parameters head\.bias",
    "returns": r"hands out unsqueeze.*a view or a cast of a parameter|does not compile",  # torch 2.11 stumbles itself
    "gradients": r"not captured as one graph|turns gradients on",
}


@pytest.mark.parametrize("mode", REASONS)
def test_a_forward_that_makes_no_program_is_gathered_with_the_reason(
    mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        pair = twins(plain=Breaking(mode))
    pair.model.eval(), pair.plain.eval()
    for _ in range(3):
        pair.evaluate(tokens(50))
    assert (pair.num_programs, pair.num_runs) == (0, 0)
    (message,) = messages(caplog, logging.WARNING)
    assert re.search(REASONS[mode], message), message
    pair.check()
    pair.model.train(), pair.plain.train()
    pair.train(2)
    pair.check()


class Cache:
    """An argument of a kind of its own, which the model ignores."""


def test_other_arguments_are_gathered_and_not_held(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "chunkc")
    pair = twins()
    held = []
    for _ in range(4):
        cache, inputs = Cache(), tokens(50)
        held += [weakref.ref(cache), weakref.ref(inputs)]
        pair.evaluate(inputs, cache)
    assert (pair.num_programs, pair.num_runs, len(pair.evaluator.shapes)) == (0, 0, 0)
    assert [m for m in messages(caplog) if "key-value caches" in m] == messages(caplog)
    assert len(messages(caplog)) == 1
    for _ in range(3):
        inputs = tokens(50)
        held.append(weakref.ref(inputs))
        pair.evaluate(inputs)
    del cache, inputs
    gc.collect()
    assert pair.num_runs == 2
    assert all(reference() is None for reference in held)


def test_dynamo_switched_off() -> None:
    pair = twins(ROOMY)
    with torch._dynamo.config.patch(disable=True):
        for seed in (50, 51, 52):
            pair.evaluate(tokens(seed))
    with torch.compiler.set_stance("force_eager"):
        for seed in (50, 51, 52):
            pair.evaluate(tokens(seed))
    assert (pair.num_programs, pair.num_runs) == (0, 0)
    pair.check()


@pytest.mark.parametrize("how", ["vmap", "mode"])
def test_transforms_and_modes_see_the_operators(how: str) -> None:
    pair = twins(ROOMY)
    pair.model.eval(), pair.plain.eval()
    pair.evaluate(tokens(50)), pair.evaluate(tokens(50))
    run: Callable[[nn.Module], Any]
    if how == "mode":

        def run(model: nn.Module) -> Any:
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                model(tokens(50))
            return counter.get_total_flops()

        assert run(pair.model) == run(pair.plain) > 0
    else:

        def run(model: nn.Module) -> Any:
            with torch.no_grad():
                return torch.vmap(lambda t: model(t)[1])(torch.stack([tokens(50), tokens(51)]))

        torch.testing.assert_close(run(pair.model), run(pair.plain), rtol=1e-5, atol=1e-5)
    pair.check()
