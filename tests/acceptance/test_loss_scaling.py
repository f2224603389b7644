"""Case 6 on one rank: loss scaling in fp16, built in and by ``chunkc.GradScaler``.

An infinite or NaN gradient in one parameter leaves p, m, v bit-unchanged and counts no step; the trace of scales is
torch.amp.GradScaler's, and the next step is normal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fp16_training import BAD, PLACES, built_in, inputs, make, restart
from overflows import INTERVAL, Poisoned, assert_same_state, check_stepped, grow_soon, scale_of, state_of
from pair import SMALL, Pair, Tower, batch
from torch import nn

import chunkc
from chunkc.compiler.compiled_model import compiled_of
from chunkc.errors import ChunkcError


@pytest.fixture(scope="module")
def made() -> dict[str, Pair]:
    """By place, each compiled once."""
    return {}


@pytest.fixture
def at(made: dict[str, Pair]) -> Callable[[str], Pair]:
    """``at(place)``: a model in fp16, as at the beginning."""

    def get(place: str) -> Pair:
        if place not in made:
            made[place] = make(place)
        restart(made[place])
        return made[place]

    return get


@pytest.fixture
def pair(at: Callable[[str], Pair]) -> Pair:
    return at("moving")


def torch_trace(num_steps: int) -> list[float]:
    """Scales of torch.amp.GradScaler after each step, on a plain model with the same overflows."""
    torch.manual_seed(0)
    model = Poisoned()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", growth_interval=INTERVAL)
    found = []
    for step in range(num_steps):
        scaler.scale(model(*inputs(step))).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append(scaler.get_scale())
    return found


@pytest.mark.long
@pytest.mark.parametrize("place", [pytest.param("moving", marks=pytest.mark.slow), "resident", "mixed"])
def test_the_trace_of_scales_is_torchs(place: str, at: Callable[[str], Pair]) -> None:
    """Built in: growth, backoff, and p, m, v and step counts through overflows, wherever updates run."""
    pair = at(place)
    grow_soon(pair.model)
    wanted, found = torch_trace(9), []
    for step in range(9):
        before = state_of(pair)
        built_in(pair, step)
        found.append(scale_of(pair.model))
        if step in BAD:
            assert_same_state(state_of(pair), before)
    assert found == wanted
    assert len(set(found)) > 2, "the scale never grew or never fell"
    counts = {float(s["step"]) for s in pair.optimizer.state_dict()["state"].values()}
    assert counts == {9.0 - len(BAD)}


def test_the_step_after_an_overflow_is_normal(pair: Pair) -> None:
    """With and without an overflow in between, bit for bit: powers of two change no digit of these gradients."""
    for step in (0, 1, 2, 3):
        built_in(pair, step)
    with_overflow = state_of(pair)
    pair.restart()
    compiled_of(pair.model).runtime.clipping.loss_scale.scale.fill_(2.0**15)
    for step in (0, 2, 3):
        built_in(pair, step)
    without = state_of(pair)
    assert with_overflow[1][0]["step"] == without[1][0]["step"] == 3
    for name, value in without[0].items():
        assert torch.equal(with_overflow[0][name], value), name


def test_an_overflow_in_the_first_step_leaves_no_state(pair: Pair) -> None:
    before = state_of(pair)
    assert before[1] == {}
    built_in(pair, BAD[0])
    assert_same_state(state_of(pair), before)
    built_in(pair, 0)
    assert {float(s["step"]) for s in state_of(pair)[1].values()} == {1.0}


def test_gradients_are_shown_unscaled_and_the_loss_is_plain(pair: Pair) -> None:
    """Against fp32, within the precision of fp16; also after they are clipped."""
    ours, plain = (model(*inputs(0)) for model in (pair.model, pair.plain))
    assert ours.item() == pytest.approx(plain.item(), rel=2e-3)
    for loss in (ours, plain):
        loss.backward()
    largest = max(float(p.grad.abs().max()) for p in pair.plain.parameters())
    for clips in (False, True):
        if clips:
            norm = chunkc.clip_grad_norm_(pair.model, 0.1)
            wanted = torch.nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.1)
            assert float(norm) == pytest.approx(float(wanted), rel=5e-3)
        for p, q in zip(pair.model.parameters(), pair.plain.parameters(), strict=True):
            assert p.grad.dtype is torch.float16
            torch.testing.assert_close(p.grad.float(), q.grad, rtol=0, atol=2**-7 * largest)


@pytest.mark.long
def test_the_plan_is_known_ahead(pair: Pair) -> None:
    """Norms and the decision too, whatever asks for a scale."""
    static = make("resident", dtype=torch.bfloat16, loss_scale=8.0)
    options: dict[str, Any] = {**SMALL, "dtype": torch.bfloat16, "loss_scale": 8.0}
    for place, found, asked in (("moving", pair, {**SMALL, "dtype": torch.float16}), ("resident", static, options)):
        found.model(*inputs(0)).backward()
        ahead = chunkc.plan(Poisoned(), PLACES[place], example_inputs=inputs(0), **asked)
        assert ahead.tracks_grad_norm and ahead.digest() == chunkc.plan_of(found.model).digest()


def test_fp16_trains_as_fp32_does(pair: Pair) -> None:
    """Twelve steps with clipping in the optimizer: losses within fp16's precision of fp32's."""
    pair.optimizer.max_grad_norm = 1.0
    losses: list[list[float]] = [[], []]
    for step in range(12):
        data = (*batch(step % 3), torch.zeros(192))
        for which, (model, optimizer) in enumerate(((pair.model, pair.optimizer), (pair.plain, pair.plain_optimizer))):
            loss = model(*data)
            loss.backward()
            if which:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses[which].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)
    assert losses[0][-1] < 0.9 * losses[0][0]


def test_nothing_waits(pair: Pair) -> None:
    before = chunkc.stats(pair.model)["num_unasked_syncs"] if compiled_of(pair.model).runtime.executor else 0
    for step in (0, 2, 3):
        built_in(pair, step)
    assert chunkc.stats(pair.model)["num_unasked_syncs"] == before


def scripted(pair: Pair, scaler: Any, step: int, clip: Callable[[Any], object] | None = None) -> None:
    """The loop of torch's documentation."""
    scaler.scale(pair.model(*inputs(step))).backward()
    if clip is not None:
        scaler.unscale_(pair.optimizer)
        clip(pair.model)
    scaler.step(pair.optimizer)
    scaler.update()
    pair.optimizer.zero_grad()


