"""Simulated steps beside real ones: three models on an emulated device throttled to declared rates.

    OMP_WAIT_POLICY=passive python benchmarks/fidelity.py

Prints, for each model of `fidelity_runs`, the measured and the simulated step, what bounds them, the planned and the
measured peak of device memory, and the share of hideable copy time that was hidden; the same for the run of each plan
in which nothing overlaps (``sync``), whose step no simulation is held against. Writes a result under
benchmarks/results/, and ends with exit code 1 when a model passes a bound: 10 % of the step, 5 % of the peak,
90 % of the copy time that its plan hides, which is 85 % of what can be; or when what a plan has decided against runs
faster.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import provenance
import torch
from fidelity_runs import CASES, MAX_WORK_SHARE, Case, Run, declared_rates, hideable, moves_most, train

import chunkc

RESULTS = Path(__file__).parent / "results"
MAX_STEP_ERROR = 0.1
MAX_PEAK_ERROR = 0.05
MAX_PEAK_ERROR_BY_BLOCKS = 0.15
"""Where activations are large: some are alive within one operator only, those that move count for whole segments."""
MIN_HIDDEN_SHARE = 0.9
"""Of the copy time that is hidden as simulated."""
MIN_PLANNED_HIDDEN_SHARE = 0.85
"""Of the hideable copy time, as simulated: a plan may expose some where its step is the shorter for that."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run all cases, print and write the result, and return the exit code."""
    args = parse(argv)
    load_before = os.getloadavg()
    print(f"{'':14} {'measured':>9} {'simulated':>9} {'error':>6}  {'bound':7} {'peak':>6} {'hidden':>7} {'work':>6}")
    rows, failures = list[dict[str, Any]](), list[str]()
    chosen: Run | None = None
    for case in (case for case in CASES if args.only is None or case.name in args.only):
        is_choice = case.activations == "auto"
        for settings in ("throttle", "throttle,sync") if is_choice else ("throttle",):
            run = train(case, args.steps, settings)
            rows.append(row_of(case, settings, run))
            print(line_of(case, settings, run), flush=True)
            if "sync" in settings:
                continue
            failures += failures_of(case, run)
            failures += [] if is_choice or chosen is None else failures_of_choice(case, chosen, run)
            chosen = run if is_choice else chosen
    path = args.out or RESULTS / f"fidelity-{datetime.now(UTC):%Y-%m-%d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(describe(rows, load_before), indent=2) + "\n")
    for failure in failures:
        print(f"FAILED  {failure}", file=sys.stderr)
    return 1 if failures else 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Simulated steps against those of a throttled device.")
    parser.add_argument("--steps", type=int, default=10, help="measured steps of a run, behind two of warm-up")
    parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES], help="these cases alone")
    parser.add_argument("--out", type=Path, help="result file (default: one of this day under benchmarks/results)")
    return parser.parse_args(argv)


def line_of(case: Case, settings: str, run: Run) -> str:
    """One row of the printed table."""
    name = case.name if "sync" not in settings else "  in turn"
    simulated = "" if "sync" in settings else f"{run.simulated.step_ms:9.1f}"
    error = "" if "sync" in settings else f"{run.step_error:+6.1%}"
    return (
        f"{name:14.14} {run.step_ms:9.1f} {simulated:9} {error:6}  {run.bound:7} {run.peak_error:+6.1%} "
        f"{run.hidden_share:7.1%} {run.work_share:6.1%}"
    )


