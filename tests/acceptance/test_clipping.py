"""Case 5: clipping by the global norm equals torch's, with all overlap on, wherever updates run.

The same loop clips by ``chunkc.clip_grad_norm_``, by an optimizer with ``max_grad_norm=``, and by torch; the streams of
the device are slow, so that updates run long after the call that clipped them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from clipping import (
    DELAYED,
    NAME,
    PLACES,
    RECIPE,
    check_clipping,
    check_gradients,
    check_moments,
    check_shown,
    clip,
    clipping,
    smallest,
    step,
    telling_norm,
    torch_clip,
    train_clipped,
)
from models import CASES
from overflows import Poisoned, poisonous
from pair import MIXED, Pair, batch
from plan_runner import GetRunner, Setup, cuts_of
from torch import nn
from training import assert_same_bits, assert_same_semantics

import chunkc
from chunkc.compiler.compiled_model import compiled_of
from chunkc.errors import ChunkcError
from chunkc.passes import PlanOptions
from chunkc.runtime.model.model import ModelRuntime


@pytest.fixture(scope="module")
def max_norm() -> float:
    return telling_norm()


@pytest.mark.long
@pytest.mark.parametrize("place", PLACES)
def test_clipping_equals_torch(place: str, runner_of: GetRunner, max_norm: float) -> None:
    check_clipping(runner_of(NAME), place, max_norm)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_placement_changes_no_bit_of_a_clipped_run(dtype: torch.dtype, runner_of: GetRunner, max_norm: float) -> None:
    """Acceptance (a), whatever chunks the norm was taken over."""
    runner = runner_of(NAME, dtype)

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return chunkc.AdamW(model.parameters(), **RECIPE.options, max_grad_norm=max_norm)

    found = runner.train(replace(smallest(runner), settings=DELAYED), RECIPE, make)
    cuts, chunk_numel = cuts_of(runner.plan), runner.plan.layout.chunk_numel
    whole = runner.train(Setup(PlanOptions(os_home="device", cuts=cuts), host_arithmetic=True), RECIPE, make)
    assert runner.plan.layout.chunk_numel != chunk_numel
    assert_same_bits(found, whole)


class Forgetful(ModelRuntime):
    """Clips for the eye only: the step is not told."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        clip = self.clipping.clip

        def forget(max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
            norm = clip(max_norm, norm_type)
            self.gradients.factor = None
            return norm

        self.clipping.clip = forget


def test_a_dropped_factor_is_noticed(runner_of: GetRunner, max_norm: float) -> None:
    runner, (wanted, _) = runner_of(NAME), train_clipped(max_norm)
    setup = replace(smallest(runner), make_runtime=Forgetful)
    found = runner.train(setup, RECIPE, clipping(max_norm, [], chunkc.AdamW, chunkc.clip_grad_norm_))
    with pytest.raises(AssertionError, match=r"(parameters|exp_avg|exp_avg_sq): .* is off"):
        assert_same_semantics(found, wanted)


@pytest.fixture(scope="module", params=["resident", "moving", "mixed"])
def captured(request: pytest.FixtureRequest) -> Pair:
    """A model that clipped once, so that its plan measures, in three places."""
    hw = {"resident": "emulated-64m-1g", "moving": "emulated-448k-16m", "mixed": "emulated-645k-16m"}[request.param]
    wishes = {"mixed": {**MIXED, "tracks_grad_norm": True}, "moving": {"max_slots": 7}}  # which leave room for norms
    found = Pair(hw, wishes=wishes.get(request.param))
    backward(found)
    clip(found, 0.1)
    step(found)
    assert all(count > 0 for count in found.kinds().values()) or request.param != "mixed"
    return found


@pytest.fixture
def pair(captured: Pair) -> Pair:
    """Both sides as at the beginning."""
    captured.restart()
    return captured


def backward(pair: Pair, seed: int = 0) -> None:
    for model in (pair.model, pair.plain):
        model(*batch(seed)).backward()


@pytest.mark.parametrize("share", [0.999, 1.001, 0.05])
def test_just_below_and_just_above(pair: Pair, share: float) -> None:
    """The norm is returned, gradients show what torch's show, and the step takes them once."""
    norm = float(torch.linalg.vector_norm(torch.stack(plain_norms(pair))))
    backward(pair, 1)
    clip(pair, share * norm)
    check_gradients(pair)
    step(pair)
    check_moments(pair)


def plain_norms(pair: Pair) -> list[torch.Tensor]:
    """Norms of the gradients that the plain model is about to have; it stays as it is."""
    grads = torch.autograd.grad(pair.plain(*batch(1)), list(pair.plain.parameters()))
    return [torch.linalg.vector_norm(g) for g in grads]


def test_clipping_twice(pair: Pair) -> None:
    """The second call sees clipped gradients; the step applies both factors."""
    backward(pair, 1)
    clip(pair, 0.5)
    clip(pair, 0.01)
    check_gradients(pair)
    step(pair)
    check_moments(pair)


@pytest.mark.parametrize("norm_type", [float("inf"), 1.0, 3.0])
def test_other_norms(pair: Pair, norm_type: float) -> None:
    backward(pair, 1)
    clip(pair, 0.01, norm_type)
    check_gradients(pair)
    step(pair)
    check_moments(pair)


def test_a_later_backward_and_zero_grad_discard_a_factor(pair: Pair) -> None:
    backward(pair, 1)
    clip(pair, 0.001)
    for model in (pair.model, pair.plain):
        model.zero_grad()
    backward(pair, 2)
    check_gradients(pair)
    step(pair)
    check_moments(pair)


def test_parameters_without_a_gradient_do_not_count(pair: Pair) -> None:
    """Set to None after backward: neither in the norm nor stepped."""
    backward(pair, 1)
    for model in (pair.model, pair.plain):
        model.head.weight.grad = None
    clip(pair, 0.05)
    step(pair)
    check_moments(pair)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("assigns", [False, True])
def test_gradients_that_are_written_to(pair: Pair, when: str, assigns: bool) -> None:
    """In place and by assignment, before and after clipping: what is written is what is stepped."""
    backward(pair, 1)
    for act in ("write", "clip") if when == "before" else ("clip", "write"):
        if act == "clip":
            clip(pair, 0.05)
            continue
        for model in (pair.model, pair.plain):
            model.head.bias.grad.mul_(3.0)
            if assigns:
                model.head.weight.grad = torch.full_like(model.head.weight.detach(), 1e-3)
    step(pair)
    check_moments(pair)


def test_nothing_waits_and_the_plan_is_what_happens(pair: Pair) -> None:
    """Counts of a steady state stay zero, the returned norm unread; actions run in the plan's order."""
    names = ("num_unasked_syncs", "num_slot_allocations", "num_compiles")
    counts = []
    for seed in range(4):
        backward(pair, seed)
        chunkc.clip_grad_norm_(pair.model, 0.1)
        pair.optimizer.step()
        pair.optimizer.zero_grad()
        if seed in (0, 3):
            counts.append([chunkc.stats(pair.model)[name] for name in names])
    assert counts[0] == counts[1], "the first of these goes over to the plan that measures, and joins once"
    executor = compiled_of(pair.model).runtime.executor
    executor.trace = []
    backward(pair, 4)
    chunkc.clip_grad_norm_(pair.model, 0.1)
    pair.optimizer.step()
    plan = chunkc.plan_of(pair.model)
    programs = [plan.program(name) for name in ("forward", "backward", "step")]
    wanted = [str(a) for program in programs for a in program.without_begins().actions]
    assert executor.trace == wanted, "every step was clipped, so that no update begins before its step"
    assert any(text.startswith("norm") for text in wanted) and any(text.startswith("decide") for text in wanted)


def test_gradients_read_one_by_one_are_waited_for(pair: Pair) -> None:
    """The test above would notice: such a wait is none that the script asked for."""
    backward(pair, 1)
    compiled_of(pair.model).runtime.gradients.measured = None
    before = chunkc.stats(pair.model)["num_unasked_syncs"]
    clip(pair, 0.05)
    assert chunkc.stats(pair.model)["num_unasked_syncs"] > before
    step(pair)
    check_moments(pair)


def test_a_program_that_trains_fewer_parameters() -> None:
    """Those that it leaves out share chunks with others, and are no gradients."""

    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = (nn.Linear(24, 24) for _ in range(3))

        def forward(self, x: torch.Tensor, y: torch.Tensor, *, is_deep: bool) -> torch.Tensor:
            hidden = torch.tanh(self.first(x))
            hidden = hidden + self.second(hidden) if is_deep else hidden
            return (self.last(hidden) - y).square().mean()

    pair = Pair("emulated-64m-1g", Optional())
    data = torch.randn(4, 24), torch.randn(4, 24)
    for is_deep in (True, True, False, False, True):
        for model in (pair.model, pair.plain):
            model(*data, is_deep=is_deep).backward()
        clip(pair, 0.05, rtol=2e-5)
        check_gradients(pair, rtol=1e-4, atol=1e-6)
        step(pair)
        check_moments(pair)
    assert len(chunkc.plan_of(pair.model).layout.chunks) == 1


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_frozen_unused_tied_and_empty_parameters(norm_type: float) -> None:
    """``odd`` has all of them; norm, gradients and moments of the first step."""
    model, other = CASES[NAME].build(), CASES[NAME].build()
    compiled = chunkc.compile(model, "emulated-64m-1g", dtype=torch.float32, backend="eager")
    optimizer = chunkc.AdamW(compiled.parameters(), max_grad_norm=1.0)
    for found in (compiled, other):
        found(**CASES[NAME].batches()[0]).backward()
    wanted = torch.nn.utils.clip_grad_norm_([p for p in other.parameters() if p.numel()], 0.2, norm_type)
    assert wanted > 0.4
    torch.testing.assert_close(chunkc.clip_grad_norm_(compiled, 0.2, norm_type), wanted, rtol=2e-6, atol=0)
    assert chunkc.plan_of(compiled).tracks_grad_norm, "an optimizer that clips is known before the first plan"
    check_shown(compiled, other)
    optimizer.max_grad_norm = None
    optimizer.step()
    ours = dict(zip(compiled.parameters(), exp_avg_by_place(optimizer, compiled), strict=True))
    for param, theirs in zip(compiled.parameters(), other.parameters(), strict=True):
        assert (ours[param] is None) == (theirs.grad is None)
        if theirs.grad is not None:
            torch.testing.assert_close(ours[param], 0.1 * theirs.grad, rtol=1e-5, atol=1e-9)


def exp_avg_by_place(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[torch.Tensor | None]:
    """First moments in the order of parameters; None where there is no state."""
    states = optimizer.state_dict()["state"]
    return [states[i]["exp_avg"] if i in states else None for i, _ in enumerate(model.parameters())]


@pytest.mark.parametrize("kind", [0, 1], ids=["nan", "inf"])
def test_what_is_not_finite_is_clipped_as_torch_clips_it(kind: int) -> None:
    """Without a loss scale nothing is skipped: an infinite norm makes zeros, and NaN of what was infinite."""
    pair = Pair("emulated-645k-16m", Poisoned(), {**MIXED, "tracks_grad_norm": True})
    data = (*batch(0), poisonous(kind))
    for model in (pair.model, pair.plain):
        model(*data).backward()
    norm, wanted = chunkc.clip_grad_norm_(pair.model, 0.1), torch_clip(pair.plain, 0.1)
    torch.testing.assert_close(norm, wanted, equal_nan=True)
    assert not wanted.isfinite()
    check_shown(pair.model, pair.plain)
    pair.both(lambda _, optimizer: optimizer.step())
    for ours, theirs in zip(pair.model.parameters(), pair.plain.parameters(), strict=True):
        torch.testing.assert_close(ours.detach().clone(), theirs.detach(), rtol=0, atol=1e-5, equal_nan=True)


def test_what_cannot_be_clipped() -> None:
    """No gradients: 0, as torch says. Gradients that are stepped, and models of others: refused."""
    pair = Pair("emulated-64m-1g")
    assert float(chunkc.clip_grad_norm_(pair.model, 1.0)) == 0.0
    backward(pair)
    pair.optimizer.step()
    with pytest.raises(ChunkcError, match=r"step\(\) was already called"):
        chunkc.clip_grad_norm_(pair.model, 1.0)
    with pytest.raises(ChunkcError, match="not compiled by chunkc"):
        chunkc.clip_grad_norm_(pair.plain, 1.0)


def test_a_forward_that_breaks_is_clipped_as_a_whole() -> None:
    """Gradients of several graphs and of eager operators between them, in the first iteration and later ones."""

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(24, 48), nn.Linear(48, 24)
            self.scale = nn.Parameter(torch.full((48,), 0.7))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x.float())
            torch._dynamo.graph_break()
            return (self.last(torch.tanh(hidden) * self.scale) - y.float()).square().mean()

    pair = Pair("emulated-64m-1g", Broken())
    data = torch.randn(4, 24), torch.randn(4, 24)
    for _ in range(4):
        for model in (pair.model, pair.plain):
            model(*data).backward()
        clip(pair, 0.05)
        step(pair)
        check_moments(pair)