@pytest.mark.parametrize("clips", [False, True])
def test_a_script_scales_by_grad_scaler(pair: Pair, clips: bool) -> None:
    """The trace is torch's, and overflows change nothing."""
    scaler, found = chunkc.GradScaler(growth_interval=INTERVAL), []
    clip = (lambda model: chunkc.clip_grad_norm_(model, 0.1)) if clips else None
    for step in range(8):
        before = state_of(pair)
        scripted(pair, scaler, step, clip)
        found.append(scaler.get_scale())
        if step in BAD:
            assert_same_state(state_of(pair), before)
    assert found == torch_trace(8)
    assert scale_of(pair.model) == 2.0**16, "the built-in scale rests"


def test_a_script_may_go_back_to_the_scale_that_is_built_in(pair: Pair) -> None:
    """Without its scaler the next gradients would not be scaled at all, and overflows not be noticed."""
    scaler = chunkc.GradScaler(init_scale=2.0**10)
    scripted(pair, scaler, 0)
    built_in(pair, 2)
    before = state_of(pair)
    built_in(pair, BAD[0])
    assert_same_state(state_of(pair), before)
    assert (scaler.get_scale(), scale_of(pair.model)) == (2.0**10, 2.0**15)
    for number in (0, 2):
        pair.plain(*inputs(number)).backward()
        pair.plain_optimizer.step()
        pair.plain_optimizer.zero_grad()
    check_stepped(pair)


def test_gradients_are_scaled_until_unscale(pair: Pair) -> None:
    scaler = chunkc.GradScaler(init_scale=1024.0)
    scaler.scale(pair.model(*inputs(0))).backward()
    bias = pair.model.head.bias
    scaled = bias.grad.float()
    scaler.unscale_(pair.optimizer)
    torch.testing.assert_close(bias.grad.float() * 1024.0, scaled, rtol=1e-2, atol=1e-2)
    with pytest.raises(RuntimeError, match="already been called on this optimizer"):
        scaler.unscale_(pair.optimizer)
    scaler.step(pair.optimizer)
    with pytest.raises(RuntimeError, match="after step"):
        scaler.unscale_(pair.optimizer)
    with pytest.raises(RuntimeError, match="already been called since"):
        scaler.step(pair.optimizer)
    scaler.update()
    with pytest.raises(ChunkcError, match="no gradients were looked at"):
        scaler.update()
    scaler.update(4.0)
    assert scaler.get_scale() == 4.0


