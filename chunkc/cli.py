"""The command line: make a plan without running anything, look at it, simulate it; measure this machine, describe it.

    chunkc explain plan.json [--full | --summary]
    chunkc plan module:function --hw 8xv100-240g [--dtype bfloat16] [--chunk-size N] [--save plan.json] [--json]
    chunkc simulate plan.json [--hw profile.json] [--json] [--trace trace.json]
    chunkc calibrate --hw emulated-64m-2g [-o profile.json] [--quick] [--json]
    chunkc env

Results go to standard output, log lines and everything that the user's code prints to standard error. Exit codes: 0
done, 1 the model does not fit the hardware, 2 an error, told in one line.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from chunkc.debug import visible
from chunkc.errors import BudgetError, ChunkcError
from chunkc.hardware import Hardware
from chunkc.report import Plan
from chunkc.report.environment import environment
from chunkc.report.timeline import simulate

Planner = Callable[..., Any]

_DTYPES: dict[str, torch.dtype | str] = {
    "auto": "auto",
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def main(argv: Sequence[str] | None = None, *, planner: Planner | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: arguments without the program's name; ``None`` takes the process's.
        planner: what the ``plan`` command calls; ``None`` takes `chunkc.api.plan`.
    """
    args = _parser().parse_args(argv)
    try:
        with visible(logging.getLogger("chunkc")):
            exit_code = _run(args, planner)
            sys.stdout.flush()
            return exit_code
    except ChunkcError as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, for example head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(args: argparse.Namespace, planner: Planner | None) -> int:
    if args.command == "explain":
        return _explain(args)
    if args.command == "calibrate":
        return _calibrate(args)
    if args.command == "simulate":
        return _simulate(args)
    return _plan(args, planner) if args.command == "plan" else _env()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="chunkc", description="Static chunk plans for training under a memory budget."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    explain = commands.add_parser("explain", help="show a saved plan")
    explain.add_argument("path", metavar="plan.json", help="a file that plan.save() wrote")
    form = explain.add_mutually_exclusive_group()
    form.add_argument("--full", action="store_true", help="everything: every action and every moment")
    form.add_argument("--summary", action="store_true", help="the numbers: memory, chunks, bytes moved")
    _add_plan(commands.add_parser("plan", help="plan a model for hardware that need not be here; nothing runs"))
    _add_simulate(commands.add_parser("simulate", help="how long a step of a saved plan takes, and what bounds it"))
    _add_calibrate(commands.add_parser("calibrate", help="measure this machine's copies, updates and arithmetic"))
    commands.add_parser("env", help="versions, processor, memory, GPUs and variables, for a bug report")
    return parser


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "function",
        metavar="module:function",
        help="returns (model, example_inputs), the inputs a dict by keyword or a tuple by position; the current "
        "directory is importable",
    )
    parser.add_argument(
        "--hw", default="auto", help="for example emulated-64m-2g or 8xv100-240g (default: this machine)"
    )
    parser.add_argument("--dtype", choices=_DTYPES, default="auto", help="compute dtype (default: auto)")
    parser.add_argument("--chunk-size", type=_chunk_size, default="auto", metavar="N", help="elements (default: auto)")
    parser.add_argument("--save", metavar="plan.json", help="write the plan to this file too")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--full", action="store_true", help="print everything instead of the table")
    form.add_argument("--json", action="store_true", help="print one JSON object instead: does it fit, and bytes")


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="plan.json", help="a file that plan.save() or `chunkc plan --save` wrote")
    parser.add_argument("--hw", help="whose rates: a profile of `chunkc calibrate`, or a name (default: the plan's)")
    parser.add_argument("--trace", type=_json_path, metavar="trace.json", help="write every action, for Perfetto")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def _add_calibrate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hw", default="auto", help="this machine, or an emulated device such as emulated-64m-2g (default: auto)"
    )
    parser.add_argument(
        "-o", "--output", type=_profile_path, metavar="profile.json", help="write the profile, which hw= takes"
    )
    parser.add_argument("--quick", action="store_true", help="a few seconds only; the spread is larger")
    parser.add_argument("--json", action="store_true", help="print the profile as one JSON object instead of tables")


