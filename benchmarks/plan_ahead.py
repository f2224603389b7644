"""Time and memory of planning GPT-3 175B and shallower models, on the meta device, without a GPU.

Every depth is planned in a process of its own, so that its peak RSS is its own: a GPT-2 of transformers with 12,288
hidden units and 96 heads, activation checkpointing, one sequence of 1,024 tokens, for one of 32 A100s. The script
prints seconds by phase, writes a result under benchmarks/results/, and ends with exit code 1 when the deepest takes
more than ``--limit-s`` or ``--limit-gib``.

    OMP_WAIT_POLICY=passive python benchmarks/plan_ahead.py
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import provenance
import torch
import transformers
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import chunkc
from chunkc.passes import PIPELINE

RESULTS = Path(__file__).parent / "results"
CAPTURE = ("dynamo", "aot_autograd", "partition", "schedule")
PHASES = (*CAPTURE, "passes", "verify", "total")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every depth, write the result, and return the exit code."""
    args = parse(argv)
    if args.only is not None:
        print(json.dumps(measure(args.only, args)))
        return 0
    load_before = os.getloadavg()
    rows = []
    print(f"{'layers':>6} {'operators':>9} " + " ".join(f"{p:>12}" for p in PHASES) + f" {'peak RSS':>9}")
    for layers in args.layers:
        rows.append(in_a_process(layers, args))
        seconds = " ".join(f"{rows[-1]['seconds'][p]:12.2f}" for p in PHASES)
        print(f"{layers:6} {rows[-1]['num_operators']:9} {seconds} {rows[-1]['peak_rss_nbytes'] / 2**30:5.2f} GiB")
    result = describe(rows, load_before, args)
    path = args.out or RESULTS / f"plan_ahead-{result['date'][:10]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if verdict(rows[-1], args) else 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time and memory of planning GPT-3, by number of layers.")
    parser.add_argument("--hw", default="4x8xa100-40g-1024g")
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 24, 48, 96])
    parser.add_argument("--hidden", type=int, default=12288)
    parser.add_argument("--heads", type=int, default=96)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--backend", choices=["inductor", "eager"], default="inductor")
    parser.add_argument("--limit-s", type=float, default=60.0, help="for the deepest: seconds of chunkc.plan")
    parser.add_argument("--limit-gib", type=float, default=4.0, help="for the deepest: peak RSS of its process")
    parser.add_argument("--only", type=int, metavar="LAYERS", help="measure one depth here and print it as JSON")
    parser.add_argument("--out", type=Path, help="result file (default: one of this day under benchmarks/results)")
    return parser.parse_args(argv)


def build(layers: int, args: argparse.Namespace) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model and its inputs, on the meta device."""
    config = GPT2Config(
        n_layer=layers, n_embd=args.hidden, n_head=args.heads, n_positions=args.seq,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    with torch.device("meta"):
        model = GPT2LMHeadModel(config).train()
        tokens = torch.empty(1, args.seq, dtype=torch.long)
    model.activation_checkpointing_enable()
    return model, {"input_ids": tokens, "labels": tokens}


def measure(layers: int, args: argparse.Namespace) -> dict[str, Any]:
    """Plan one depth in this process."""
    model, inputs = build(layers, args)
    before, began_s, began_cpu_s = peak_rss_nbytes(), time.perf_counter(), time.process_time()
    plan = chunkc.plan(model, args.hw, example_inputs=inputs, backend=args.backend)
    total_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    stages = dict.fromkeys(CAPTURE, 0.0)
    for stage in plan.stages:  # of several captures, where few layers are captured in place of all
        stages[stage.name] = stages.get(stage.name, 0.0) + stage.elapsed_ms / 1e3
    passes_s = sum(stages[p.name] for p in PIPELINE)
    seconds = {**{name: stages[name] for name in (*CAPTURE, "verify")}, "passes": passes_s, "total": total_s}
    return {
        "layers": layers,
        "num_params": sum(p.numel() for p in model.parameters()),
        "num_operators": max(s.end_op for s in plan.graph_segments("forward"))
        + max(s.end_op for s in plan.graph_segments("backward")),
        "seconds": {phase: round(seconds[phase], 2) for phase in PHASES},
        "cpu_s": round(cpu_s, 2),
        "stages_s": {name: round(value, 3) for name, value in stages.items()},
        "peak_rss_nbytes": peak_rss_nbytes(),
        "peak_rss_before_nbytes": before,
        "digest": plan.digest(),
        "num_chunks": len(plan.layout.chunks),
        "num_segments": len(plan.segments),
        "device_peak_nbytes": plan.memory.device_peak_nbytes,
        "host_nbytes": plan.memory.host_nbytes,
    }


def peak_rss_nbytes() -> int:
    """Largest resident set of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # in KiB on Linux


def in_a_process(layers: int, args: argparse.Namespace) -> dict[str, Any]:
    """``measure`` in a fresh process."""
    options = [f"--{name}={getattr(args, name)}" for name in ("hw", "hidden", "heads", "seq", "backend")]
    command = [sys.executable, __file__, f"--only={layers}", *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def describe(
    rows: Sequence[dict[str, Any]], load_before: tuple[float, float, float], args: argparse.Namespace
) -> dict[str, Any]:
    """The figures with everything that a reader needs to judge and to repeat them."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "rows": list(rows),
        "load_1_5_15_min": {"before": load_before, "after": os.getloadavg()},
        "command": provenance.command(),
        "settings": {key: value for key, value in vars(args).items() if key not in ("out", "only")},
        "hardware": {"processor": provenance.processor(), "cores": os.cpu_count()},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "chunkc": chunkc.__version__,
        },
    }


def verdict(row: dict[str, Any], args: argparse.Namespace) -> bool:
    """Print what fails, and say whether nothing does."""
    failures = []
    if row["seconds"]["total"] > args.limit_s:
        failures.append(f"{row['layers']} layers took {row['seconds']['total']} s, more than {args.limit_s}")
    if row["peak_rss_nbytes"] > args.limit_gib * 2**30:
        failures.append(f"{row['layers']} layers took {row['peak_rss_nbytes']} bytes, more than {args.limit_gib} GiB")
    for failure in failures:
        print(f"FAILED  {failure}", file=sys.stderr)
    return not failures


if __name__ == "__main__":
    sys.exit(main())
