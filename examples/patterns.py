"""Command line and reports of the four short examples."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

import chunkc


def parse(description: str, argv: Sequence[str] | None, *, hw: str, steps: int) -> argparse.Namespace:
    """``--hw``, ``--steps``, ``--backend`` and ``--seed``; random numbers start from the seed."""
    parser = argparse.ArgumentParser(description=description)
    default = "auto" if torch.cuda.is_available() else hw
    parser.add_argument("--hw", default=default, help="device budget and host memory (default here: %(default)s)")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--backend", default="inductor", choices=("inductor", "eager"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    torch.manual_seed(args.seed)
    return args


def report(step: int, model: torch.nn.Module, **values: float) -> None:
    """Print the step, ``values``, and the most device memory that the step took of its budget."""
    stats = chunkc.stats(model)
    shown = "  ".join(f"{name} {value:.3f}" for name, value in values.items())
    peak, budget = (stats[name] / 2**20 for name in ("measured_peak_nbytes", "budget_nbytes"))
    print(f"step {step}: {shown}  ({peak:.1f} of {budget:.1f} MiB)")