def _chunk_size(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        numel = int(text)
    except ValueError:
        numel = 0
    if numel < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is neither auto nor a positive number of elements")
    return numel


def _profile_path(text: str) -> str:
    """Refused before anything is measured, since measuring takes a while."""
    if Path(text).suffix.lower() != ".json":
        raise argparse.ArgumentTypeError(f"{text!r} does not end in .json, by which hw= knows a profile")
    return _json_path(text)


def _json_path(text: str) -> str:
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"cannot write {text!r}: it is a folder, or the folder around it is missing")
    return text


def _explain(args: argparse.Namespace) -> int:
    plan = _load(args.path)
    print(plan.text() if args.full else plan.summary() if args.summary else plan)
    return 0


def _load(path: str) -> Plan:
    try:
        return Plan.load(path)
    except OSError as error:
        raise ChunkcError(f"cannot read {path}: {error.strerror}") from error


def _simulate(args: argparse.Namespace) -> int:
    timeline = simulate(_load(args.path), args.hw)
    if args.trace:
        _write(args.trace, lambda: Path(args.trace).write_text(json.dumps(timeline.trace()), encoding="utf-8"))
    print(json.dumps(timeline.to_json()) if args.json else timeline)
    return 0


def _plan(args: argparse.Namespace, planner: Planner | None) -> int:
    """Plan; a model that does not fit is an answer (exit code 1), not an error."""
    options = {"hw": args.hw, "dtype": _DTYPES[args.dtype], "chunk_size": args.chunk_size}
    try:
        with contextlib.redirect_stdout(sys.stderr):  # standard output is for the result alone
            model, example_inputs = _model_and_inputs(args.function)
            plan = Plan.of((planner or _planner())(model, example_inputs=example_inputs, **options))
    except BudgetError as error:
        print(f"does not fit: {' '.join(str(error).split())}", file=sys.stderr)
        if args.json:
            print(json.dumps(_shortage(error)))
        return 1
    if args.save:
        _save(plan, args.save)
    print(json.dumps(_fit(plan)) if args.json else plan.text() if args.full else plan)
    return 0


def _planner() -> Planner:
    """`chunkc.api.plan`, imported when it is needed: the other commands start without it."""
    planner: Planner = importlib.import_module("chunkc.api").plan
    return planner


def _model_and_inputs(spec: str) -> tuple[Any, Any]:
    """What the function named ``module:function`` returns; errors inside the user's module are the user's to see."""
    module_name, _, function_name = spec.partition(":")
    if not module_name or not function_name:
        raise ChunkcError(f"{spec!r} is not of the form module:function, for example train:build")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ChunkcError(f"no module {error.name!r} in {os.getcwd()} or the installed packages") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ChunkcError(f"module {module_name!r} has no function {function_name!r}")
    pair = function()
    if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], dict | tuple)):
        raise ChunkcError(f"{spec} must return (model, example_inputs) with the inputs a dict or a tuple")
    return pair[0], pair[1]


def _save(result: Plan | Hardware, path: str) -> None:
    _write(path, lambda: result.save(path))


def _write(path: str, write: Callable[[], object]) -> None:
    try:
        write()
    except OSError as error:
        raise ChunkcError(f"cannot write {path}: {error.strerror}") from error
    print(f"saved {path}", file=sys.stderr)


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


def _calibrate(args: argparse.Namespace) -> int:
    """Imported when it is needed, as `_planner` is."""
    calibration = importlib.import_module("chunkc.calibrate")
    effort = calibration.QUICK if args.quick else calibration.THOROUGH
    hw = calibration.calibrate(args.hw, effort, lambda line: print(line, file=sys.stderr, flush=True))
    if args.output:
        _save(hw, args.output)
    print(json.dumps(hw.profile()) if args.json else calibration.tables(hw, hw.rates))
    return 0


def _env() -> int:
    rows = environment()
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    return 0
