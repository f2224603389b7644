"""``chunkc plan``: can this model be trained on that machine, how fast, and what is in the way?"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time

from chunkc.cli import pictures, pipelines
from chunkc.cli.advice import Adviser
from chunkc.cli.meshes import Candidate, best_of, candidates, render
from chunkc.cli.options import MAX_RANKS, output_path, save, up_to
from chunkc.cli.output import one_line, show, tell
from chunkc.cli.screen import answer_json, render_answer
from chunkc.cli.subjects import (
    MODEL_HELP,
    add_plan_options,
    add_training_options,
    answer_of,
    fake_ranks,
    quietly,
    scenario_of,
    title_of,
    transformer_of,
)
from chunkc.distributed.mesh import AUTO
from chunkc.errors import ChunkcError
from chunkc.hardware import Hardware
from chunkc.report import Plan
from chunkc.scenarios.scenario import Answer, Scenarios

HELP = "plan a model for hardware that need not be here; nothing runs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "--hw", default="auto", help="for example emulated-64m-2g or 8xv100-240g (default: this machine)"
    )
    add_training_options(parser)
    add_plan_options(parser)
    parser.add_argument(
        "--stage",
        type=up_to(MAX_RANKS),
        metavar="N",
        help="of a mesh with pp: the plan of this stage, from 1 on",
    )
    parser.add_argument("--save", type=output_path, metavar="plan.json", help="write the plan to this file too")
    pictures.add_arguments(parser)
    parser.add_argument("--no-advice", action="store_true", help="do not try what would help")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--table", action="store_true", help="print the plan as a table instead of the answer")
    form.add_argument("--full", action="store_true", help="print every action and every moment of it instead")
    form.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace) -> int:
    """Plan; a model that does not fit is an answer (exit code 1), not an error."""
    if args.mesh == AUTO:
        _check_auto(args)
    with fake_ranks(args):
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    hw, scenarios, tried = Hardware.of(args.hw), Scenarios(tell), list[Candidate]()
    if pipelines.shows_stages(args):
        return pipelines.run(args, scenarios)
    if args.mesh == AUTO:
        tried = _candidates(args, scenarios)
    began_s = time.perf_counter()
    answer = _told(best_of(tried)) if tried else answer_of(args, scenarios)
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
        is_stage = args.stage is not None  # whose advice would not be that of the pipeline
        advice = () if args.no_advice or is_stage else Adviser(scenarios, answer, began_s).advice()
    if args.json:
        meshes = [{**candidate.to_json(), "is_chosen": candidate is best_of(tried)} for candidate in tried]
        show(json.dumps(answer_json(answer, hw, advice) | ({"meshes": meshes} if tried else {})))
    else:
        if tried:
            show(f"{render(tried, best_of(tried))}\n")
        show(render_answer(answer, hw, advice, title_of(args, answer), _where(args, answer.plan)))
    return 0 if answer.fits else 1


def _check_auto(args: argparse.Namespace) -> None:
    """Refuse ``--mesh auto`` where there is no choice; one device has no mesh."""
    if transformer_of(args.model) is None:
        raise ChunkcError(
            f"--mesh auto is for built-in models and config.json: {args.model} parallelises its model itself. Give "
            "the mesh that it makes"
        )
    if args.shard != "all":
        raise ChunkcError("--shard beside --mesh auto: the meshes that it tries divide model data within nodes, too")
    if Hardware.of(args.hw).num_ranks(args.world_size) == 1:
        args.mesh = None


def _candidates(args: argparse.Namespace, scenarios: Scenarios) -> list[Candidate]:
    with quietly():
        model = transformer_of(args.model)
        return [] if model is None else candidates(scenario_of(args, model), scenarios)


def _told(best: Candidate) -> Answer:
    """The answer of the mesh that was chosen; standard error says which it is."""
    if best.answer is None:
        raise ValueError(f"{best.options} has no answer")
    tell(f"chosen: {best.options}")
    if best.answer.shortage is not None:
        tell(one_line(f"does not fit: {best.answer.shortage}"))
    return best.answer


def _where(args: argparse.Namespace, plan: Plan | None) -> str:
    if plan is None:
        return ""
    if args.save:
        return f"plan {plan.digest()}: chunkc explain {args.save}; chunkc simulate {args.save}"
    return f"plan {plan.digest()}: print it by --table or --full, keep it by --save plan.json"
