"""Models with several outputs, and losses that use some of them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

WIDTH = 32

Loss = Callable[[Any], torch.Tensor]


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(16, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.first = nn.Linear(WIDTH, 5)
        self.second = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.trunk(x)
        return self.first(hidden), self.second(hidden)


class Views(Heads):
    """Outputs are views of what the graph makes, and of its input."""

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.trunk(x)
        return {"a": self.first(hidden)[:, 2:], "b": self.second(hidden).t(), "x": x.view(-1)}


class Broken(Heads):
    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.trunk(x)
        second = self.second[0](hidden)
        torch._dynamo.graph_break()
        return self.first(hidden), self.second[2](second.relu())


class BehindBreak(Heads):
    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.trunk(x)
        first = self.first(hidden)
        torch._dynamo.graph_break()
        return first, self.second(hidden)


class Auxiliary(nn.Module):
    """Convolutions and batch norms with an auxiliary classifier in the middle, as GoogLeNet has them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.main, self.side = nn.Linear(8, 4), nn.Sequential(nn.Conv2d(8, 4, 1), nn.ReLU(), nn.Flatten())
        self.classify = nn.Linear(4 * 36, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        stem = self.stem(x)
        return self.main(self.body(stem).mean((2, 3))), self.classify(self.side(stem))


def loss_of(heads: Sequence[str]) -> Loss:
    def loss(outputs: Any) -> torch.Tensor:
        found = (outputs["a"], outputs["b"]) if isinstance(outputs, dict) else outputs
        return torch.stack([found["ab".index(head)].pow(2).mean() for head in heads]).sum()

    return loss


def rows(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(4, *(shape or (16,)), generator=torch.Generator().manual_seed(seed))
