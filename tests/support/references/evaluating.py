"""A model under chunkc beside its plain twin, for forwards without gradients between training steps."""

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from machines import EMULATED, Machine
from torch import nn

import chunkc
from chunkc.compiler.compiled_model import CompiledModel, compiled_of
from chunkc.compiler.evaluation import Evaluator

VOCABULARY = 40
WIDTH = 48
CHUNK_SIZE = 1024
TIGHT = "emulated-204k-16m"  # a third of the payloads at a time
ROOMY = "emulated-64m-64m"
OPTIONS = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.1}


class Tower(nn.Module):
    def __init__(self, dropout: float = 0.0, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(depth)
        )
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, extra: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        hidden = self.dropout(self.norm(hidden.flatten(0, 1)).unflatten(0, tokens.shape))
        logits = self.head(hidden)
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()), logits


def tokens(seed: int, length: int = 8, batch: int = 4) -> torch.Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


@dataclass
class Twins:
    model: nn.Module
    plain: nn.Module
    optimizer: torch.optim.Optimizer
    plain_optimizer: torch.optim.Optimizer
    machine: Machine = EMULATED

    @property
    def compiled(self) -> CompiledModel:
        return compiled_of(self.model)

    @property
    def evaluator(self) -> Evaluator:
        return self.compiled.evaluator

    @property
    def num_programs(self) -> int:
        return self.evaluator.shapes.num_programs

    @property
    def num_runs(self) -> int:
        return self.compiled.runtime.accounting.num_evaluations

    def train(self, *seeds: int, length: int = 8) -> None:
        for seed in seeds:
            for model, optimizer in ((self.model, self.optimizer), (self.plain, self.plain_optimizer)):
                model(self.machine.put(tokens(seed, length)))[0].backward()
                optimizer.step()
                optimizer.zero_grad()

    def evaluate(self, inputs: torch.Tensor, *rest: Any, seed: int = 0) -> torch.Tensor:
        """Both without gradients: losses and logits agree, buffers too. Returns the logits."""
        found = []
        for model in (self.model, self.plain):
            torch.manual_seed(seed)
            with torch.no_grad():
                found.append(model(self.machine.put(inputs), *rest))
        (loss, logits), (plain_loss, plain_logits) = found
        assert not loss.requires_grad
        torch.testing.assert_close(logits, plain_logits, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(loss, plain_loss, rtol=1e-5, atol=0)
        self.check_buffers()
        return logits

    def check_buffers(self) -> None:
        for (name, buffer), plain in zip(self.model.named_buffers(), self.plain.buffers(), strict=True):
            torch.testing.assert_close(buffer, plain, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")

    def check(self) -> None:
        ours = self.model.state_dict()
        for name, value in self.plain.state_dict().items():
            found, wanted = ours[name].to("cpu"), value.to("cpu")
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def twins(
    hw: str | chunkc.Hardware = TIGHT,
    *,
    dropout: float = 0.0,
    steps: Sequence[int] = (0, 1),
    plain: nn.Module | None = None,
    machine: Machine = EMULATED,
) -> Twins:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        plain = Tower(dropout) if plain is None else plain
    model = chunkc.compile(copy.deepcopy(plain), hw, dtype=torch.float32, backend="eager", chunk_size=CHUNK_SIZE)
    optimizer, plain = chunkc.AdamW(model.parameters(), **OPTIONS), plain.to(machine.torch_device)
    found = Twins(model, plain, optimizer, torch.optim.AdamW(plain.parameters(), **OPTIONS), machine)
    found.train(*steps)
    return found


def messages(caplog: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[str]:
    said = "a forward without gradients gathers"
    return [r.getMessage() for r in caplog.records if r.levelno >= level and r.getMessage().startswith(said)]
