"""Cases 4, 5 and 6 together: what is clipped, scaled or skipped is the sum over the micro-batches of a step.

Clipping equals torch's on a plain model that adds up in ``.grad``. In fp16 an infinite or NaN gradient of any
micro-batch skips the step, leaves p, m, v bit-unchanged, and the trace of scales is torch.amp.GradScaler's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from clipping import check_gradients, check_moments, clip, step
from overflows import (
    INTERVAL,
    Poisoned,
    assert_same_state,
    check_stepped,
    grow_soon,
    poisonous,
    scale_of,
    state_of,
)
from pair import MIXED, Pair, batch
from torch import nn

import chunkc
from chunkc.compiler.compiled_model import compiled_of
from chunkc.ir.actions import Op

NUM = 3
PLACES = {
    "resident": ("emulated-64m-1g", {}),
    "moving": ("emulated-640k-16m", {}),
    "mixed": ("emulated-645k-16m", {**MIXED, "tracks_grad_norm": True}),
}
MIXED_OFTEN = [*(pytest.param(p, marks=pytest.mark.slow) for p in ("resident", "moving")), "mixed"]
"""The mixed one updates in all three places."""
BAD = {(1, 0): 1, (3, 1): 0, (4, 2): 1}
"""The micro-batches with an infinite (1) or a NaN (0) gradient, as (step, number)."""


def make(place: str, model: nn.Module | None = None, **options: Any) -> Pair:
    hw, wishes = PLACES[place]
    return Pair(hw, model, wishes, accumulate=NUM, **options)


def add(pair: Pair, *numbers: int, length: int = 8) -> None:
    for number in numbers:
        pair.both(lambda model, _, number=number: model(*batch(number, length)).backward())


def clip_sums(pair: Pair, max_norm: float) -> float:
    """Parameters of both sides differ by rounding after some steps, and so do their gradients."""
    return clip(pair, max_norm, rtol=2e-5)


def check_sums(pair: Pair) -> None:
    check_gradients(pair, rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module", params=MIXED_OFTEN)
def captured(request: pytest.FixtureRequest) -> Pair:
    """A model that clipped once, so that its plan measures, in three places."""
    found = make(request.param)
    add(found, 0, 1)
    clip_sums(found, 0.1)
    step(found)
    add(found, 2)
    assert chunkc.plan_of(found.model).tracks_grad_norm
    assert (chunkc.stats(found.model)["planned_h2d_nbytes"] > 0) == (request.param != "resident")
    assert all(count > 0 for count in found.kinds().values()) or request.param != "mixed"
    step(found)
    return found


@pytest.fixture
def pair(captured: Pair) -> Pair:
    """Both sides as at the beginning."""
    captured.restart()
    return captured


@pytest.mark.long(but="mixed-3")
@pytest.mark.parametrize("num", [1, 2, 3])
def test_windows_of_any_length_are_clipped_as_torch_clips_them(pair: Pair, num: int) -> None:
    for first in (1, 10):
        add(pair, *range(first, first + num))
        clip_sums(pair, 0.05)
        check_sums(pair)
        step(pair)
        check_moments(pair)


def test_the_norm_after_each_micro_batch(pair: Pair) -> None:
    """Of the sum so far; a bound that is not reached changes nothing."""
    norms = []
    for number in (1, 2, 3):
        add(pair, number)
        norms.append(clip_sums(pair, 1e9))
        check_sums(pair)
    step(pair)
    check_moments(pair)
    assert len(set(norms)) == 3


def test_a_micro_batch_after_clipping_adds_to_clipped_gradients(pair: Pair) -> None:
    add(pair, 1)
    clip_sums(pair, 0.05)
    add(pair, 2)
    check_sums(pair)
    clip_sums(pair, 0.04)
    step(pair)
    check_moments(pair)


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_forgets_what_was_clipped(pair: Pair, to_none: bool) -> None:
    add(pair, 1)
    clip_sums(pair, 0.001)
    pair.both(lambda _, optimizer: optimizer.zero_grad(set_to_none=to_none))
    add(pair, 2, 3)
    check_sums(pair)
    clip_sums(pair, 0.05)
    step(pair)
    check_moments(pair)


@pytest.mark.long
def test_what_comes_between_backward_and_clip_changes_no_norm(pair: Pair) -> None:
    """Other shapes in a window, and forwards and evaluations behind its last backward, have plans of their own."""

    def look(model: nn.Module, _: torch.optim.Optimizer) -> None:
        model(*batch(7, 6))
        with torch.no_grad():
            model(*batch(8))

    for lengths in ((8, 6), (6, 8), (5, 6, 8)):
        for number, length in enumerate(lengths):
            add(pair, number, length=length)
        pair.both(look)
        clip_sums(pair, 0.05)
        check_sums(pair)
        step(pair)
        check_moments(pair)


def test_gradients_written_and_taken_away_between_micro_batches(pair: Pair) -> None:
    def change(model: nn.Module, _: torch.optim.Optimizer) -> None:
        params = list(model.parameters())
        params[0].grad = None
        params[1].grad = torch.full(params[1].shape, 0.5)
        params[2].grad.mul_(3.0)

    add(pair, 1)
    clip_sums(pair, 0.05)
    pair.both(change)
    add(pair, 2)
    clip_sums(pair, 0.05)
    step(pair)
    check_moments(pair)


def test_nothing_waits_and_the_plan_is_what_happens(pair: Pair) -> None:
    """Each backward measures; the optimizer clips, and the norm stays unread."""
    pair.optimizer.max_grad_norm = 0.05

    def window(first: int) -> int:
        for number in range(first, first + NUM):
            pair.model(*batch(number)).backward()
        pair.optimizer.step()
        pair.optimizer.zero_grad()
        return chunkc.stats(pair.model)["num_unasked_syncs"]

    before = window(1)  # may follow a window of another shape, and join once
    executor = compiled_of(pair.model).runtime.executor
    executor.trace = []
    assert window(4) == before
    plan = chunkc.plan_of(pair.model)
    names = ["forward", "backward", *("forward", "accumulate") * (NUM - 1), "step"]
    assert [program.name for program in plan.iteration()] == names
    trace = [text for text in executor.trace if not text.startswith("begin")]
    assert trace == [str(action) for _, _, action in plan.labelled() if action.op is not Op.BEGIN]
    assert sum(text.startswith("norm") for text in executor.trace) == NUM * sum(pair.kinds().values())


def test_an_optimizer_that_clips(pair: Pair) -> None:
    pair.optimizer.max_grad_norm = 0.05
    for first in (1, 4, 7):
        add(pair, *range(first, first + NUM))
        torch.nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.05)
        step(pair)
        check_moments(pair)


# In fp16.


def inputs(window: int, number: int) -> tuple[torch.Tensor, ...]:
    kind = BAD.get((window, number))
    return (*batch(NUM * window + number), torch.zeros(192) if kind is None else poisonous(kind))


IS_BAD = tuple(any((window, number) in BAD for number in range(NUM)) for window in range(8))


def torch_trace(num_windows: int) -> list[float]:
    """Scales of torch.amp.GradScaler after each step, on a plain model with the same overflows."""
    torch.manual_seed(0)
    model = Poisoned()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", growth_interval=INTERVAL)
    found = []
    for window in range(num_windows):
        for number in range(NUM):
            scaler.scale(model(*inputs(window, number)) / NUM).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append(scaler.get_scale())
    return found


@pytest.mark.long
@pytest.mark.parametrize("place", MIXED_OFTEN)
def test_an_overflow_in_one_micro_batch_skips_the_step(place: str) -> None:
    """The first, one in the middle, or the last: nothing changes, and the trace of scales is torch's."""
    pair = make(place, Poisoned(), dtype=torch.float16)
    grow_soon(pair.model)
    found = []
    for window, is_bad in enumerate(IS_BAD):
        before = state_of(pair)
        for number in range(NUM):
            (pair.model(*inputs(window, number)) / NUM).backward()
        pair.optimizer.step()
        pair.optimizer.zero_grad()
        found.append(scale_of(pair.model))
        if is_bad:
            assert_same_state(state_of(pair), before)
        else:
            assert not torch.equal(state_of(pair)[0]["head.bias"], before[0]["head.bias"])
    assert found == torch_trace(len(IS_BAD))
    assert len(set(found)) > 2, "the scale never grew or never fell"
    counts = {float(s["step"]) for s in pair.optimizer.state_dict()["state"].values()}
    assert counts == {float(len(IS_BAD) - sum(IS_BAD))}
    assert chunkc.stats(pair.model)["num_unasked_syncs"] == 0