def row_of(case: Case, settings: str, run: Run) -> dict[str, Any]:
    """Measured and simulated times, for the result file."""
    copies_ms, waiting_ms = hideable(run.simulated)
    return {
        "case": case.name,
        "settings": settings,
        "plan": run.plan.digest(),
        "activations": case.activations,
        "copy_gb_per_s": case.copy_gb_per_s,
        "moved_saved_nbytes": run.plan.copies_nbytes,
        "saved_nbytes": sum(value.nbytes for value in run.plan.saved),
        "steps_ms": [round(ms, 3) for ms in run.steps_ms],
        "step_ms": round(run.step_ms, 3),
        "simulated_step_ms": round(run.simulated.step_ms, 3),
        "step_error": round(run.step_error, 5),
        "bound": run.bound,
        "simulated_bound": run.simulated.bound,
        "planned_peak_nbytes": run.plan.memory.device_peak_nbytes,
        "measured_peak_nbytes": run.peak_nbytes,
        "copies_ms": round(copies_ms, 3),
        "hideable_ms": round(copies_ms - waiting_ms, 3),
        "exposed_ms": round(run.exposed_ms, 3),
        "simulated_exposed_ms": round(run.simulated_exposed_ms, 3),
        "hidden_share": round(run.hidden_share, 5),
        "work_shares": {stream: round(share, 5) for stream, share in run.work_shares.items()},
        "overrun_share": round(run.overrun_share, 5),
        "is_disturbed": run.is_disturbed,
    }


def failures_of(case: Case, run: Run) -> list[str]:
    """The bounds that a run passes; of what a plan has decided against, those of the step alone."""
    found = []
    if abs(run.step_error) > MAX_STEP_ERROR:
        found.append(f"{case.name}: the simulated step is off by {run.step_error:+.1%}")
    if not {run.bound, run.simulated.bound} <= set(case.bounds):
        found.append(f"{case.name}: bound by {run.bound}, simulated {run.simulated.bound}")
    if case.moves is not None and moves_most(run.plan) != case.moves:
        found.append(f"{case.name}: {run.plan.copies_nbytes} bytes of saved values move")
    if case.activations != "auto":
        return found
    if abs(run.peak_error) > (MAX_PEAK_ERROR if case.moves is None else MAX_PEAK_ERROR_BY_BLOCKS):
        found.append(f"{case.name}: the planned peak is off by {run.peak_error:+.1%}")
    copies_ms, waiting_ms = hideable(run.simulated)
    hides_ms, hidden_ms = copies_ms - run.simulated_exposed_ms, copies_ms - run.exposed_ms
    if hides_ms < MIN_PLANNED_HIDDEN_SHARE * (copies_ms - waiting_ms):
        found.append(f"{case.name}: the plan hides {hides_ms:.1f} of {copies_ms - waiting_ms:.1f} ms of copies")
    if hidden_ms < MIN_HIDDEN_SHARE * hides_ms:
        found.append(f"{case.name}: {hidden_ms:.1f} of {hides_ms:.1f} ms of copies that the plan hides were hidden")
    return found


def failures_of_choice(other: Case, chosen: Run, run: Run) -> list[str]:
    """Compare ``run``, of ``other``, which the plan has decided against, with what it has chosen."""
    if run.step_ms > chosen.step_ms:
        return []
    return [f"{other.name}: {run.step_ms:.1f} ms a step, and {chosen.step_ms:.1f} ms as the plan has chosen"]


def describe(rows: Sequence[dict[str, Any]], load_before: tuple[float, float, float]) -> dict[str, Any]:
    """The figures with everything that a reader needs to judge and to repeat them."""
    rates = declared_rates()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "rows": list(rows),
        "load_1_5_15_min": {"before": load_before, "after": os.getloadavg()},
        "command": provenance.command(),
        "rates": {
            "matmul_tflops": rates.matmul_tflops[0].rate.median,
            "device_memory_gb_per_s": rates.device_memory_gb_per_s.median,
            "copy_gb_per_s": rates.h2d.gb_per_s.median,
            "copy_latency_us": rates.h2d.latency_us.median,
            "cpu_update_gparam_per_s": rates.cpu_update_gparam_per_s[0].rate.median,
        },
        "max_work_share": MAX_WORK_SHARE,
        "hardware": {"cores": os.cpu_count()},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "chunkc": chunkc.__version__,
        },
    }


if __name__ == "__main__":
    sys.exit(main())
