"""Methods other than forward, and operators between graphs: exact, and said once."""

from __future__ import annotations

import logging

import pytest
import torch
from pair import Pair
from torch import nn

import chunkc

WIDTH = 32


class TwoTowers(nn.Module):
    """An image and a text tower with a method each, and a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = (nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def encode_image(self, pixels: torch.Tensor) -> torch.Tensor:
        return nn.functional.normalize(self.image(pixels), dim=-1)

    def encode_text(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.normalize(self.text(tokens), dim=-1)

    def forward(self, pixels: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return self.scale * self.encode_image(pixels) @ self.encode_text(tokens).T


def told(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and text in r.getMessage()]


def train(pair: Pair, seed: int, *, by_methods: bool, alone: bool = False) -> None:
    def loss_of(model: nn.Module) -> torch.Tensor:
        pixels, tokens = torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(seed))
        loss = torch.zeros(())
        if not alone:
            loss = nn.functional.cross_entropy(model(pixels, tokens), torch.arange(6))
        if by_methods:
            loss = loss + (model.encode_image(pixels) * model.encode_text(tokens)).sum()  # type: ignore[operator]
        return loss

    pair.step_on(loss_of)


def test_methods_beside_forward_are_exact_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair("emulated-110k-16m", TwoTowers(), chunk_size=512)
    with caplog.at_level(logging.WARNING, "chunkc"):
        train(pair, 0, by_methods=False)
        assert not told(caplog, "outside of model(...)")
        for seed in range(1, 5):
            train(pair, seed, by_methods=True)
            pair.check()
    [text] = told(caplog, "outside of model(...)")
    assert "image.0.weight" in text and "only model(...) is planned" in text


def test_methods_alone_say_so_at_the_first_call_and_cannot_be_stepped(caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair("emulated-110k-16m", TwoTowers(), chunk_size=512)
    with caplog.at_level(logging.WARNING, "chunkc"):
        pair.model.encode_image(torch.randn(2, WIDTH))
        assert told(caplog, "only model(...) is planned"), "before any backward or step"
    with pytest.raises(chunkc.ChunkcError, match="no forward of the whole model has run"):
        train(pair, 0, by_methods=True, alone=True)


def test_looking_at_parameters_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair("emulated-110k-16m", TwoTowers(), chunk_size=512)
    with caplog.at_level(logging.WARNING, "chunkc"):
        train(pair, 0, by_methods=False)
        for param in pair.model.parameters():
            param.detach().norm()
            param.data.abs().max()
        with torch.no_grad():
            pair.model.encode_image(torch.randn(2, WIDTH))  # type: ignore[operator]
            nn.utils.parameters_to_vector(pair.model.parameters())
            pair.model(torch.randn(2, WIDTH), torch.randn(2, WIDTH))
        pair.model.state_dict()
        train(pair, 1, by_methods=False)
    assert not told(caplog, "outside of")


class BreaksBetween(nn.Module):
    """A large product runs between the graphs: what Dynamo breaks at reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.between = nn.Parameter(torch.randn(WIDTH, 8 * WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        x = multiplied(x, self.between)
        return self.last(x).square().mean()


@torch.compiler.disable
def multiplied(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x @ weight).unflatten(-1, (8, WIDTH)).mean(-2)


def test_the_share_of_parameters_outside_of_the_plan_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair("emulated-120k-16m", BreaksBetween(), chunk_size=512)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))).backward()
        optimizer.step()
        optimizer.zero_grad()

    with caplog.at_level(logging.WARNING, "chunkc"):
        for _ in range(4):
            pair.both(step)
            pair.check()
    [text] = told(caplog, "of the bytes of the parameters of BreaksBetween")
    assert text.startswith("88 %") and "(between)" in text
