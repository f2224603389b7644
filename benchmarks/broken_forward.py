"""Steps of a forward that breaks in every layer of a loop, beside plain PyTorch, all resident.

The model is a mixture of experts of limited capacity, whose gate reads in Python how many places are taken, as public
implementations do: the forward breaks in every layer. Both models train on the same batches in turn; the figure is the
median of the ratios of the steps, after those in which sizes are new. The script checks that losses agree until routing
differs by rounding, that the measured peak is within the planned one, and ends with exit code 1 when the ratio is above
``--limit``.

    OMP_WAIT_POLICY=passive python benchmarks/broken_forward.py
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import provenance
import torch
from torch import nn
from torch.nn import functional

import chunkc

RESULTS = Path(__file__).parent / "results"
VOCABULARY, WIDTH, NUM_LAYERS, NUM_EXPERTS, BATCH, LENGTH = 256, 128, 4, 8, 8, 64
CAPACITY = 5 * BATCH * LENGTH // (4 * NUM_EXPERTS)
LOSS_TOLERANCE = 1e-4


class Experts(nn.Module):
    """Each row goes to its best expert, which takes no more than `CAPACITY`."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, NUM_EXPERTS)
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, 4 * WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, 4 * WIDTH, WIDTH) / (4 * WIDTH) ** 0.5)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(rows).softmax(-1).max(-1)
        is_of = functional.one_hot(chosen, NUM_EXPERTS)
        places = ((is_of.cumsum(0) - 1) * is_of).sum(-1)
        has_place = places < CAPACITY
        places = places * has_place
        taken = functional.one_hot(places, max(int(places.max()) + 1, CAPACITY))[:, :CAPACITY]
        sends = (is_of[:, :, None] * has_place[:, None, None] * taken[:, None, :]).to(rows.dtype)
        sent = torch.einsum("nec,nd->ecd", sends, rows)
        made = torch.relu(sent @ self.up) @ self.down
        return torch.einsum("nec,ecd->nd", sends * weights[:, None, None], made)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(NUM_LAYERS))
        self.experts = nn.ModuleList(Experts() for _ in range(NUM_LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        rows = self.embed(tokens).flatten(0, 1)
        for norm, experts in zip(self.norms, self.experts, strict=True):
            rows = rows + experts(norm(rows))
        return functional.cross_entropy(self.head(rows), targets.flatten())


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write the result, and return the exit code."""
    parser = argparse.ArgumentParser(description="Step time of a forward that breaks, against plain PyTorch.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--backend", choices=["inductor", "eager"], default="eager")
    parser.add_argument("--limit", type=float, default=3.0)
    parser.add_argument("--out", type=Path, help="result file (default: one of this day under benchmarks/results)")
    args = parser.parse_args(argv)
    result = {**provenance.describe(), "limit": args.limit, "backend": args.backend, **measure(args)}
    path = args.out or RESULTS / f"broken_forward-{args.backend}-{result['date'][:10]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return int(result["median_ratio"] > args.limit or result["measured_peak_nbytes"] > result["planned_peak_nbytes"])


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Train both on the same batches in turn; the second half of the steps counts."""
    torch.manual_seed(0)
    plain = Mixture()
    model = chunkc.compile(copy.deepcopy(plain), "emulated-2g-4g", dtype=torch.float32, backend=args.backend)
    steps = step_of(model, chunkc.AdamW), step_of(plain, torch.optim.AdamW)
    times_s: list[tuple[float, float]] = []
    num_equal = 0
    for number in range(args.steps):
        tokens = torch.randint(VOCABULARY, (2, BATCH, LENGTH), generator=torch.Generator().manual_seed(number))
        (ours_s, ours), (plain_s, expected) = (step(*tokens) for step in steps)
        times_s.append((ours_s, plain_s))
        num_equal += num_equal == number and abs(ours - expected) <= LOSS_TOLERANCE * abs(expected)
    if num_equal < 2:
        raise SystemExit("losses differ from plain PyTorch's from the second step on")
    counted, stats = times_s[args.steps // 2 :], chunkc.stats(model)
    return {
        "median_ratio": round(statistics.median(ours / plain for ours, plain in counted), 3),
        "chunkc_median_s": round(statistics.median(ours for ours, _ in counted), 4),
        "plain_median_s": round(statistics.median(plain for _, plain in counted), 4),
        "num_steps": args.steps,
        "num_steps_with_equal_losses": num_equal,
        "h2d_nbytes": stats["h2d_nbytes"],
        "measured_peak_nbytes": stats["measured_peak_nbytes"],
        "planned_peak_nbytes": stats["planned_peak_nbytes"],
    }


def step_of(
    model: nn.Module, optimizer_class: Callable[..., torch.optim.Optimizer]
) -> Callable[[torch.Tensor, torch.Tensor], tuple[float, float]]:
    """One step of training, until nothing is pending: its seconds, and its loss."""
    optimizer = optimizer_class(model.parameters(), lr=1e-4)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> tuple[float, float]:
        started_s = time.perf_counter()
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(optimizer, chunkc.AdamW):
            chunkc.stats(model)
        return time.perf_counter() - started_s, loss.item()

    return step


if __name__ == "__main__":
    sys.exit(main())
