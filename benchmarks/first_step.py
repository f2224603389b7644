"""Time to the first step of README's loop, with compilers' caches empty and filled.

Each run is a process of its own: a Llama of 8 layers under ``emulated-96m-4g`` in float32, trained for two steps.
*Cold* runs begin with an empty TORCHINDUCTOR_CACHE_DIR, the *warm* run behind each uses what the cold one left there.
Beside each pair the same is done by ``torch.compile`` alone, whose model is whole on the device.
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
SYSTEMS, CACHES = ("chunkc", "torch"), ("cold", "warm")
PHASES = ("imports", "model", "captured", "planned", "compiled", "first_step", "total", "second_step")
LOGGED = re.compile(r"^(captured|planned|compiled) .* in ([\d.]+) s")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure pairs of runs, write the result, and return the exit code."""
    args = parse(argv)
    if args.child:
        print(json.dumps(measure_torch() if args.child == "torch" else measure(args.backend)))
        return 0
    load_before = os.getloadavg()
    print(f"{'':14}" + " ".join(f"{phase:>11}" for phase in PHASES), flush=True)
    rows = []
    for row in pairs(args):
        rows.append(row)
        found = (f"{row['seconds'].get(phase, 0):11.2f}" for phase in PHASES)
        print(f"{row['system']:8}{row['cache']:6}" + " ".join(found), flush=True)
    result = {
        **provenance.describe(),
        "load_before": load_before,
        "settings": {"hw": HW, "backend": args.backend, "pairs": args.pairs},
        "median_s": {cache: medians(rows, "chunkc", cache) for cache in CACHES},
        "torch_median_s": {cache: medians(rows, "torch", cache) for cache in CACHES},
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
    parser.add_argument("--child", choices=SYSTEMS, help="measure one run here and print it as JSON")
    parser.add_argument("--out", type=Path, help="result file (default: one of this day under benchmarks/results)")
    return parser.parse_args(argv)


def pairs(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for _ in range(args.pairs):
        for system in SYSTEMS:
            command = [sys.executable, __file__, f"--child={system}", f"--backend={args.backend}"]
            with tempfile.TemporaryDirectory() as folder:
                for cache in CACHES:
                    environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "CHUNKC_PROGRESS": "0"}
                    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
                    found = json.loads(done.stdout.splitlines()[-1])
                    yield {"system": system, "cache": cache, "load_1_min": os.getloadavg()[0], **found}


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
    from transformers import LlamaForCausalLM  # noqa: F401

    import chunkc

    imported_s, seconds = time.time(), _Seconds()
    logging.getLogger("chunkc").addHandler(seconds)
    logging.getLogger("chunkc").setLevel(logging.INFO)
    model = chunkc.compile(llama(), hw=HW, dtype=torch.float32, backend=backend)
    found = two_steps(model, chunkc.AdamW(model.parameters(), lr=5e-4), imported_s, seconds.found)
    return {**found, "digest": chunkc.plan_of(model).digest()}


def measure_torch() -> dict[str, Any]:
    """The same by ``torch.compile`` alone, with PyTorch's AdamW."""
    import torch
    from transformers import LlamaForCausalLM  # noqa: F401

    imported_s, model = time.time(), llama()
    compiled = torch.compile(model)
    return two_steps(compiled, torch.optim.AdamW(model.parameters(), lr=5e-4), imported_s, {})


def llama() -> Any:
    """README's model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1376, num_hidden_layers=8, num_attention_heads=8, vocab_size=256
    )
    return LlamaForCausalLM(config)


def two_steps(model: Any, optimizer: Any, imported_s: float, logged: dict[str, float]) -> dict[str, Any]:
    """Train; seconds by phase, those ``logged`` among them, and losses."""
    import torch

    times_s, losses = [time.time()], []
    for _ in range(2):
        tokens = torch.randint(0, 256, (2, 64))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        times_s.append(time.time())
    began_s, (made_s, first_s, second_s) = psutil.Process().create_time(), times_s
    return {
        "seconds": {
            "imports": round(imported_s - began_s, 2),
            "model": round(made_s - imported_s, 2),
            **logged,
            "first_step": round(first_s - made_s, 2),
            "total": round(first_s - began_s, 2),
            "second_step": round(second_s - first_s, 2),
        },
        "losses": losses,
    }


def medians(rows: Sequence[dict[str, Any]], system: str, cache: str) -> dict[str, float]:
    found = [row["seconds"] for row in rows if (row["system"], row["cache"]) == (system, cache)]
    phases = [phase for phase in PHASES if phase in found[0]]
    return {phase: round(statistics.median(seconds[phase] for seconds in found), 2) for phase in phases}


def verdict(median_s: dict[str, dict[str, float]], args: argparse.Namespace) -> int:
    """Print what is beyond its limit; 1 where something is, else 0."""
    limits_s = {"cold": args.limit_cold_s, "warm": args.limit_warm_s}
    late = {cache: s for cache, s in limits_s.items() if median_s[cache]["first_step"] > s}
    for cache, limit_s in late.items():
        print(f"FAILED  {cache}: first step after {median_s[cache]['first_step']} s, more than {limit_s}")
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
