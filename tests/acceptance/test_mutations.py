"""Tests of the tests: both equalities must refuse a runtime that makes one of four small mistakes in its updates.

Each mistake is made between the optimizer and the step program, by a runtime that stands in for the real one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from placements import Identities, smallest
from plan_runner import GetRunner
from training import PLACEMENT, SEMANTICS, GetPlain, assert_same_bits, assert_same_semantics

from chunkc.runtime.model.model import ModelRuntime
from chunkc.runtime.update.rules import AdamHyper

Hypers, Steps = Mapping[int, AdamHyper], Mapping[int, int]
LONG_AGO = 1_000_000
BITS, ELEMENTS = replace(PLACEMENT, num_steps=6), replace(SEMANTICS, num_steps=8)


class FaithfulRuntime(ModelRuntime):
    """Changes nothing, so that a mutant is refused for its mistake."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        step = self.steps.step
        self.steps.step = lambda hypers, steps: step(*self.mutate(hypers, steps))

    def mutate(self, hypers: Hypers, steps: Steps) -> tuple[Hypers, Steps]:
        return hypers, steps


class DroppedChunk(FaithfulRuntime):
    """Forgets, once, to update the parameters of the chunk with fewest elements in use."""

    has_dropped = False

    def mutate(self, hypers: Hypers, steps: Steps) -> tuple[Hypers, Steps]:
        if self.has_dropped or self.layout is None:
            return hypers, steps
        self.has_dropped = True
        updated = [c for c in self.layout.chunks if any(p in hypers for p in self.layout.params_of(c.index))]
        chunk = min(updated, key=lambda c: c.used_numel)
        dropped = set(self.layout.params_of(chunk.index))
        return {p: h for p, h in hypers.items() if p not in dropped}, steps


class NoBiasCorrection(FaithfulRuntime):
    """Counts steps from long ago, where 1 - beta ** t is 1; moments start at zero all the same."""

    def mutate(self, hypers: Hypers, steps: Steps) -> tuple[Hypers, Steps]:
        return hypers, {p: t if t == 1 else t + LONG_AGO for p, t in steps.items()}


class NoWeightDecay(FaithfulRuntime):
    """Forgets the weight decay."""

    def mutate(self, hypers: Hypers, steps: Steps) -> tuple[Hypers, Steps]:
        return {p: replace(h, weight_decay=0.0) for p, h in hypers.items()}, steps


class StaleLearningRate(FaithfulRuntime):
    """Updates with 95 % of the learning rate."""

    def mutate(self, hypers: Hypers, steps: Steps) -> tuple[Hypers, Steps]:
        return {p: replace(h, lr=0.95 * h.lr) for p, h in hypers.items()}, steps


MUTANTS = (DroppedChunk, NoBiasCorrection, NoWeightDecay, StaleLearningRate)
MODELS = ("odd", pytest.param("llama", marks=pytest.mark.slow))


@pytest.mark.long(but="NoBiasCorrection-odd")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_placement_equality_refuses(
    mutant: Callable[..., ModelRuntime], name: str, runner_of: GetRunner, identities: Identities
) -> None:
    runner = runner_of(name)
    found = runner.train(replace(smallest(runner), make_runtime=mutant), BITS)
    wanted = identities.of(runner, runner.plan, BITS)
    with pytest.raises(AssertionError, match="differ"):
        assert_same_bits(found, wanted)
    found.losses = list(wanted.losses)
    with pytest.raises(AssertionError, match="params differ"):
        assert_same_bits(found, wanted)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_semantic_equality_refuses(
    mutant: Callable[..., ModelRuntime], name: str, runner_of: GetRunner, plain_of: GetPlain
) -> None:
    runner, wanted = runner_of(name), plain_of(name, ELEMENTS)
    found = runner.train(replace(smallest(runner), make_runtime=mutant), ELEMENTS)
    with pytest.raises(AssertionError, match=r"parameters: .* is off"):
        assert_same_semantics(found, wanted)


def test_both_equalities_accept_the_double_that_changes_nothing(
    runner_of: GetRunner, identities: Identities, plain_of: GetPlain
) -> None:
    runner = runner_of("odd")
    setup = replace(smallest(runner), make_runtime=FaithfulRuntime)
    found = runner.train(setup, BITS)
    assert_same_bits(found, identities.of(runner, runner.plan, BITS))
    assert_same_semantics(runner.train(setup, ELEMENTS), plain_of("odd", ELEMENTS))
