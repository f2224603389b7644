"""``chunkc simulate``: the time of a step of a saved plan or a model, and what bounds it."""

from __future__ import annotations

import argparse
import json

from chunkc.cli import pictures
from chunkc.cli.options import load_plan
from chunkc.cli.output import show, tell
from chunkc.cli.subjects import (
    MODEL_HELP,
    add_plan_options,
    add_training_options,
    answer_of,
    fake_ranks,
    is_plan_file,
    refuse_model_options,
)
from chunkc.distributed.mesh import AUTO
from chunkc.errors import ChunkcError
from chunkc.report import Plan
from chunkc.report.timeline import Timeline, simulate
from chunkc.scenarios.scenario import Scenarios

HELP = "how long a step of a plan takes, and what bounds it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL|plan.json",
        help=f"a file that plan.save() or `chunkc plan --save` wrote, or a model to plan: {MODEL_HELP}",
    )
    parser.add_argument(
        "--hw",
        help="of a plan, whose rates: a profile of `chunkc calibrate`, or a name (default: the plan's); of a model, "
        "the machine (default: this one)",
    )
    add_training_options(parser)
    add_plan_options(parser)
    pictures.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(args: argparse.Namespace) -> int:
    simulated = _of_file(args) if is_plan_file(args.model) else _of_model(args)
    if simulated is None:
        return 1
    plan, timeline = simulated
    pictures.write_pictures(args, plan, timeline)
    show(json.dumps(timeline.to_json()) if args.json else timeline)
    return 0


def _of_file(args: argparse.Namespace) -> tuple[Plan, Timeline]:
    refuse_model_options(args)
    plan = load_plan(args.model)
    return plan, simulate(plan, args.hw)


def _of_model(args: argparse.Namespace) -> tuple[Plan, Timeline] | None:
    """None where it does not fit, as standard error then says."""
    args.hw = "auto" if args.hw is None else args.hw
    if args.mesh == AUTO:
        raise ChunkcError("--mesh auto is of `chunkc plan`, which names the mesh that it has chosen: give that")
    with fake_ranks(args):
        answer = answer_of(args, Scenarios(tell))
    if answer.plan is None:
        return None
    if answer.timeline is None:
        raise ChunkcError(answer.unpriced)
    return answer.plan, answer.timeline