@pytest.fixture(scope="module")
def half() -> Pair:
    return make("moving", Poisoned(), dtype=torch.float16)


@pytest.fixture
def fp16(half: Pair) -> Pair:
    half.restart()
    half.optimizer.max_grad_norm = None
    compiled_of(half.model).runtime.clipping.is_scaled_outside = False
    return half


def good(number: int) -> tuple[torch.Tensor, ...]:
    return (*batch(number), torch.zeros(192))


def check_half(pair: Pair) -> None:
    """Gradients as ``param.grad`` shows them, within the precision of fp16."""
    largest = max(float(p.grad.abs().max()) for p in pair.plain.parameters())
    for p, q in zip(pair.model.parameters(), pair.plain.parameters(), strict=True):
        assert p.grad.dtype is torch.float16
        torch.testing.assert_close(p.grad.float(), q.grad, rtol=0, atol=2**-7 * largest)


def test_gradients_in_between_are_shown_unscaled_and_may_be_changed(fp16: Pair) -> None:
    """Clipped, read and written between micro-batches: the next one adds scaled gradients to scaled ones."""
    fp16.both(lambda model, _: model(*good(1)).backward())
    check_half(fp16)
    norm = chunkc.clip_grad_norm_(fp16.model, 0.5)
    wanted = torch.nn.utils.clip_grad_norm_(fp16.plain.parameters(), 0.5)
    assert float(norm) == pytest.approx(float(wanted), rel=5e-3)
    fp16.both(lambda model, _: model(*good(2)).backward())
    check_half(fp16)
    fp16.both(lambda model, _: model.head.weight.grad.mul_(2.0))
    fp16.both(lambda model, _: model(*good(3)).backward())
    check_half(fp16)


