"""A frozen teacher and its student in one module, so that one plan moves both.

The teacher's parameters are frozen and read under no_grad: they are chunks without gradients or optimizer states. As a
module of its own the teacher would have to stay on the device as a whole.

    python examples/distillation.py --steps 200
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from patterns import parse, report
from torch import nn

import chunkc

WIDTH, NUM_CLASSES, BATCH, TEMPERATURE = 32, 10, 32, 2.0


def network(hidden: int, depth: int) -> nn.Module:
    """From ``[batch, WIDTH]`` to logits ``[batch, NUM_CLASSES]``."""
    layers = [layer for _ in range(depth) for layer in (nn.Linear(hidden, hidden), nn.ReLU())]
    return nn.Sequential(nn.Linear(WIDTH, hidden), nn.ReLU(), *layers, nn.Linear(hidden, NUM_CLASSES))


class Distillation(nn.Module):
    """The student's loss against what the teacher says of the same inputs ``[batch, WIDTH]``."""

    def __init__(self, teacher: nn.Module, student: nn.Module) -> None:
        super().__init__()
        self.teacher, self.student = teacher.requires_grad_(False), student

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = (self.teacher(x) / TEMPERATURE).softmax(-1)
        return nn.functional.cross_entropy(self.student(x) / TEMPERATURE, wanted)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse("Distil a model into a smaller one under a device budget.", argv, hw="emulated-600k-64m", steps=200)
    teacher = network(192, 4)
    for weight in teacher.parameters():
        if weight.dim() == 2:
            nn.init.orthogonal_(weight, gain=2.0)  # stands for a trained one: it is sure of what it says
    both = Distillation(teacher, network(48, 1))
    model = chunkc.compile(both, args.hw, dtype=torch.float32, backend=args.backend)
    optimizer = chunkc.AdamW(model.student.parameters(), lr=3e-3)
    device = next(model.parameters()).device
    for step in range(args.steps):
        loss = model(4 * torch.randn(BATCH, WIDTH, device=device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % max(1, args.steps // 5) == 0:
            report(step + 1, model, loss=loss.item())
    print(f"final_loss={loss.item()!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
