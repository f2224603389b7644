"""A recipe in the manner of torchtune's: a configuration, and a class that trains by it.

    python examples/recipe.py hw=emulated-1m-64m epochs=2
    torchrun --nproc-per-node 2 examples/recipe.py hw=emulated-1m-64m batch_size=4
    python examples/recipe.py plain=True                                 the same recipe by plain PyTorch

Every field of `Config` is an argument ``name=value``. Lines that chunkc needs are marked; there are five.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from ranks import Ranks, joined
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import chunkc


@dataclass(frozen=True, slots=True)
class Config:
    """What the recipe does; ``batch_size`` counts sequences of all ranks in one micro-batch."""

    hw: str = "auto"
    backend: str = "inductor"
    plain: bool = False
    hidden: int = 64
    layers: int = 2
    length: int = 8
    num_samples: int = 32
    batch_size: int = 4
    accumulate: int = 2
    epochs: int = 2
    lr: float = 1e-2
    eps: float = 1e-4
    max_grad_norm: float = 1.0
    seed: int = 0
    out: str = ""
    resume: bool = False

    @staticmethod
    def parse(arguments: Sequence[str]) -> Config:
        """Read ``name=value`` arguments; ValueError for a name or a value that there is none of."""
        values: dict[str, object] = {}
        defaults = {field.name: field.default for field in dataclasses.fields(Config)}
        for argument in arguments:
            name, _, text = argument.partition("=")
            if name not in defaults:
                raise ValueError(f"{argument}: the recipe has {', '.join(defaults)}")
            kind = type(defaults[name])
            values[name] = text in ("True", "true", "1") if kind is bool else kind(text)
        return Config(**values)  # type: ignore[arg-type]


class Recipe:
    """Full fine-tuning of a small Llama, with the methods of torchtune's recipes."""

    def __init__(self, config: Config, ranks: Ranks) -> None:
        self.config = config
        self.ranks = ranks
        self.first_epoch = 0
        self.losses: list[float] = []

    def setup(self) -> None:
        """Build the model, its optimizer and the schedule, and go on from a checkpoint where there is one."""
        config = self.config
        torch.manual_seed(config.seed)
        llama = LlamaConfig(
            vocab_size=256, hidden_size=config.hidden, intermediate_size=2 * config.hidden, use_cache=False,
            num_hidden_layers=config.layers, num_attention_heads=4, num_key_value_heads=4,
        )  # fmt: skip
        self.model: nn.Module = LlamaForCausalLM(llama).train()
        if not config.plain:
            options = {"dtype": torch.float32, "backend": config.backend, "accumulate": config.accumulate}
            chunkc.compile(self.model, config.hw, **options)  # type: ignore[arg-type]  # chunkc
        kind = torch.optim.AdamW if config.plain else chunkc.AdamW  # chunkc
        self.optimizer = kind(self.model.parameters(), lr=config.lr, eps=config.eps)
        num_steps = config.epochs * self.steps_per_epoch
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / num_steps))
        )
        if config.resume:
            loaded = chunkc.load_checkpoint(config.out, self.model, self.optimizer, self.schedule)  # chunkc
            self.first_epoch = int(loaded.extra)

    @property
    def steps_per_epoch(self) -> int:
        return self.config.num_samples // (self.config.batch_size * self.config.accumulate)

    def batches(self, epoch: int) -> Iterator[torch.Tensor]:
        """This rank's part of each micro-batch of an epoch: int64 [rows, length], shuffled alike on all ranks."""
        config = self.config
        generator = torch.Generator().manual_seed(config.seed * 1000 + epoch)
        for rows in torch.randperm(config.num_samples, generator=generator).split(config.batch_size):
            yield self.ranks.part((rows.unsqueeze(1) * 7 + torch.arange(config.length)) % 256)

    def train(self) -> None:
        """Train all epochs, with a checkpoint after each; ``losses`` are those of steps, over all ranks."""
        for epoch in range(self.first_epoch, self.config.epochs):
            sum_of_losses = 0.0
            for number, tokens in enumerate(self.batches(epoch), 1):
                loss = self.model(input_ids=tokens, labels=tokens).loss / self.config.accumulate
                loss.backward()
                sum_of_losses += self.ranks.mean(loss)
                if number % self.config.accumulate == 0:
                    self.step(sum_of_losses)
                    sum_of_losses = 0.0
            self.save(epoch + 1)

    def step(self, loss: float) -> None:
        if self.config.plain:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
        else:
            chunkc.clip_grad_norm_(self.model, self.config.max_grad_norm)  # chunkc
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.losses.append(loss)
        print(f"step {len(self.losses) + self.first_epoch * self.steps_per_epoch}: loss {loss:.4f}")

    def save(self, num_epochs: int) -> None:
        if self.config.out and not self.config.plain:
            chunkc.save_checkpoint(self.config.out, self.model, self.optimizer, self.schedule, num_epochs)  # chunkc

    def close(self) -> None:
        """Write the weights as transformers reads them."""
        if self.config.out:
            self.model.save_pretrained(Path(self.config.out) / "model")  # type: ignore[operator]


def run(config: Config) -> Recipe:
    """Set up, train and save."""
    with joined() as ranks:
        recipe = Recipe(config, ranks)
        recipe.setup()
        recipe.train()
        recipe.close()
    return recipe


if __name__ == "__main__":
    run(Config.parse(sys.argv[1:]))
