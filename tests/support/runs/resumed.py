"""Training runs that are saved and resumed: dropout, tied weights, BatchNorm, two parameter groups and a scheduler."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pair import SMALL, Tower, batch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

import chunkc
from chunkc.compiler.compiled_model import compiled_of

HW = "emulated-640k-16m"
NUM_STEPS = 100
Bits = dict[str, torch.Tensor]


POLICIES = {
    "fp32": {},
    "mixed": {"dtype": torch.bfloat16},
    "bf16": {"dtype": torch.bfloat16, "handed_over": torch.bfloat16},
}


class Dropping(Tower):
    """A tower with dropout, whose head is tied to its embedding, and BatchNorm, which keeps running statistics."""

    def __init__(self, depth: int = 2, width: int = 48) -> None:
        super().__init__(depth, width)
        self.norm = nn.BatchNorm1d(8)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embed(tokens))
        for layer in self.layers:
            hidden = hidden + nn.functional.dropout(layer(hidden), 0.2, self.training)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


class Run:
    """A training run with two groups, of which ``make`` makes the optimizer, and a scheduler; ``frozen``: by name."""

    def __init__(
        self, seed: int = 0, hw: chunkc.Hardware | str = HW, wishes: dict[str, Any] | None = None, **options: Any
    ) -> None:
        torch.manual_seed(seed)
        self.num_parts = options.get("accumulate", 1)
        handed_over, frozen = options.pop("handed_over", torch.float32), options.pop("frozen", ())
        make = options.pop("make", lambda groups: chunkc.AdamW(groups, lr=1e-3))
        model = Dropping().to(handed_over)
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)
        self.model = chunkc.compile(model, hw, **{**SMALL, **options})
        if wishes is not None:
            settings = compiled_of(self.model).settings
            settings.options = replace(settings.options, **wishes)
        weights = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [{"params": weights}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}]
        self.optimizer = make(groups)
        cycles = bool(self.optimizer.defaults.get("momentum", True))
        self.scheduler = OneCycleLR(
            self.optimizer, max_lr=[1e-2, 2e-2], total_steps=2 * NUM_STEPS, cycle_momentum=cycles
        )

    def train(self, first: int, last: int) -> list[float]:
        losses = []
        if first == 0:
            torch.manual_seed(99)
        for step in range(first, last):
            for part in range(self.num_parts):
                loss = self.model(*batch(step * self.num_parts + part)) / self.num_parts
                loss.backward()
                losses.append(loss.item())
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        return losses

    def save(self, directory: Path, **options: Any) -> Path:
        return chunkc.save_checkpoint(directory, self.model, self.optimizer, self.scheduler, **options).result()

    def load(self, directory: Path) -> Any:
        return chunkc.load_checkpoint(directory, self.model, self.optimizer, self.scheduler)

    def bits(self) -> Bits:
        found = {name: value.clone() for name, value in self.model.state_dict().items()}
        names = {id(p): n for n, p in self.model.named_parameters()}
        order = [names[id(p)] for group in self.optimizer.param_groups for p in group["params"]]
        for key, state in self.optimizer.state_dict()["state"].items():
            found |= {f"{order[key]} {name}": value for name, value in state.items()}
        return found | {f"lr {i}": torch.tensor(g["lr"]) for i, g in enumerate(self.optimizer.param_groups)}


def check_equal(found: Bits, wanted: Bits) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype is value.dtype and torch.equal(found[name], value), name
