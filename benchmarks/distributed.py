"""Exchanges of several ranks in a step of chunkc, and times beside FSDP2, as local processes.

    OMP_WAIT_POLICY=passive python benchmarks/distributed.py

It starts two jobs of ``--ranks`` gloo processes, one after the other: in the first (*resident*) the emulated device
holds everything, in the second (*moving*) so little of it that chunks move between host and device; FSDP2 keeps
everything in both. Ranks share the cores evenly. In each job chunkc and FSDP2 train the same model in turn
(`distributed_rank` says how); the figure is the median over rounds of the ratio of their step times, to the fastest of
the FSDP2 that ran. The script ends with exit code 1 when a rank received other bytes than planned, when that of
the resident plan is above 6 (p - 1) / p M and padding (12 in fp32), when losses differ, or when chunkc is slower in the
resident job than ``--limit`` allows. The result is written under benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import provenance
import torch
import torch.distributed as dist
from distributed_rank import SIDES, Settings, measure
from gpu_models import Shape

import chunkc

RESULTS = Path(__file__).parent / "results"
MAX_LOSS_DIFFERENCE = {"float32": 1e-4, "bfloat16": 2e-2}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the jobs, or be one rank of one, and return the exit code."""
    args = parse(argv)
    if args.rank_of is not None:
        return be_rank(settings_of(args, args.rank_of), args.out)
    jobs = {name: run_job(name, args) for name in args.jobs.split(",")}
    result = {**describe(args), "jobs": jobs}
    path = args.out or RESULTS / f"distributed-{result['date'][:10]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {path}")
    failures = [failure for name, job in jobs.items() for failure in failures_of(name, job, args)]
    for failure in failures:
        print(f"FAILED  {failure}", file=sys.stderr)
    return 1 if failures else 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Bytes and time of a step over several ranks, beside FSDP2.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4, help="sequences of one rank")
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="of computing and exchanges"
    )
    parser.add_argument("--resident-hw", default="2g-16g", help="of the emulated machine: device and host memory")
    parser.add_argument("--moving-hw", default="144m-16g")
    parser.add_argument("--jobs", default="resident,moving")
    parser.add_argument("--sides", default=",".join(SIDES[:3]), help=f"of {', '.join(SIDES)}")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--block", type=int, default=2, help="steps of a side in a round")
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--limit", type=float, default=1.0, help="of the ratio in the resident job")
    parser.add_argument("--out", type=Path, help="result file (default: one of this day under benchmarks/results)")
    parser.add_argument("--rank-of", metavar="JOB", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def settings_of(args: argparse.Namespace, job: str) -> Settings:
    """The settings that the ranks of a job are told."""
    memory = {"resident": args.resident_hw, "moving": args.moving_hw}[job]
    heads = args.hidden // 64
    return Settings(
        shape=Shape(args.layers, args.hidden, heads, args.batch, length=args.seq, vocabulary=256),
        hw=f"{args.ranks}xemulated-{memory}",
        dtype=args.dtype,
        sides=tuple(args.sides.split(",")),
        rounds=args.rounds,
        block=args.block,
        warm_up=args.warm_up,
        threads=max(1, (os.cpu_count() or 1) // args.ranks),
    )


def be_rank(settings: Settings, out: Path) -> int:
    """One process of a job; rank 0 writes what it found."""
    dist.init_process_group("gloo")
    try:
        load_before = os.getloadavg()
        found = measure(settings)
        if dist.get_rank() == 0:
            found |= {"settings": asdict(settings), "load_1_5_15_min": [load_before, os.getloadavg()]}
            out.write_text(json.dumps(found))
    finally:
        dist.destroy_process_group()
    return 0


def run_job(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks of a job, wait, and return what rank 0 found, with the ratios."""
    threads = str(settings_of(args, name).threads)
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rank0.json"
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"]
        options = [f"--{key.replace('_', '-')}={value}" for key, value in vars(args).items() if key not in _OWN_OPTIONS]
        command = [sys.executable, "-m", *launcher, __file__, *options, f"--rank-of={name}", f"--out={out}"]
        print(f"{name}: {args.ranks} ranks on {settings_of(args, name).hw}", flush=True)
        subprocess.run(command, env=environment, check=True)
        found: dict[str, Any] = json.loads(out.read_text())
    found["comparison"] = compared(found["step_s"])
    print(json.dumps({key: found[key] for key in ("comparison", "wire_nbytes") if found[key]}, indent=2), flush=True)
    return found


_OWN_OPTIONS = frozenset({"out", "rank_of"})


def compared(step_s: dict[str, list[float]]) -> dict[str, Any]:
    """Medians of all sides, and of ratios of chunkc's times to theirs, with the range of the middle half."""
    found: dict[str, Any] = {"median_s": {name: round(statistics.median(times), 4) for name, times in step_s.items()}}
    if "chunkc" not in step_s:
        return found
    ratios = {name: ratio(step_s["chunkc"], times) for name, times in step_s.items() if name != "chunkc"}
    others = {name: median for name, median in found["median_s"].items() if name != "chunkc"}
    return {**found, "ratios": ratios, "fastest_other": min(others, key=others.__getitem__, default=None)}


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """The median of the ratios of the rounds, and their spread."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
    found = {"median": statistics.median(ratios), "quartile_1": low, "quartile_3": high}
    return {key: round(value, 4) for key, value in {**found, "min": min(ratios), "max": max(ratios)}.items()}


def failures_of(name: str, job: dict[str, Any], args: argparse.Namespace) -> list[str]:
    """List what should not be, in words."""
    found, losses = [], job["losses"]
    for other in losses.keys() - {"chunkc"} if "chunkc" in losses else ():
        difference = max(abs(a - b) for a, b in zip(losses["chunkc"], losses[other], strict=True))
        if difference > MAX_LOSS_DIFFERENCE[args.dtype]:
            found.append(f"{name}: the losses of chunkc and {other} differ by {difference:.1e}")
    exchanged = job.get("exchanged")
    if exchanged and exchanged["total_nbytes"] != exchanged["planned_nbytes"]:
        found.append(f"{name}: {exchanged['total_nbytes']} bytes came, {exchanged['planned_nbytes']} were planned")
    if exchanged and name == "resident" and exchanged["total_nbytes"] > exchanged["padded_nbytes"]:
        found.append(f"{name}: {exchanged['total_nbytes']} bytes came, more than {exchanged['padded_nbytes']}")
    fastest = job["comparison"].get("fastest_other")
    if fastest and name == "resident" and job["comparison"]["ratios"][fastest]["median"] > args.limit:
        median = job["comparison"]["ratios"][fastest]["median"]
        found.append(f"{name}: a step takes {median} x of {fastest}'s, more than {args.limit}")
    return found


def describe(args: argparse.Namespace) -> dict[str, Any]:
    """Everything that a reader needs to judge the figures and to repeat them."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": provenance.command(),
        "options": {key: value for key, value in vars(args).items() if key not in _OWN_OPTIONS},
        "commit": provenance.commit(),
        "hardware": {"processor": provenance.processor(), "cores": os.cpu_count(), "ranks": args.ranks},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "chunkc": chunkc.__version__,
        },
    }


if __name__ == "__main__":
    sys.exit(main())
