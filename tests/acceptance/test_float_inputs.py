"""Floats that change from call to call are inputs of one graph; where that cannot be, each value is a constant."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pair import Pair
from torch import nn

import chunkc
from chunkc.compiler.compiled_model import compiled_of

WIDTH = 24


class Annealed(nn.Module):
    """A loss with a weight and a temperature that the caller changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH)

    def forward(self, x: torch.Tensor, weight: float, *, temperature: float = 1.0) -> torch.Tensor:
        hidden = torch.relu(self.first(x) * temperature)
        out = self.last(hidden)
        return out.square().mean() * weight + (1.0 - weight) * out.abs().mean() + weight**2


Use = Callable[[torch.Tensor, float], torch.Tensor]


class Uses(Annealed):
    """Hands the float to one operator."""

    def __init__(self, use: Use) -> None:
        super().__init__()
        self.use = use

    def forward(self, x: torch.Tensor, weight: float) -> torch.Tensor:  # type: ignore[override]
        return self.last(self.use(torch.sigmoid(self.first(x)), weight)).square().mean()


def train(pair: Pair, seed: int, *args: Any, **kwargs: Any) -> None:
    def loss_of(model: nn.Module) -> torch.Tensor:
        torch.manual_seed(seed)
        loss: torch.Tensor = model(torch.randn(8, WIDTH), *args, **kwargs)
        assert loss.dtype is torch.float32
        return loss

    pair.step_on(loss_of)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_hundred_values_take_two_programs(backend: str) -> None:
    pair = Pair("emulated-100k-16m", Annealed(), backend=backend, chunk_size=512)
    for number in range(100 if backend == "eager" else 20):
        train(pair, number, 1.0 - 0.009 * number)
    pair.check()
    assert compiled_of(pair.model).session.num_planned == 2, "one for the first value, one for all others"
    assert chunkc.stats(pair.model)["h2d_nbytes"] > 0


def test_two_floats_by_position_and_keyword() -> None:
    pair = Pair("emulated-100k-16m", Annealed(), chunk_size=512)
    for number in range(4):
        train(pair, number, 0.5, temperature=1.0 + number)  # one changes
    assert compiled_of(pair.model).session.num_planned == 2
    for number in range(4):
        train(pair, number, 0.1 * number, temperature=2.0)  # then the other
    for number in range(3):
        train(pair, number, 0.3)  # another form of call
    pair.check()
    assert compiled_of(pair.model).session.num_planned <= 5


def test_nan_infinity_and_signs_of_zeros_are_values_too() -> None:
    pair = Pair("emulated-100k-16m", Uses(torch.mul), chunk_size=512)
    for number, value in enumerate((0.5, 0.25, 0.0, -0.0, 1e-30, 1e6, 0.75)):
        train(pair, number, value)
    pair.check()
    ours, plain = pair.both(lambda model, _: model(torch.ones(2, WIDTH), float("nan")))
    assert bool(ours.isnan()) and bool(plain.isnan())


USES: dict[str, Use] = {
    "division": lambda x, a: x / a,
    "pow": lambda x, a: x**a,
    "clamp": lambda x, a: x.clamp(max=a),
    "full": lambda x, a: x + torch.full((96,), a),
    "where": lambda x, a: torch.where(x > 0.5, x, a),
    "lerp": lambda x, a: torch.lerp(x, x * x, a),
    "dropout": lambda x, a: nn.functional.dropout(x, a),
    "a branch": lambda x, a: x * a if a > 0.3 else x + a,
    "an integer": lambda x, a: x * int(10 * a),
    "slice": lambda x, a: torch.cat([x[:, : int(96 * a)], x[:, int(96 * a) :] * 2], 1),
    "leaky_relu": lambda x, a: nn.functional.leaky_relu(x - 0.5, a),
    "norm": lambda x, a: nn.functional.layer_norm(x, (96,), eps=a),
    "attention": lambda x, a: nn.functional.scaled_dot_product_attention(*[x.view(1, 8, 96)] * 3, scale=a).view(8, 96),
}


@pytest.mark.parametrize("name", USES)
def test_every_use_is_exact(name: str) -> None:
    pair = Pair("emulated-120k-16m", Uses(USES[name]), chunk_size=512)
    for number, value in enumerate((0.2, 0.4, 0.25, 0.4)):
        train(pair, number, value)
        pair.check()


def test_each_way_of_a_decision_has_a_program() -> None:
    pair = Pair("emulated-120k-16m", Uses(USES["a branch"]), chunk_size=512)
    for number, value in enumerate((0.1, 0.2, 0.4, 0.5, 0.15, 0.6)):
        train(pair, number, value)
    pair.check()
    assert compiled_of(pair.model).session.num_planned == 3, "the first value, and both ways"


@pytest.mark.long
def test_where_each_value_is_a_constant_programs_stay(caplog: pytest.LogCaptureFixture) -> None:
    """And the limit names the arguments and their values."""
    pair = Pair("emulated-120k-16m", Uses(USES["an integer"]), chunk_size=512)
    session = compiled_of(pair.model).session
    with caplog.at_level(logging.INFO, "chunkc"):
        for number in range(8):
            train(pair, number, 0.1 * (number + 1))
        assert [r for r in caplog.records if "takes them for constants. Keep them in tensors" in r.getMessage()]
        for again in range(3):
            num_planned = session.num_planned
            for number in range(5, 8):
                train(pair, number + again, 0.1 * (number + 1))
        assert session.num_planned == num_planned
    session.shapes.max_programs = session.shapes.num_programs
    with pytest.raises(chunkc.ShapeLimitError, match=r"\[8, 24\] and argument 1=0\.95, needs.*argument 1=0\.\d"):
        pair.model(torch.ones(8, WIDTH), 0.95)
    pair.check()
