"""Time to the first step of README's loop, with compilers' caches empty and filled.

Each run is a process of its own: a Llama of 8 layers under ``emulated-96m-4g`` in float32, trained for two steps.
*Cold* runs begin with an empty TORCHINDUCTOR_CACHE_DIR, the *warm* run behind each uses what the cold one left there.
Seconds are those of imports, of the model with ``chunkc.compile``, and of the first step, with what the log says of its
parts; *total* is from the start of the process to the end of the first step. The script prints a table, writes a result
under benchmarks/results/, and ends with exit code 1 where the median of the first steps is beyond a limit.

    OMP_WAIT_POLICY=passive python benchmarks/first_step.py
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import provenance
import psutil

RESULTS = Path(__file__).parent / "results"
HW = "emulated-96m-4g"
PHASES = ("imports", "model", "captured", "planned", "compiled", "first_step", "total", "second_step")
LOGGED = re.compile(r"^(captured|planned|compiled) .* in ([\d.]+) s")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure pairs of runs, write the result, and return the exit code."""
    args = parse(argv)
    if args.child:
        print(json.dumps(measure(args.backend)))
        return 0
    load_before = os.getloadavg()
    print(f"{'':6}" + " ".join(f"{phase:>11}" for phase in PHASES), flush=True)
    rows = []
    for row in pairs(args):
        rows.append(row)
        print(f"{row['cache']:6}" + " ".join(f"{row['seconds'][phase]:11.2f}" for phase in PHASES), flush=True)
    result = {
        **provenance.describe(),
        "load_before": load_before,
        "settings": {"hw": HW, "backend": args.backend, "pairs": args.pairs},
        "median_s": {cache: medians(rows, cache) for cache in ("cold", "warm")},
        "rows": rows,
    }
    path = args.out or RESULTS / f"first_step-{result['date'][:10]}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    return verdict(result["median_s"], args)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time to the first step, with empty and with filled caches.")
    parser.add_argument("--pairs", type=int, default=3, help="cold runs, each with a warm one behind it")
    parser.add_argument("--backend", choices=["inductor", "eager"], default="inductor")
    parser.add_argument("--limit-cold-s", type=float, default=40.0, help="of the first step, without imports")
    parser.add_argument("--limit-warm-s", type=float, default=10.0)
    parser.add_argument("--child", action="store_true", help="measure one run here and print it as JSON")
    parser.add_argument("--out", type=Path, help="result file (default: one of this day under benchmarks/results)")
    return parser.parse_args(argv)


def pairs(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    command = [sys.executable, __file__, "--child", f"--backend={args.backend}"]
    for _ in range(args.pairs):
        with tempfile.TemporaryDirectory() as folder:
            for cache in ("cold", "warm"):
                environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "CHUNKC_PROGRESS": "0"}
                done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
                yield {"cache": cache, "load_1_min": os.getloadavg()[0], **json.loads(done.stdout.splitlines()[-1])}


class _Seconds(logging.Handler):
    """Seconds by phase, as the log says them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, float] = dict.fromkeys(("captured", "planned", "compiled"), 0.0)

    def emit(self, record: logging.LogRecord) -> None:
        match = LOGGED.match(record.getMessage())
        if match is not None:
            self.found[match[1]] += float(match[2])


def measure(backend: str) -> dict[str, Any]:
    """Run README's loop for two steps in this process."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import chunkc

    began_s, imported_s = psutil.Process().create_time(), time.time()
    seconds = _Seconds()
    logging.getLogger("chunkc").addHandler(seconds)
    logging.getLogger("chunkc").setLevel(logging.INFO)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1376, num_hidden_layers=8, num_attention_heads=8, vocab_size=256
    )
    model = chunkc.compile(LlamaForCausalLM(config), hw=HW, dtype=torch.float32, backend=backend)
    optimizer = chunkc.AdamW(model.parameters(), lr=5e-4)
    times_s, losses = [time.time()], []
    for _ in range(2):
        tokens = torch.randint(0, 256, (2, 64))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        times_s.append(time.time())
    made_s, first_s, second_s = times_s
    return {
        "seconds": {
            "imports": round(imported_s - began_s, 2),
            "model": round(made_s - imported_s, 2),
            **seconds.found,
            "first_step": round(first_s - made_s, 2),
            "total": round(first_s - began_s, 2),
            "second_step": round(second_s - first_s, 2),
        },
        "losses": losses,
        "digest": chunkc.plan_of(model).digest(),
    }


def medians(rows: Sequence[dict[str, Any]], cache: str) -> dict[str, float]:
    found = [row["seconds"] for row in rows if row["cache"] == cache]
    return {phase: round(statistics.median(seconds[phase] for seconds in found), 2) for phase in PHASES}


def verdict(median_s: dict[str, dict[str, float]], args: argparse.Namespace) -> int:
    """Print what is beyond its limit; 1 where something is, else 0."""
    limits_s = {"cold": args.limit_cold_s, "warm": args.limit_warm_s}
    late = {cache: s for cache, s in limits_s.items() if median_s[cache]["first_step"] > s}
    for cache, limit_s in late.items():
        print(f"FAILED  {cache}: first step after {median_s[cache]['first_step']} s, more than {limit_s}")
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
