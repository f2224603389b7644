"""``chunkc plan``: plan a model for hardware that need not be here; nothing runs."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
from typing import Any

from chunkc.cli.functions import model_and_inputs
from chunkc.cli.options import DTYPES, Planner, chunk_size, save
from chunkc.errors import BudgetError
from chunkc.report import Plan
from chunkc.report.timeline import Timeline

HELP = "plan a model for hardware that need not be here; nothing runs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "function",
        metavar="module:function",
        help="returns (model, example_inputs), the inputs a dict by keyword or a tuple by position; the current "
        "directory is importable",
    )
    parser.add_argument(
        "--hw", default="auto", help="for example emulated-64m-2g or 8xv100-240g (default: this machine)"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="compute dtype (default: auto)")
    parser.add_argument("--chunk-size", type=chunk_size, default="auto", metavar="N", help="elements (default: auto)")
    parser.add_argument("--save", metavar="plan.json", help="write the plan to this file too")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--full", action="store_true", help="print everything instead of the table")
    form.add_argument("--json", action="store_true", help="print one JSON object instead: does it fit, and bytes")


def run(args: argparse.Namespace) -> int:
    """Plan; a model that does not fit is an answer (exit code 1), not an error."""
    options = {"hw": args.hw, "dtype": DTYPES[args.dtype], "chunk_size": args.chunk_size}
    try:
        with contextlib.redirect_stdout(sys.stderr):  # standard output is for the result alone
            model, example_inputs = model_and_inputs(args.function)
            plan = Plan.of((args.planner or _planner())(model, example_inputs=example_inputs, **options))
    except BudgetError as error:
        print(f"does not fit: {' '.join(str(error).split())}", file=sys.stderr)
        if args.json:
            print(json.dumps(_shortage(error)))
        return 1
    if args.save:
        save(plan, args.save)
    _pictures(args, plan, None)
    print(json.dumps(_fit(plan)) if args.json else plan.text() if args.full else plan)
    return 0


def _pictures(args: argparse.Namespace, plan: Plan, timeline: Timeline | None) -> None:
    """Write the pictures that were asked for; ``timeline`` is None where the machine's rates are not known."""


def _planner() -> Planner:
    """`chunkc.api.plan`, imported when it is needed: the other commands start without it."""
    planner: Planner = importlib.import_module("chunkc.api").plan
    return planner


def _fit(plan: Plan) -> dict[str, Any]:
    """What ``--json`` says of a plan; the smallest device memory is only searched for where a model does not fit."""
    return {
        "fits": True,
        "missing_nbytes": 0,
        "device_peak_nbytes": plan.memory.device_peak_nbytes,
        "device_budget_nbytes": plan.memory.device_budget_nbytes,
        "host_nbytes": plan.memory.host_nbytes,
        "host_budget_nbytes": plan.memory.host_budget_nbytes,
        "min_device_nbytes": None,
        "min_host_nbytes": None,
        "moment": plan.memory.nonmodel_segment,
        "digest": plan.digest(),
    }


def _shortage(error: BudgetError) -> dict[str, Any]:
    """The same keys for a model that does not fit; there is no plan, hence no peak and no digest."""
    return {
        "fits": False,
        "missing_nbytes": error.missing_nbytes,
        "device_peak_nbytes": None,
        "device_budget_nbytes": None,
        "host_nbytes": None,
        "host_budget_nbytes": None,
        "min_device_nbytes": error.min_device_nbytes,
        "min_host_nbytes": error.min_host_nbytes,
        "moment": error.moment,
        "digest": None,
        "tensors": list(error.tensors),
    }
