"""Cases 5 and 6: what a step in fp16 takes is the gradient without its scale, clipped, whoever scales and clips.

First moments are compared, since Adam's step is the same for gradients of any scale.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from fp16_training import built_in, inputs, make, restart
from overflows import check_stepped
from pair import Pair
from torch import nn

import chunkc
from chunkc.runtime.execution.grad_norm import GradNormTable
from chunkc.runtime.model.grad_clipping import GradClipping
from chunkc.runtime.update.loss_scale import LossScale


def test_gradients_that_go_on_to_autograd_are_unscaled() -> None:
    """Those of inputs; what eager operators before the model make of them is plain."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24))
    model = chunkc.compile(copy.deepcopy(plain), "emulated-64m-1g", dtype=torch.float16, backend="eager")
    x, found = torch.randn(4, 24), []
    for forward in (model, plain):
        scale = nn.Parameter(torch.ones(24))
        forward(x * scale).float().square().mean().backward()
        found.append(scale.grad)
    torch.testing.assert_close(*found, rtol=0, atol=2**-7 * float(found[1].abs().max()))


MAX_NORM = 0.3
"""Below the norm of every step here."""

Step = Callable[[Pair, chunkc.GradScaler, tuple[torch.Tensor, ...]], object]


def by_model(clip: Callable[[nn.Module], object] | None) -> Step:
    def step(pair: Pair, _: chunkc.GradScaler, data: tuple[torch.Tensor, ...]) -> None:
        pair.model(*data).backward()
        if clip is not None:
            clip(pair.model)
        pair.optimizer.step()

    return step


def clip(model: nn.Module) -> torch.Tensor:
    return chunkc.clip_grad_norm_(model, MAX_NORM)


def clip_by_torch(model: nn.Module) -> torch.Tensor:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)


def by_scaler(clip: Callable[[nn.Module], object] | None) -> Step:
    def step(pair: Pair, scaler: chunkc.GradScaler, data: tuple[torch.Tensor, ...]) -> None:
        scaler.scale(pair.model(*data)).backward()
        if clip is not None:
            scaler.unscale_(pair.optimizer)
            clip(pair.model)
        scaler.step(pair.optimizer)
        scaler.update()

    return step


STEPS: dict[str, tuple[Step, bool, float | None]] = {
    "built in": (by_model(None), False, None),
    "built in, clipped": (by_model(clip), True, None),
    "built in, clipped by the optimizer": (by_model(None), True, MAX_NORM),
    "built in, clipped by torch": (by_model(clip_by_torch), True, None),
    "scaler": (by_scaler(None), False, None),
    "scaler, clipped": (by_scaler(clip), True, None),
    "scaler, clipped by the optimizer": (by_scaler(None), True, MAX_NORM),
    "scaler, clipped by torch": (by_scaler(clip_by_torch), True, None),
}
"""A step in fp16, whether it clips, and the optimizer's ``max_grad_norm``."""


@pytest.fixture(scope="module")
def captured() -> Pair:
    """Optimizer states on the device, streamed and on the host."""
    pair = make("mixed")
    built_in(pair, 0)
    assert all(count > 0 for count in pair.kinds().values())
    return pair


@pytest.fixture
def everywhere(captured: Pair) -> Pair:
    """As at the beginning."""
    restart(captured)
    return captured


def take_steps(pair: Pair, how: str) -> None:
    """Two steps on both sides, in fp16 by ``how`` and in fp32, from the beginning."""
    step, clips, max_norm = STEPS[how]
    pair.optimizer.max_grad_norm = max_norm
    scaler = chunkc.GradScaler(init_scale=2.0**10)
    for number in (0, 2):
        step(pair, scaler, inputs(number))
        pair.plain(*inputs(number)).backward()
        if clips:
            norm = torch.nn.utils.clip_grad_norm_(pair.plain.parameters(), MAX_NORM)
            assert norm > 1.1 * MAX_NORM
        pair.plain_optimizer.step()
        pair.both(lambda _, optimizer: optimizer.zero_grad())


@pytest.mark.long(but="scaler, clipped by torch")
@pytest.mark.parametrize("how", STEPS)
def test_gradients_are_stepped_unscaled_and_clipped(everywhere: Pair, how: str) -> None:
    take_steps(everywhere, how)
    check_stepped(everywhere)


@pytest.mark.slow
def test_gradients_are_stepped_unscaled_and_clipped_under_inductor() -> None:
    pair = make("resident", backend="inductor")
    take_steps(pair, "built in, clipped by the optimizer")
    check_stepped(pair)


class Wrong:
    """What a test must notice: scales and factors of clipping that are off by 5 %, or left out."""

    @staticmethod
    def scale(monkeypatch: pytest.MonkeyPatch) -> None:
        inverse = LossScale.inverse
        monkeypatch.setattr(LossScale, "inverse", lambda self: 1.05 * inverse(self))

    @staticmethod
    def clip(monkeypatch: pytest.MonkeyPatch) -> None:
        multiply = GradClipping._multiply
        monkeypatch.setattr(GradClipping, "_multiply", lambda self, present, f: multiply(self, present, 1.05 * f))

    @staticmethod
    def dropped(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(GradClipping, "_multiply", lambda self, present, factor: None)

    @staticmethod
    def decision(monkeypatch: pytest.MonkeyPatch) -> None:
        update = GradNormTable.update
        monkeypatch.setattr(GradNormTable, "update", lambda self, inputs: update(self, replace(inputs, factor=None)))


@pytest.mark.parametrize(
    ("how", "wrong"),
    [
        ("built in", Wrong.scale),
        ("built in, clipped", Wrong.clip),
        ("built in, clipped", Wrong.dropped),
        ("built in, clipped by the optimizer", Wrong.dropped),
        ("scaler", Wrong.scale),
        ("scaler", Wrong.decision),
        ("scaler, clipped", Wrong.clip),
    ],
)
def test_a_wrong_factor_is_noticed(
    everywhere: Pair, how: str, wrong: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong(monkeypatch)
    take_steps(everywhere, how)
    with pytest.raises(AssertionError, match="not close"):
        check_stepped(everywhere)
