"""The cost of a plan when the model fits: steps of chunkc beside torch.compile and fused AdamW.

Both train the same fp32 Llama on the same batches with Inductor, in one process, a step each in turn (A B A B ...); the
figure is the median of the ratios of the pairs, which other load on the machine disturbs least. A step of chunkc is
timed until its pending updates are done. The script also checks that the plan moves nothing and has one segment per
graph, writes a result under benchmarks/results/, and ends with exit code 1 when the ratio is above ``--limit``.

    OMP_WAIT_POLICY=passive python benchmarks/resident_overhead.py
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import provenance
import torch
import transformers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import chunkc
from chunkc.ir.actions import Stream

RESULTS = Path(__file__).parent / "results"
LEARNING_RATE = 1e-4
VOCABULARY_SIZE = 256

Step = Callable[[torch.Tensor], float]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write the result, and return the exit code."""
    args = parse(argv)
    torch.manual_seed(0)
    model = build(args)
    tokens = [torch.randint(VOCABULARY_SIZE, (args.batch, args.seq)) for _ in range(args.warm_up + args.pairs)]
    plain = plain_step(copy.deepcopy(model))
    managed, chunked = chunked_step(model, args)
    for batch in tokens[: args.warm_up]:
        losses = plain(batch), chunked(batch)
    load_before = os.getloadavg()
    pairs = [(timed(plain, batch), timed(chunked, batch)) for batch in tokens[args.warm_up :]]
    result = {
        **describe(pairs, load_before, args),
        "plan": plan_facts(managed),
        "loss_after_warm_up": {"plain": losses[0], "chunkc": losses[1]},
    }
    path = args.out or RESULTS / f"resident_overhead-{result['date'][:10]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "pairs_s"}, indent=2))
    return 0 if verdict(result, args.limit) else 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Step time of a resident plan against plain torch.compile.")
    parser.add_argument("--hw", default="emulated-6g-8g")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--backend", choices=["inductor", "eager"], default="inductor", help="of chunkc")
    parser.add_argument("--limit", type=float, default=1.05)
    parser.add_argument("--out", type=Path, help="result file (default: one of this day under benchmarks/results)")
    return parser.parse_args(argv)


def build(args: argparse.Namespace) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 8 // 3 // 64 * 64,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        max_position_embeddings=args.seq,
    )
    return LlamaForCausalLM(config)


def plain_step(model: nn.Module, groups: Sequence[dict[str, Any]] = ()) -> Step:
    """One training step of plain PyTorch: whole-graph Inductor and the fused optimizer.

    ``groups`` of the optimizer; by default all parameters are one.
    """
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    optimizer = torch.optim.AdamW(groups or model.parameters(), lr=LEARNING_RATE, fused=True)

    def step(batch: torch.Tensor) -> float:
        loss = compiled(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def chunked_step(model: nn.Module, args: argparse.Namespace, **options: Any) -> tuple[nn.Module, Step]:
    """The same step with chunkc, until nothing is pending; ``options``: more of ``chunkc.compile``."""
    model = chunkc.compile(model, hw=args.hw, dtype=torch.float32, backend=args.backend, **options)
    optimizer = chunkc.AdamW(model.parameters(), lr=LEARNING_RATE)

    def step(batch: torch.Tensor) -> float:
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        chunkc.stats(model)
        return float(loss.detach())

    return model, step


def timed(step: Step, batch: torch.Tensor) -> float:
    """Seconds of one step."""
    started_s = time.perf_counter()
    step(batch)
    return time.perf_counter() - started_s


def plan_facts(model: nn.Module) -> dict[str, Any]:
    """Check what must hold of a plan for a model that fits."""
    plan = chunkc.plan_of(model)
    return {
        "digest": plan.digest(),
        "moved_nbytes": plan.moved_nbytes(Stream.H2D) + plan.moved_nbytes(Stream.D2H),
        "num_segments": {kind: len(plan.graph_segments(kind)) for kind in ("forward", "backward")},
    }


def describe(
    pairs: Sequence[tuple[float, float]], load_before: tuple[float, float, float], args: argparse.Namespace
) -> dict[str, Any]:
    """The figure with everything that a reader needs to judge and to repeat it."""
    ratios = sorted(ours / plain for plain, ours in pairs)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "median_ratio": round(statistics.median(ratios), 4),
        "limit": args.limit,
        "ratios_min_max": [round(ratios[0], 4), round(ratios[-1], 4)],
        "plain_median_s": round(statistics.median(plain for plain, _ in pairs), 4),
        "chunkc_median_s": round(statistics.median(ours for _, ours in pairs), 4),
        "pairs_s": [[round(plain, 4), round(ours, 4)] for plain, ours in pairs],
        "load_1_5_15_min": {"before": load_before, "after": os.getloadavg()},
        "command": provenance.command(),
        "settings": {key: value for key, value in vars(args).items() if key != "out"},
        "commit": provenance.commit(),
        "hardware": {"processor": provenance.processor(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "chunkc": chunkc.__version__,
        },
    }


def verdict(result: dict[str, Any], limit: float) -> bool:
    """Print what fails, and say whether nothing does."""
    failures = []
    if result["median_ratio"] > limit:
        failures.append(f"the step takes {result['median_ratio']} x of plain PyTorch's, more than {limit}")
    if result["plan"]["moved_nbytes"]:
        failures.append(f"the plan of a model that fits moves {result['plan']['moved_nbytes']} bytes")
    if set(result["plan"]["num_segments"].values()) != {1}:
        failures.append(f"a graph has more than one segment: {result['plan']['num_segments']}")
    for failure in failures:
        print(f"FAILED  {failure}", file=sys.stderr)
    return not failures


if __name__ == "__main__":
    sys.exit(main())
