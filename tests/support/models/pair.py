"""A small model under chunkc and in plain PyTorch, driven by the same calls."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import chunkc
from chunkc.compiler.compiled_model import compiled_of
from chunkc.ir.actions import Op, Stream

VOCABULARY = 50
CHUNK_SIZE = 2048
"""Elements; the search makes hundreds of chunks of models so small, and every action of a step takes its time."""
SMALL: dict[str, Any] = {"dtype": torch.float32, "backend": "eager", "chunk_size": CHUNK_SIZE}
"""Options of ``chunkc.compile``."""


class Tower(nn.Module):
    def __init__(self, depth: int = 4, width: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(depth)
        )
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def batch(seed: int, length: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (2, 4, length), generator=generator)
    return tokens[0], tokens[1]


MIXED = {"num_resident_states": 2, "keeps_payloads": True, "streamed_share": 0.4, "num_second_homes": 5}
"""Planning options with which a ``Pair`` has optimizer states in all places, whole chunks on the device, and updates
that begin before their step."""


class Pair:
    """The same model under chunkc and in plain PyTorch, driven by the same calls; ``wishes``: planning options."""

    def __init__(
        self,
        hw: str | chunkc.Hardware = "emulated-640k-16m",
        model: nn.Module | None = None,
        wishes: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        model = Tower() if model is None else model
        self.plain = copy.deepcopy(model)
        self.model = chunkc.compile(model, hw, **{**SMALL, **options})
        settings = compiled_of(self.model).settings
        settings.options = replace(settings.options, **(wishes or {}))
        self.initial = copy.deepcopy(self.plain.state_dict())
        self.new_optimizers()

    def new_optimizers(self) -> None:
        self.optimizer = chunkc.AdamW(self.model.parameters(), lr=1e-2, eps=1e-4)
        self.plain_optimizer = torch.optim.AdamW(self.plain.parameters(), lr=1e-2, eps=1e-4)

    def restart(self) -> None:
        for model in (self.model, self.plain):
            model.zero_grad()
            model.load_state_dict(self.initial)
        self.new_optimizers()

    def kinds(self) -> dict[str, int]:
        step = chunkc.plan_of(self.model).program("step").actions
        streamed = sum(a.op is Op.LOAD for a in step)
        on_host = sum(a.op is Op.UPDATE and a.stream is Stream.CPU for a in step)
        total = sum(a.op is Op.UPDATE for a in step)
        return {"resident": total - streamed - on_host, "streamed": streamed, "host": on_host}

    def both(self, call: Callable[[nn.Module, torch.optim.Optimizer], Any]) -> tuple[Any, Any]:
        return call(self.model, self.optimizer), call(self.plain, self.plain_optimizer)

    def train(self, seed: int, length: int = 8) -> None:
        self.step_on(lambda model: model(*batch(seed, length)))

    def step_on(self, loss_of: Callable[[nn.Module], torch.Tensor]) -> None:
        """One step of each model on its ``loss_of``; the losses are equal."""

        def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
            loss = loss_of(model)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()

        ours, plain = self.both(step)
        assert ours == pytest.approx(plain, rel=1e-5)

    def check(self) -> None:
        """Every element of every parameter equals plain PyTorch's within a thousandth of one update (lr)."""
        ours, plain = self.model.state_dict(), self.plain.state_dict()
        assert ours.keys() == plain.keys()
        for name in plain:
            torch.testing.assert_close(ours[name], plain[name], rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
