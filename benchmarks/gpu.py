"""Benchmark chunkc on one GPU against the machine's bound and against other systems.

    OMP_WAIT_POLICY=passive python benchmarks/gpu.py --out FOLDER [--limit-s 540] [--stand-in]

First a quick calibration, and from its rates the bound of each model (`gpu_bound`). Then the contests of `gpu_cases`,
the most telling first: systems on one model under one limit of memory, alive together, which take turns with blocks of
steps. Behind the first two come the kernels, each against a copy on the device.

FOLDER/benchmark.jsonl gets a line for everything as it is found (`journal`), each block of steps by itself, so that a
run that is killed keeps what it measured; the table at the end is made of these lines, and ``--show FOLDER`` makes it
again. Profiler traces stand beside it, and what processes say besides in FOLDER/benchmark.log. Everything together ends
within ``--limit-s`` seconds: a contest is not begun, and a block not asked for, that would end later.

The step time of a system is the median over its blocks. MFU is `Shape.step_flops` over step time and the dense bf16
rate of ``hardware.toml``. A ratio is the median over rounds of another system's block over chunkc's of the same round.
This process leaves the GPU alone: its context would count as memory that each system uses.

``--stand-in`` runs the same flow at toy sizes without a GPU: chunkc on the emulated device, all others on the CPU,
copies done at once, FSDP2 over gloo, kernels in Triton's interpreter. Nothing but chunkc is capped there.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import gpu_table
import provenance
from children import PYTHON, Child
from gpu_bound import bound
from gpu_cases import Contest, contests
from gpu_contest import environment, hold
from journal import Journal, records

from chunkc import Hardware
from chunkc.cost.rates import known_rates

HERE = Path(__file__).parent
KERNELS_AFTER = 2  # contests
CALIBRATION_S, KERNELS_S = 90.0, 60.0
LEAST_S = 8.0  # with less left, nothing is begun


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what fits into the time, and return the exit code: 1 where chunkc failed or found no time."""
    args = parse(argv)
    if args.show is not None:
        print(gpu_table.table(records(args.show / "benchmark.jsonl")))
        return 0
    deadline_s = time.monotonic() + args.limit_s
    journal = Journal(args.out / "benchmark.jsonl")
    journal.path.unlink(missing_ok=True)
    journal.write("run", **provenance.describe(args.commit), stand_in=args.stand_in, mfu=gpu_table.MFU)
    with tempfile.TemporaryDirectory() as scratch:
        profile = calibrate(args, journal, Path(scratch) / "profile.json", deadline_s)
        chosen = [c for c in contests(is_stand_in=args.stand_in) if args.only is None or c.name in args.only]
        for contest in chosen:
            describe(contest, profile, journal)
        for number, contest in enumerate(chosen):
            if number == KERNELS_AFTER:
                kernels(args, journal, deadline_s)
            hw = args.hw if profile is None else str(profile)
            hold(contest, hw, args, journal, deadline_s)
        if len(chosen) <= KERNELS_AFTER:
            kernels(args, journal, deadline_s)
    found = records(journal.path)
    journal.write("end")
    print(f"\n{gpu_table.table(found)}\n\nwritten to {journal.path}", flush=True)
    return 0 if gpu_table.is_complete(found) else 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="chunkc, its bounds and others on one GPU.")
    default = HERE / "results" / f"gpu-{datetime.now(UTC):%Y-%m-%d}"
    parser.add_argument("--out", type=Path, default=default, help=f"folder of the results (default: {default.name})")
    parser.add_argument("--limit-s", type=float, default=540.0, help="seconds for everything together")
    parser.add_argument("--stand-in", action="store_true", help="toy sizes, without a GPU")
    parser.add_argument("--only", action="append", help="a contest, by name; may be given several times")
    parser.add_argument("--commit", help="of this checkout, where it came without git's data")
    parser.add_argument("--show", type=Path, metavar="FOLDER", help="print the table of an earlier run")
    args = parser.parse_args(argv)
    args.hw = "emulated-64m-256m" if args.stand_in else "auto"
    return args


def calibrate(args: argparse.Namespace, journal: Journal, path: Path, deadline_s: float) -> Path | None:
    """The profile of this machine, None where it could not be made."""
    command = ["-m", "chunkc", "calibrate", "--quick", "--hw", args.hw, "-o", str(path)]
    outcome, text, seconds = run_child(command, args, min(CALIBRATION_S, deadline_s - time.monotonic()))
    is_there = outcome == "ran" and path.exists()
    fields = {"profile": json.loads(path.read_text())} if is_there else {"why": text}
    journal.write("calibration", outcome=outcome, seconds=seconds, **fields)
    report("calibration", outcome, text, seconds)
    return path if is_there else None


def describe(contest: Contest, profile: Path | None, journal: Journal) -> None:
    """The terms of a contest, and the bound of its model by measured rates."""
    hw = None if profile is None else Hardware.load(profile)
    rates = None if hw is None else known_rates(hw)
    found = None if rates is None else bound(contest.shape, rates, contest.device_nbytes)
    dense = None if hw is None or hw.tflops is None else hw.tflops.bf16
    journal.write("contest", contest=contest.name, facts=contest.facts(), bound=found, dense_bf16_tflops=dense)


def kernels(args: argparse.Namespace, journal: Journal, deadline_s: float) -> None:
    """Each kernel against a copy on the device."""
    left_s = deadline_s - time.monotonic()
    if left_s < LEAST_S:
        journal.write("kernels", outcome="not run", why="no time was left")
        return
    options = ["--quick"] if args.stand_in else []
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "kernels.json"
        command = [str(HERE / "gpu_kernels.py"), *options, "-o", str(path)]
        outcome, text, seconds = run_child(command, args, min(KERNELS_S, left_s))
        fields = json.loads(path.read_text()) if outcome == "ran" else {"why": text}
    journal.write("kernels", outcome=outcome, seconds=seconds, **fields)
    print(
        f"kernels        {outcome} in {seconds:.0f} s" + ("" if outcome == "ran" else f"\n{text[-1500:]}"), flush=True
    )


def report(name: str, outcome: str, text: str, seconds: float) -> None:
    """One line for the terminal, and the end of what was said where something went wrong."""
    print(f"{name}: {outcome} in {seconds:.0f} s" + ("" if outcome == "ran" else f"\n{text[-1500:]}"), flush=True)


def run_child(command: Sequence[str], args: argparse.Namespace, limit_s: float) -> tuple[str, str, float]:
    """Run a Python command: ``ran``, ``failed`` or ``timed out``, the end of its output, its seconds."""
    child = Child([*PYTHON, *command], environment(args.stand_in), args.out / "benchmark.log")
    with ExitStack() as stack:
        stack.callback(child.end, is_aborted=True)
        code = child.wait(limit_s)
    outcome = "timed out" if code is None else "failed" if code else "ran"
    return outcome, child.last_words(), round(child.seconds, 1)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended, too
    sys.exit(main())
