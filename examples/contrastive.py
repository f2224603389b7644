"""One model called twice in one loss: an encoder finds the two views of each vector.

Both forwards are alive until the backward. ``accumulate=2`` declares that one backward reaches both; the plan makes
room for what both save at the second forward of the first step, and keeps it.

    python examples/contrastive.py --steps 200
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from patterns import parse, report
from torch import nn

import chunkc

WIDTH, HIDDEN, OUT, BATCH, TEMPERATURE = 32, 128, 16, 48, 0.2


class Encoder(nn.Module):
    """From ``[batch, WIDTH]`` to unit vectors ``[batch, OUT]``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, OUT)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.normalize(self.layers(x), dim=-1)


def view(vectors: torch.Tensor) -> torch.Tensor:
    """``vectors`` with noise, and a quarter of the elements left out."""
    return (vectors + 0.3 * torch.randn_like(vectors)) * (torch.rand_like(vectors) > 0.25)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse("Train a contrastive encoder under a device budget.", argv, hw="emulated-1m-64m", steps=200)
    encoder = chunkc.compile(Encoder(), args.hw, dtype=torch.float32, backend=args.backend, accumulate=2)
    optimizer = chunkc.AdamW(encoder.parameters(), lr=1e-3)
    device = next(encoder.parameters()).device
    own = torch.arange(BATCH, device=device)
    for step in range(args.steps):
        vectors = torch.randn(BATCH, WIDTH, device=device)
        similarity = encoder(view(vectors)) @ encoder(view(vectors)).T / TEMPERATURE
        loss = nn.functional.cross_entropy(similarity, own)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % max(1, args.steps // 5) == 0:
            found = (similarity.argmax(1) == own).float().mean()
            report(step + 1, encoder, loss=loss.item(), found=found.item())
    print(f"final_loss={loss.item()!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
