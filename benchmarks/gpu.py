"""What chunkc does on one GPU: kernels against a device copy, training steps against what else there is.

    OMP_WAIT_POLICY=passive python benchmarks/gpu.py

Every case runs in a process of its own, so that memory and torch's caches begin clean; one that fails, takes longer
than its limit, or needs what is not installed is recorded as such, and the rest goes on. All of it ends within
``--limit`` seconds (nine minutes): cases are in order of importance, and those for which no time is left are recorded
as not run. The result is written after every case, so that an interruption costs the rest only. This process itself
leaves the GPU alone: its context would count as memory that each case uses.

Models are GPT-2's architecture (`gpu_models`); systems and their settings are in `gpu_systems` and in the result.
Models that fit run on all of the GPU. Models that do not are made so by a cap: chunkc is told a machine with less
memory (``h200-16g-100g``), the others get as much of torch's allocator. Host memory bounds how large models can be:
14 bytes a parameter must stand there, so 128 GiB hold about 8 billion parameters, less than an H200 holds by itself.

Step time is the median over blocks of steps, each ended by a wait for everything that was launched, updates included.
MFU is `Shape.step_flops` over step time and the dense bf16 rate of ``hardware.toml``. Peaks are those of torch's
allocator, reserved and allocated, from the fourth step on (of the last step with chunkc, which reads peaks step by
step), and what the driver says is used in the end.

``--quick --hw emulated-64m-1g`` runs the same flow at toy sizes without a GPU, kernels in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from gpu_models import Shape, batches

RESULTS = Path(__file__).parent / "results"
GIB = 1 << 30
KERNELS = "kernels"
MARK = "result: "
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
        systems = ("chunkc", "eager", "compile", "fsdp2", "fsdp2_compile", "torchao", "deepspeed")
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
        case = next(c for c in cases_of(args.quick, args.hw) if c.name == args.case)
        print(MARK + json.dumps(run_case(case, args)), flush=True)
        return 0
    deadline_s = time.monotonic() + args.limit
    cases = [c for c in cases_of(args.quick, args.hw) if args.only is None or c.system in args.only.split(",")]
    found: dict[str, Any] = {}
    report = {**describe(args), "cases": found}
    path = args.out / f"gpu-{report['date'][:10]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    for case in cases:
        load = os.getloadavg()[0]
        result = in_child(case, args, deadline_s - time.monotonic())
        found[case.name] = {**result, "load_1_min_before": round(load, 2)}
        print(f"{case.name:32} {outcome(result)}", flush=True)
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
    code, said, complaints = bounded(command, environment(args), limit_s)
    settings["process_s"] = round(time.monotonic() - started_s, 1)
    if code is None:
        return {**settings, "outcome": "timed out", "why": f"{complaints[-4000:]}\nnot done in {limit_s:.0f} s"}
    found = result_in(said)
    if code or found is None:
        why = f"exit code {code}{'' if found else ', no result'}\n{complaints[-4000:]}"
        return {**settings, **(found or {}), "outcome": "failed", "why": why}
    return {**settings, **found, "outcome": "ran"}


def bounded(command: Sequence[str], env: dict[str, str], limit_s: float) -> tuple[int | None, str, str]:
    """Exit code (None: not done in time), output and errors of a command; with it goes whatever it has started."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(command, env=env, stdout=output, stderr=errors, process_group=0)
        try:
            code: int | None = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError):  # nothing of it is left
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return code, texts[0], texts[1]


def result_in(said: str) -> dict[str, Any] | None:
    """What a case printed, among what libraries print."""
    lines = [line for line in said.splitlines() if line.startswith(MARK)]
    found: dict[str, Any] | None = json.loads(lines[-1].removeprefix(MARK)) if lines else None
    return found


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
    rates = chunkc.Hardware.of(args.hw).tflops
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
        "commit": _git("rev-parse", "HEAD"),
        "changes": _git("status", "--porcelain").splitlines(),
        "hardware": hardware(),
        "load_1_5_15_min": os.getloadavg(),
        "versions": {name: version(name) for name in ("torch", "triton", "transformers", "torchao", "deepspeed")}
        | {"python": platform.python_version(), "cuda": torch.version.cuda, "chunkc": version("chunkc")},
        "mfu_formula": "(6 N + 12 L H S) T / step time / dense bf16 rate of hardware.toml; see gpu_models.Shape",
    }


def hardware() -> dict[str, Any]:
    """Host, and what nvidia-smi says of the GPU and of what else is on it, which takes nothing of its memory."""
    import psutil

    asked = "name,memory.total,memory.used,driver_version,clocks.max.sm,power.limit"
    command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
    gpu = _output(command) if torch.cuda.is_available() else None
    return {"cores": os.cpu_count(), "host_nbytes": psutil.virtual_memory().total, "gpu": gpu, "gpu_columns": asked}


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
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


if __name__ == "__main__":
    sys.exit(main())