def test_grad_scaler_works_in_other_dtypes() -> None:
    """From a plan that does not measure yet: the first overflow is met by the host."""
    pair = make("moving", dtype=torch.bfloat16)
    scaler = chunkc.GradScaler(growth_interval=INTERVAL)
    for step in (BAD[0], 0, BAD[1], 2):
        before = state_of(pair)[0]
        scripted(pair, scaler, step)
        after = state_of(pair)[0]
        assert (step in BAD) == all(torch.equal(after[name], value) for name, value in before.items())
    assert scaler.get_scale() == 2.0**14


def test_states_of_scalers_are_torchs() -> None:
    ours, theirs = chunkc.GradScaler(init_scale=8.0), torch.amp.GradScaler("cpu", init_scale=8.0)
    assert ours.state_dict() == theirs.state_dict()
    theirs.load_state_dict({**theirs.state_dict(), "scale": 32.0, "_growth_tracker": 5, "growth_interval": 7})
    ours.load_state_dict(theirs.state_dict())
    assert ours.state_dict() == theirs.state_dict()
    assert (ours.get_scale(), ours.get_growth_interval()) == (32.0, 7)
    disabled = chunkc.GradScaler(enabled=False)
    assert disabled.state_dict() == {} and disabled.get_scale() == 1.0 and not disabled.is_enabled()
    with pytest.raises(RuntimeError, match="empty"):
        ours.load_state_dict({})


def test_a_disabled_scaler_leaves_scaling_to_the_model(pair: Pair) -> None:
    scaler = chunkc.GradScaler(enabled=False)
    before = state_of(pair)
    for step in (0, BAD[0]):
        scripted(pair, scaler, step)
    assert scale_of(pair.model) == 2.0**15
    assert not torch.equal(state_of(pair)[0]["head.bias"], before[0]["head.bias"])


def test_a_static_scale_stays_and_skips() -> None:
    pair = make("resident", loss_scale=256.0)
    built_in(pair, 0)
    before = state_of(pair)
    built_in(pair, BAD[0])
    assert_same_state(state_of(pair), before)
    assert scale_of(pair.model) == 256.0
    for bad in (0.0, -1.0, float("inf"), float("nan"), "static", None):
        with pytest.raises(ChunkcError, match="loss_scale="):
            chunkc.compile(Tower(), "emulated-64m-1g", loss_scale=bad)


def test_bf16_and_fp32_need_none() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert compiled_of(make("resident", dtype=dtype).model).runtime.clipping.loss_scale is None


def test_a_scaler_asks_for_losses_that_it_scaled(pair: Pair) -> None:
    scaler = chunkc.GradScaler()
    pair.model(*inputs(0)).backward()
    with pytest.raises(ChunkcError, match=r"scaler\.scale\(loss\)"):
        scaler.step(pair.optimizer)
    plain = torch.optim.SGD(nn.Linear(2, 2).parameters())
    with pytest.raises(ChunkcError, match=r"goes with chunkc\.AdamW"):
        scaler.step(plain)


def test_a_scaler_asks_for_gradients(pair: Pair) -> None:
    """As torch's, which would otherwise count a step without overflow; then it goes on."""
    scaler = chunkc.GradScaler()
    loss = scaler.scale(pair.model(*inputs(0)))
    before = scaler.state_dict()
    scaler.unscale_(pair.optimizer)
    with pytest.raises(ChunkcError, match=r"step\(\) comes after backward\(\)"):
        scaler.step(pair.optimizer)
    with pytest.raises(ChunkcError, match="no gradients were looked at"):
        scaler.update()
    assert scaler.state_dict() == before
    loss.backward()
    scaler.step(pair.optimizer)
    scaler.update()
    assert scaler.state_dict()["_growth_tracker"] == 1


@pytest.mark.long
def test_a_forward_that_breaks_asks_for_a_scaler() -> None:
    """Of its graphs, which gets a scaled tangent depends on the eager code between them."""

    class Broken(Poisoned):
        def forward(self, *args: torch.Tensor) -> torch.Tensor:
            loss = super().forward(*args)
            torch._dynamo.graph_break()
            return loss * self.head.bias.float().cos().mean()

    pair = Pair("emulated-64m-1g", Broken(), dtype=torch.float16)
    with pytest.raises(ChunkcError, match=r"needs a forward of one graph.*chunkc\.GradScaler"):
        pair.model(*inputs(0)).backward()
