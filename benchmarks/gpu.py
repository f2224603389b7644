"""What chunkc does on one GPU: kernels against a device copy, training steps against what else there is.

    OMP_WAIT_POLICY=passive python benchmarks/gpu.py

Every case runs in a process of its own, so that memory and torch's caches begin clean; one that fails, takes longer
than its limit, or needs what is not installed is recorded as such, and the rest goes on. All of it ends within
``--limit`` seconds (nine minutes): cases are in order of importance, and those for which no time is left are recorded
as not run.

Models are GPT-2's architecture (`gpu_models`); systems and their settings are in `gpu_systems` and in the result.
Models that fit run on all of the GPU. Models that do not are made so by a cap: chunkc is told a machine with less
memory (``h200-16g-100g``), the others get as much of torch's allocator. Host memory bounds how large models can be:
14 bytes a parameter must stand there, so 128 GiB hold about 8 billion parameters, less than an H200 holds by itself.

Step time is the median over blocks of steps, each ended by a wait for everything that was launched, updates included.
MFU is `Shape.step_flops` over step time and the dense bf16 rate of ``hardware.toml``. Peaks are those of torch's
allocator from the fourth step on, reserved and allocated, and what the driver says is used in the end.

``--quick --hw emulated-64m-1g`` runs the same flow at toy sizes without a GPU, kernels in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from gpu_models import Shape, batches

RESULTS = Path(__file__).parent / "results"
GIB = 1 << 30
KERNELS = "kernels"
MEDIUM = Shape(layers=24, hidden=1024, heads=16, batch=8)
LARGE = Shape(layers=24, hidden=2048, heads=16, batch=4)
LARGER = Shape(layers=32, hidden=2560, heads=20, batch=4)
TOY = Shape(layers=2, hidden=64, heads=2, batch=2, length=32, vocabulary=128)


@dataclass(frozen=True, slots=True)
class Case:
    """A system on a model within ``hw``; ``cap_nbytes`` for those that cannot be told; ``limit_s`` for the process."""

    name: str
    system: str
    shape: Shape
    hw: str
    limit_s: float
    cap_nbytes: int = 0
    block: int = 5
    num_blocks: int = 4


def cases_of(quick: bool, hw: str) -> list[Case]:
    """All cases in order of importance."""
    if quick:
        few = {"block": 2, "num_blocks": 2}
        systems = ("chunkc", "eager", "compile", "fsdp2", "torchao", "deepspeed")
        return [Case(KERNELS, KERNELS, TOY, hw, 60)] + [Case(f"toy {s}", s, TOY, hw, 120, **few) for s in systems]
    cap = {"hw": "h200-16g-100g", "cap_nbytes": 16 * GIB, "block": 3, "num_blocks": 3}
    whole = {"hw": hw}
    return [
        Case(KERNELS, KERNELS, TOY, hw, 60),
        Case("355M chunkc", "chunkc", MEDIUM, limit_s=90, **whole),
        Case("355M compile", "compile", MEDIUM, limit_s=100, **whole),
        Case("1.3B in 16 GiB chunkc", "chunkc", LARGE, limit_s=150, **cap),
        Case("1.3B in 16 GiB fsdp2", "fsdp2", LARGE, limit_s=90, **cap),
        Case("1.3B in 16 GiB torchao", "torchao", LARGE, limit_s=90, **cap),
        Case("1.3B in 16 GiB deepspeed", "deepspeed", LARGE, limit_s=90, **cap),
        Case("1.3B chunkc", "chunkc", LARGE, limit_s=120, **whole),
        Case("1.3B compile", "compile", LARGE, limit_s=90, **whole),
        Case("2.7B in 24 GiB chunkc", "chunkc", LARGER, "h200-24g-100g", 150, block=2, num_blocks=2),
        Case("355M eager", "eager", MEDIUM, limit_s=45, **whole),
        Case("1.3B in 16 GiB fsdp2_compile", "fsdp2_compile", LARGE, limit_s=90, **cap),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run all cases, or the one that a child is told, and return the exit code: 1 where a case of chunkc failed."""
    args = parse(argv)
    if args.case is not None:
        print(json.dumps(run_case(next(c for c in cases_of(args.quick, args.hw) if c.name == args.case), args)))
        return 0
    deadline_s = time.monotonic() + args.limit
    cases = [c for c in cases_of(args.quick, args.hw) if args.only is None or c.system in args.only.split(",")]
    found = {}
    for case in cases:
        found[case.name] = result = in_child(case, args, deadline_s - time.monotonic())
        print(f"{case.name:32} {outcome(result)}", flush=True)
    report = {**describe(args), "cases": found}
    path = args.out / f"gpu-{report['date'][:10]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(f"written to {path}")
    ours = [found[c.name]["outcome"] for c in cases if c.system in (KERNELS, "chunkc")]
    return 0 if all(outcome == "ran" for outcome in ours) else 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Kernels and training steps of chunkc and others on one GPU.")
    parser.add_argument("--hw", default="auto", help="machine for models that fit (default: all of this GPU)")
    parser.add_argument("--limit", type=float, default=530.0, help="seconds for all cases together")
    parser.add_argument("--only", help="systems, by commas: kernels, chunkc, eager, compile, fsdp2, ...")
    parser.add_argument("--quick", action="store_true", help="toy sizes")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def in_child(case: Case, args: argparse.Namespace, left_s: float) -> dict[str, Any]:
    """The result of a case in a process of its own; what went wrong, where something did."""
    from gpu_systems import PACKAGES

    settings = {"system": case.system, "shape": asdict(case.shape), "hw": case.hw, "cap_nbytes": case.cap_nbytes}
    package = PACKAGES.get(case.system)
    if package is not None and importlib.util.find_spec(package) is None:
        return {**settings, "outcome": "not importable", "why": f"{package} is not installed here"}
    limit_s = min(case.limit_s, left_s)
    if limit_s < 20:
        return {**settings, "outcome": "not run", "why": "no time was left"}
    command = [sys.executable, __file__, "--case", case.name, "--hw", args.hw, *(["--quick"] if args.quick else [])]
    started_s = time.monotonic()
    try:
        done = subprocess.run(command, env=environment(args), capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {**settings, "outcome": "timed out", "why": f"not done in {limit_s:.0f} s"}
    settings["process_s"] = round(time.monotonic() - started_s, 1)
    if done.returncode:
        return {**settings, "outcome": "failed", "why": done.stderr[-4000:]}
    return {**settings, "outcome": "ran", **json.loads(done.stdout.splitlines()[-1])}


def environment(args: argparse.Namespace) -> dict[str, str]:
    """What every child runs in: passive OpenMP threads, and an allocator that wastes least."""
    extra = {"OMP_WAIT_POLICY": "passive", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    if args.quick and not torch.cuda.is_available():
        extra["TRITON_INTERPRET"] = "1"
    return {**os.environ, **extra}


def run_case(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Measure, in the child."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if case.system == KERNELS:
        from gpu_kernels import measure

        return measure(1 << 14 if args.quick else 1 << 28, 5 if args.quick else 41, device)
    from gpu_systems import SYSTEMS

    cap(case, device)
    torch.manual_seed(0)
    started_s = time.perf_counter()
    system = SYSTEMS[case.system](case.shape, device, case.hw)
    data = batches(case.shape, 4, device)
    first = float(system.step(data[0]))
    system.finish()
    ready_s = time.perf_counter() - started_s
    for batch in data[1:3]:
        system.step(batch)
    system.finish()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    blocks = [block_s(system, data, case.block) for _ in range(case.num_blocks)]
    last = float(system.step(data[0]))
    found = {"settings": system.settings, "losses": {"first": first, "last": last}, "ready_s": round(ready_s, 1)}
    return {**found, **figures(case, statistics.median(blocks) / case.block, blocks, args, device), **system.facts()}


def cap(case: Case, device: torch.device) -> None:
    """Let torch's allocator have no more than the cap; chunkc is told by ``hw``."""
    if case.cap_nbytes and case.system != "chunkc" and device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(case.cap_nbytes / torch.cuda.get_device_properties(0).total_memory)


def block_s(system: Any, data: Sequence[Any], num_steps: int) -> float:
    """Seconds of so many steps, until nothing is pending."""
    started_s = time.perf_counter()
    for number in range(num_steps):
        system.step(data[number % len(data)])
    system.finish()
    return time.perf_counter() - started_s


def figures(
    case: Case, step_s: float, blocks: Sequence[float], args: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    """Step time, rate, utilisation and memory."""
    import chunkc

    shape, flops = case.shape, case.shape.step_flops()
    rates = chunkc.Hardware.parse(args.hw).tflops
    found = {
        "num_params": shape.num_params(),
        "step_ms": round(step_s * 1000, 2),
        "step_ms_of_blocks": [round(block / case.block * 1000, 2) for block in blocks],
        "tokens_per_s": round(shape.tokens / step_s, 1),
        "tflops": round(flops / step_s / 1e12, 3),
        "mfu": None if rates is None or not rates.bf16 else round(flops / step_s / (rates.bf16 * 1e12), 4),
    }
    if device.type == "cuda":
        found["peak_reserved_nbytes"] = torch.cuda.max_memory_reserved()
        found["peak_allocated_nbytes"] = torch.cuda.max_memory_allocated()
        free, total = torch.cuda.mem_get_info()
        found["gpu_used_nbytes"] = total - free
    return found


def outcome(result: dict[str, Any]) -> str:
    """One line for the terminal."""
    if result["outcome"] != "ran":
        return f"{result['outcome']}: {result['why'].strip().splitlines()[-1][:150]}"
    if "kernels" in result:
        return ", ".join(f"{name} {row['ratio']} of a copy" for name, row in result["kernels"].items())
    peak = result.get("peak_reserved_nbytes")
    memory = "" if peak is None else f", {peak / GIB:.1f} GiB reserved"
    mfu = "" if result["mfu"] is None else f", MFU {result['mfu']:.1%}"
    return f"{result['step_ms']:.1f} ms a step, {result['tokens_per_s']:.0f} tokens/s{mfu}{memory}"


def describe(args: argparse.Namespace) -> dict[str, Any]:
    """What a reader needs to judge and to repeat the figures."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
        "settings": {name: str(value) for name, value in vars(args).items() if name not in ("case", "out")},
        "environment": {k: v for k, v in environment(args).items() if k.startswith(("OMP_", "PYTORCH_", "CUDA_"))},
        "commit": _git("rev-parse", "HEAD") + (" with changes" if _git("status", "--porcelain") else ""),
        "hardware": hardware(),
        "load_1_5_15_min": os.getloadavg(),
        "versions": {name: version(name) for name in ("torch", "triton", "transformers", "torchao", "deepspeed")}
        | {"python": platform.python_version(), "cuda": torch.version.cuda, "chunkc": version("chunkc")},
        "mfu_formula": "(6 N + 12 L H S) T / step time / dense bf16 rate of hardware.toml; see gpu_models.Shape",
    }


def hardware() -> dict[str, Any]:
    """GPU, driver and host; the driver is asked for in nvidia-smi, and absent where that is."""
    import psutil

    found: dict[str, Any] = {"cores": os.cpu_count(), "host_nbytes": psutil.virtual_memory().total}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "gpu_nbytes": properties.total_memory}
        found["driver"] = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return found


def version(package: str) -> str | None:
    """Of an installed package."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as find

    try:
        return find(package)
    except PackageNotFoundError:
        return None


def _git(*command: str) -> str:
    return _output(["git", "-C", str(Path(__file__).parent.parent), *command])


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


if __name__ == "__main__":
    sys.exit(main())
