"""``chunkc simulate``: how long a step of a plan takes, and what bounds it, of a saved plan or of a model."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from chunkc.cli.options import load_plan, output_path, write
from chunkc.cli.subjects import MODEL_HELP, add_training_options, answer_of, is_plan_file, tell
from chunkc.errors import ChunkcError
from chunkc.report.timeline import Timeline, simulate
from chunkc.whatif import Scenarios

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
    parser.add_argument("--trace", type=output_path, metavar="trace.json", help="write every action, for Perfetto")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(args: argparse.Namespace) -> int:
    timeline = simulate(load_plan(args.model), args.hw) if is_plan_file(args.model) else _of_model(args)
    if timeline is None:
        return 1
    if args.trace:
        write(args.trace, lambda: Path(args.trace).write_text(json.dumps(timeline.trace()), encoding="utf-8"))
    print(json.dumps(timeline.to_json()) if args.json else timeline)
    return 0


def _of_model(args: argparse.Namespace) -> Timeline | None:
    """None where it does not fit, as standard error then says."""
    args.hw = args.hw or "auto"
    answer = answer_of(args, Scenarios(tell))
    if answer.shortage is not None:
        print(f"does not fit: {' '.join(str(answer.shortage).split())}", file=sys.stderr)
    elif answer.timeline is None:
        raise ChunkcError(answer.unpriced)
    return answer.timeline
