"""``chunkc compare``: other systems, modelled, beside chunkc's plan of a model on a machine.

All of them get the same operators and the same rates. ``--activations auto`` holds for each by itself: layers are
computed again where the model does not fit otherwise.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from chunkc.baselines import POLICIES, Course, Machine, Outcome, Policy
from chunkc.cli.advice import missing
from chunkc.cli.output import show, tell
from chunkc.cli.subjects import MODEL_HELP, add_training_options, scenario_of, transformer_of
from chunkc.errors import ChunkcError
from chunkc.hardware import Hardware
from chunkc.ir.tiers import COPIED_TIERS
from chunkc.progress import stage, within
from chunkc.report.columns import table, wrapped
from chunkc.report.timeline import SHORT_MEANINGS, Timeline, duration
from chunkc.report.units import size
from chunkc.scenarios.scenario import Answer, Recompute, Scenario, Scenarios

HELP = "what other systems, modelled, would make of a model on a machine"
_SPEEDS: Final = ("policy", "fits", "recompute", "step", "tokens/s", "TFLOPS", "bound")
_BYTES: Final = ("policy", "moved", "device", "host", "TFLOPS by PatrickStar")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--hw", default="auto", help="for example v100-240g or 8xv100-240g (default: this machine)")
    add_training_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Compare; exit code 1 where the model fits by no policy.

    Raises:
        ChunkcError: for a model or a number of ranks that cannot be compared.
    """
    model, hw = transformer_of(args.model), Hardware.of(args.hw)
    if model is None:
        raise ChunkcError(f"compare takes built-in models and config.json; {args.model} is a function")
    if args.world_size not in (None, hw.num_gpus):
        raise ChunkcError(f"compare takes all GPUs of the machine: {hw} has {hw.num_gpus}, not {args.world_size}")
    rows = compare(scenario_of(args, model), Scenarios(tell))
    if args.json:
        show(json.dumps({"model": model.label, "hw": str(hw), "policies": rows}))
    else:
        heading = f"{model.label} on {hw}, simulated, of one rank; systems other than chunkc are modelled"
        heading = wrapped(heading, "  ")
        show(f"{heading}\n\n{render(rows)}")
    return 0 if any(row["fits"] for row in rows) else 1


def compare(scenario: Scenario, scenarios: Scenarios) -> list[dict[str, Any]]:
    """One row of plain data for chunkc's plan and each policy; HardwareError without rates."""
    machine = Machine.of(scenario.hw)
    total = 1 + len(POLICIES)
    with within(f"1/{total} chunkc"):
        rows = [_of_answer(scenarios.answer(scenario))]
    courses: dict[Recompute, Course] = {}
    for number, (name, policy) in enumerate(POLICIES.items(), 2):
        with within(f"{number}/{total} {name}"):
            stage("modelling")
            outcome, recompute = _best(policy, machine, scenario, scenarios, courses)
        rows.append({**outcome.to_json(), "recompute": str(recompute)})
        tell(f"{name}: {'fits' if rows[-1]['fits'] else 'does not fit'}")
    return rows


def _best(
    policy: Policy, machine: Machine, scenario: Scenario, scenarios: Scenarios, courses: dict[Recompute, Course]
) -> tuple[Outcome, Recompute]:
    """With the scenario's recomputation; for ``auto``, with as little as fits; and which that is."""
    is_auto = scenario.recompute is Recompute.AUTO
    for recompute in (Recompute.NONE, Recompute.FULL) if is_auto else (scenario.recompute,):
        if recompute not in courses:
            captured = scenarios.captured(replace(scenario, recompute=recompute))
            courses[recompute] = Course.of(captured.schedule, scenario.model.label)
        outcome = policy(courses[recompute], machine)
        if outcome.fits:
            break
    return outcome, recompute


def _of_answer(answer: Answer) -> dict[str, Any]:
    plan, timeline = answer.plan, answer.timeline
    row: dict[str, Any] = {
        "policy": "chunkc",
        "hw": None if answer.scenario is None else str(answer.scenario.hw),
        "recompute": None if answer.scenario is None else str(answer.scenario.recompute),
        "modelled": False,
        "fits": plan is not None,
        "why_not": "" if answer.shortage is None else missing(answer.shortage),
        "missing_nbytes": 0 if answer.shortage is None else answer.shortage.missing_nbytes,
        "device_peak_nbytes": None if plan is None else plan.memory.device_peak_nbytes,
        "host_nbytes": None if plan is None else plan.memory.host_nbytes,
        "moved_nbytes": 0 if timeline is None else _moved_nbytes(timeline),
    }
    names = ("step_ms", "tokens_per_s", "patrickstar_tflops", "model_tflops", "bound")
    return {**row, **{name: None if timeline is None else getattr(timeline, name) for name in names}, "notes": []}


def _moved_nbytes(timeline: Timeline) -> int:
    return sum(timeline.stream(stream).nbytes for stream in COPIED_TIERS)


def render(rows: Sequence[dict[str, Any]]) -> str:
    """Two tables, of speeds and of bytes; policies by which the model does not fit say why below them."""
    priced_rows = [row for row in rows if row["step_ms"] is not None]
    parts = [table(_SPEEDS, [_speeds(row) for row in rows], "lllrrrl")]
    if priced_rows:
        parts.append(table(_BYTES, [_bytes(row) for row in priced_rows], "lrrrr"))
    reasons = [wrapped(f"{row['policy']} does not fit: {row['why_not']}", "  ") for row in rows if not row["fits"]]
    return "\n\n".join(parts + (["\n".join(reasons)] if reasons else []))


def _speeds(row: dict[str, Any]) -> tuple[str, ...]:
    if row["step_ms"] is None:
        return (row["policy"], "yes" if row["fits"] else "no", row["recompute"], "", "", "", "")
    speed = "" if row["tokens_per_s"] is None else f"{row['tokens_per_s']:,.0f}"
    rates = (duration(row["step_ms"]), speed, f"{row['model_tflops']:.1f}", SHORT_MEANINGS[row["bound"]])
    return (row["policy"], "yes", row["recompute"], *rates)


def _bytes(row: dict[str, Any]) -> tuple[str, ...]:
    counted = "" if row["patrickstar_tflops"] is None else f"{row['patrickstar_tflops']:.1f}"
    sizes = (size(row[name]) for name in ("moved_nbytes", "device_peak_nbytes", "host_nbytes"))
    return (row["policy"], *sizes, counted)
