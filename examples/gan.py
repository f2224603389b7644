"""Two models and two optimizers: a generator of points on a circle against its discriminator.

The discriminator takes two backwards a step (real and generated points), which ``accumulate=2`` declares. The
generator's backward runs through the discriminator too, whose gradients of then nobody steps: zero_grad() between the
discriminator's step and that backward makes room for them.

    python examples/gan.py --steps 300
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import torch
from patterns import parse, report
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as loss_of

import chunkc

LATENT, WIDTH, BATCH = 8, 128, 64


def network(num_inputs: int, num_outputs: int) -> nn.Module:
    """Three layers from ``[batch, num_inputs]`` to ``[batch, num_outputs]``."""
    hidden = (nn.Linear(num_inputs, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(0.2))
    return nn.Sequential(*hidden, nn.Linear(WIDTH, num_outputs))


def circle() -> torch.Tensor:
    """Points on the unit circle, ``[BATCH, 2]``."""
    angles = 2 * math.pi * torch.rand(BATCH)
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse("Train a small GAN under a device budget.", argv, hw="emulated-400k-64m", steps=300)
    options = {"hw": args.hw, "backend": args.backend, "dtype": torch.float32}
    generator = chunkc.compile(network(LATENT, 2), **options)
    discriminator = chunkc.compile(network(2, 1), **options, accumulate=2)
    of_generator = chunkc.Adam(generator.parameters(), lr=5e-4, betas=(0.5, 0.999))
    of_discriminator = chunkc.Adam(discriminator.parameters(), lr=5e-4, betas=(0.5, 0.999))
    device = next(generator.parameters()).device
    ones, zeros = torch.ones(BATCH, 1, device=device), torch.zeros(BATCH, 1, device=device)
    for step in range(args.steps):
        generated = generator(torch.randn(BATCH, LATENT, device=device))
        real_loss = loss_of(discriminator(circle().to(device)), ones)
        real_loss.backward()
        fake_loss = loss_of(discriminator(generated.detach()), zeros)
        fake_loss.backward()
        of_discriminator.step()
        of_discriminator.zero_grad()  # before the backward below adds to gradients that were stepped
        generator_loss = loss_of(discriminator(generated), ones)
        generator_loss.backward()
        of_generator.step()
        of_generator.zero_grad()
        of_discriminator.zero_grad()  # its gradients of the generator's loss are not stepped
        if (step + 1) % max(1, args.steps // 5) == 0:
            losses = {"real": real_loss.item(), "fake": fake_loss.item(), "generator": generator_loss.item()}
            report(step + 1, discriminator, **losses)
    with torch.no_grad():
        radius = generator(torch.randn(BATCH, LATENT, device=device)).norm(dim=1).mean()
    print(f"mean_radius={radius.item()!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