def test_gradients_that_were_there_before_are_scaled_too(fp16: Pair) -> None:
    """What the script puts into ``param.grad``, or eager operators do, counts as in fp32."""
    for model in (fp16.model, fp16.plain):
        model.head.bias.grad = torch.full_like(model.head.bias.detach(), 0.25)
    for number in (1, 2):
        fp16.both(lambda model, _, number=number: model(*good(number)).backward())
        check_half(fp16)
    fp16.both(lambda _, optimizer: optimizer.step())
    check_stepped(fp16)


def test_fp16_adds_up_and_trains_as_fp32_does(fp16: Pair) -> None:
    """Windows of two with clipping in the optimizer: losses within fp16's precision of fp32's."""
    fp16.optimizer.max_grad_norm = 1.0
    losses: list[list[float]] = [[], []]
    for window in range(10):
        for which, (model, optimizer) in enumerate(((fp16.model, fp16.optimizer), (fp16.plain, fp16.plain_optimizer))):
            for number in (0, 1):
                loss = model(*good((window + number) % 3)) / 2
                loss.backward()
                losses[which].append(loss.item())
            if which:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)
    assert losses[0][-1] < 0.9 * losses[0][0]


@pytest.mark.parametrize("clips", [False, True])
def test_a_script_scales_by_grad_scaler(fp16: Pair, clips: bool) -> None:
    scaler, found = chunkc.GradScaler(growth_interval=INTERVAL), []
    for window, is_bad in enumerate(IS_BAD[:6]):
        before = state_of(fp16)
        for number in range(NUM):
            scaler.scale(fp16.model(*inputs(window, number)) / NUM).backward()
        if clips:
            scaler.unscale_(fp16.optimizer)
            chunkc.clip_grad_norm_(fp16.model, 0.1)
        scaler.step(fp16.optimizer)
        scaler.update()
        fp16.optimizer.zero_grad()
        found.append(scaler.get_scale())
        if is_bad:
            assert_same_state(state_of(fp16), before)
    assert found == torch_trace(6)


def test_an_overflow_that_was_seen_counts_though_a_micro_batch_follows(fp16: Pair) -> None:
    """As with torch's scaler: ``unscale_`` looks, and the step goes by what it found."""
    scaler, before = chunkc.GradScaler(init_scale=1024.0), state_of(fp16)
    scaler.scale(fp16.model(*batch(0), poisonous(1))).backward()
    scaler.unscale_(fp16.optimizer)
    fp16.model(*good(1)).backward()
    scaler.step(fp16.optimizer)
    scaler.update()
    fp16.optimizer.zero_grad()
    assert_same_state(state_of(fp16), before)
    assert scaler.get_scale() == 512.0


def test_an_overflow_that_was_given_up_is_forgotten(fp16: Pair) -> None:
    """Seen by ``unscale_``, then discarded by ``zero_grad``: the next window is stepped."""
    scaler, before = chunkc.GradScaler(init_scale=1024.0), state_of(fp16)
    scaler.scale(fp16.model(*batch(0), poisonous(1))).backward()
    scaler.unscale_(fp16.optimizer)
    scaler.update()
    fp16.optimizer.zero_grad()
    scaler.scale(fp16.model(*good(1))).backward()
    fp16.optimizer.step()
    assert not torch.equal(state_of(fp16)[0]["head.bias"], before[0]["head.bias"])


def test_micro_batches_that_the_model_and_the_script_scale(fp16: Pair) -> None:
    """Each is what ``param.grad`` would show: a script that begins to scale adds to gradients without a scale."""
    scaler = chunkc.GradScaler(init_scale=8.0)
    for model in (fp16.model, fp16.plain):
        model(*good(0)).backward()
    scaler.scale(fp16.model(*good(1))).backward()
    (8.0 * fp16.plain(*good(1))).backward()
    check_half(fp16)
