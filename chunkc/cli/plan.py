"""``chunkc plan``: can this model be trained on that machine, how fast, and what is in the way?"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time

from chunkc.cli import pictures
from chunkc.cli.advice import Adviser
from chunkc.cli.options import output_path, save
from chunkc.cli.output import show, tell
from chunkc.cli.screen import answer_json, render_answer
from chunkc.cli.subjects import (
    MODEL_HELP,
    add_plan_options,
    add_training_options,
    answer_of,
    fake_ranks,
    title_of,
)
from chunkc.hardware import Hardware
from chunkc.report import Plan
from chunkc.scenarios.scenario import Scenarios

HELP = "plan a model for hardware that need not be here; nothing runs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "--hw", default="auto", help="for example emulated-64m-2g or 8xv100-240g (default: this machine)"
    )
    add_training_options(parser)
    add_plan_options(parser)
    parser.add_argument("--save", type=output_path, metavar="plan.json", help="write the plan to this file too")
    pictures.add_arguments(parser)
    parser.add_argument("--no-advice", action="store_true", help="do not try what would help")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--table", action="store_true", help="print the plan as a table instead of the answer")
    form.add_argument("--full", action="store_true", help="print every action and every moment of it instead")
    form.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace) -> int:
    """Plan; a model that does not fit is an answer (exit code 1), not an error."""
    with fake_ranks(args):
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    began_s = time.perf_counter()
    hw, scenarios = Hardware.of(args.hw), Scenarios(tell)
    answer = answer_of(args, scenarios)
    if answer.plan is not None:
        if args.save:
            save(answer.plan, args.save)
        pictures.write_pictures(args, answer.plan, answer.timeline, answer.unpriced)
        if args.table or args.full:
            show(answer.plan.text() if args.full else answer.plan)
            return 0
    elif args.table or args.full:
        return 1
    with contextlib.redirect_stdout(sys.stderr):
        advice = () if args.no_advice else Adviser(scenarios, answer, began_s).advice()
    if args.json:
        show(json.dumps(answer_json(answer, hw, advice)))
    else:
        show(render_answer(answer, hw, advice, title_of(args, answer), _where(args, answer.plan)))
    return 0 if answer.fits else 1


def _where(args: argparse.Namespace, plan: Plan | None) -> str:
    if plan is None:
        return ""
    if args.save:
        return f"plan {plan.digest()}: chunkc explain {args.save}; chunkc simulate {args.save}"
    return f"plan {plan.digest()}: print it by --table or --full, keep it by --save plan.json"
