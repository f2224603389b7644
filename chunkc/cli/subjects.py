"""Subject of a command: a model by name, Hugging Face configuration or function, and its training."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from chunkc._torch_compat.fake_job import fake_job
from chunkc.cli.functions import model_and_inputs
from chunkc.cli.options import DTYPES, MAX_BATCH, MAX_RANKS, MAX_SEQUENCE, Planner, chunk_size, up_to
from chunkc.cli.output import one_line, tell
from chunkc.distributed.mesh import AUTO, RankMesh, rank_mesh
from chunkc.errors import BudgetError, ChunkcError
from chunkc.files import FormatError, read_json
from chunkc.hardware import Hardware
from chunkc.ir.plan import MAX_MICRO_BATCHES
from chunkc.passes import ACTIVATIONS, Activations
from chunkc.report import Plan
from chunkc.runtime.update.rules import OPTIMIZERS
from chunkc.scenarios.models import (
    CONFIG_MAX_NBYTES,
    FAMILIES,
    Stage,
    Transformer,
    built_in,
    from_config_file,
)
from chunkc.scenarios.scenario import RECOMPUTATION, Answer, Scenario, Scenarios, policies, priced

MODEL_HELP: Final = (
    "a built-in model (gpt-10b, bert-18b, ...), the path of a Hugging Face config.json, or module:function, which "
    "returns (model, example_inputs), the inputs a dict by keyword or a tuple by position; the current directory is "
    "importable"
)

_BRINGS: Final = dict.fromkeys(("batch", "seq"), "brings its own inputs") | {
    "clip": "is planned as `chunkc.plan` does: its loss is scaled in float16, and nothing is clipped"
}


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Options of commands that plan micro-batches, nodes with all of the model data, and other optimizers."""
    parser.add_argument(
        "--accumulate",
        type=up_to(MAX_MICRO_BATCHES),
        default=1,
        metavar="N",
        help="forwards and backwards (micro-batches) before a step (default: 1)",
    )

    parser.add_argument(
        "--mesh",
        metavar="NAME=N,...",
        help="ranks by dimension, as in dp_shard=2,tp=4: dp_replicate, dp_shard, cp (slices of --seq tokens), tp; pp, "
        "of `chunkc plan`: stages of a pipeline, with --accumulate micro-batches; "
        "auto, of `chunkc plan`: the fastest, where --batch is that of a rank (default: as --shard says)",
    )
    parser.add_argument(
        "--shard",
        choices=("all", "node"),
        default="all",
        help="divide model data over all ranks, or within each node, so that every node has all of it (default: all)",
    )
    parser.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        default="adamw",
        help="whose states are planned for; sgd: with momentum (default: adamw)",
    )


def add_training_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(accumulate=1, shard="all", optimizer="adamw", mesh=None, stage=None)
    parser.add_argument("--world-size", type=up_to(MAX_RANKS), metavar="N", help="ranks (default: the GPUs of --hw)")
    parser.add_argument(
        "--batch", type=up_to(MAX_BATCH), metavar="N", help="sequences of one rank in a forward (default: 1)"
    )
    parser.add_argument(
        "--seq", type=up_to(MAX_SEQUENCE), metavar="N", help="tokens of a sequence (default: 1024 at most)"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="compute dtype (default: auto)")
    add_activations(parser, "auto")
    parser.add_argument(
        "--clip",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="gradients are clipped, so that updates wait for the norm of all of them; --no-clip: none are, and in "
        "float16 no loss is scaled either (default: float16 scales the loss, which waits as clipping does)",
    )
    parser.add_argument("--policy", choices=policies(), default=policies()[0], help="how to plan (default: chunkc)")
    parser.add_argument("--chunk-size", type=chunk_size, default="auto", metavar="N", help="elements (default: auto)")


def add_activations(parser: argparse.ArgumentParser, default: Activations) -> None:
    parser.add_argument(
        "--activations",
        choices=ACTIVATIONS,
        default=default,
        help="what forward saves for backward is kept, computed again, or goes to host memory until then; auto: what "
        f"is fastest (default: {default})",
    )


def transformer_of(name: str) -> Transformer | None:
    """The model that ``name`` names as data; None for ``module:function``.

    Raises:
        ChunkcError: when it names nothing.
    """
    if name.endswith(".json"):
        return from_config_file(name)
    if ":" in name:
        return None
    if name.partition("-")[0].lower() in FAMILIES:
        return built_in(name)
    families = " or ".join(f"{family}-10b" for family in FAMILIES)
    raise ChunkcError(
        f"{name!r} is not of the form module:function, for example train:build, nor a built-in model such as "
        f"{families}, nor a config.json"
    )


def scenario_of(args: argparse.Namespace, model: Transformer) -> Scenario:
    return Scenario(
        model if args.stage is None else Stage.of(model, args.stage - 1, num_stages_of(args)),
        Hardware.of(args.hw),
        batch=args.batch or 1,
        sequence=args.seq or model.default_sequence,
        recompute=RECOMPUTATION[args.activations],
        activations=args.activations,
        dtype=DTYPES[args.dtype],
        world_size=args.world_size,
        chunk_numel=None if args.chunk_size == "auto" else args.chunk_size,
        policy=args.policy,
        accumulate=_accumulate(args),
        shard=args.shard,
        mesh=args.mesh or "",
        tracks_grad_norm=args.clip,
        optimizer=args.optimizer,
    )


def num_stages_of(args: argparse.Namespace) -> int:
    """Stages along ``pp`` of ``--mesh``; ChunkcError for a mesh that is not of the machine's ranks."""
    if args.mesh in (None, AUTO):
        return 1
    hw = Hardware.of(args.hw)
    num_ranks = hw.num_ranks(args.world_size)
    default = RankMesh.of_data(num_ranks, num_ranks)
    ranks = rank_mesh(args.mesh, num_ranks, default, owner=f"the plan for {hw}")
    return ranks.num_stages


def answer_of(args: argparse.Namespace, scenarios: Scenarios) -> Answer:
    """Plan the model of ``args`` and simulate it; what the user's code prints goes to standard error.

    Raises:
        ChunkcError: when it cannot be planned for another reason than memory.
    """
    with quietly():
        model = transformer_of(args.model)
        answer = _of_function(args) if model is None else scenarios.answer(scenario_of(args, model))
    if answer.shortage is not None:
        tell(one_line(f"does not fit: {answer.shortage}"))
    return answer


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Send what the user's code prints to standard error, and keep torch from logging tracebacks.

    Within the block; torch logs one of an operator that it cannot trace, which the error names anyway.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def fake_ranks(args: argparse.Namespace) -> Iterator[None]:
    """Stand for the first rank of ``--mesh``, over whose ranks models are parallelised, within the block."""
    if args.mesh is None:
        yield
        return
    with fake_job(Hardware.of(args.hw).num_ranks(args.world_size)):
        yield


def title_of(args: argparse.Namespace, answer: Answer) -> str:
    if answer.scenario is None:
        mesh = f", mesh {args.mesh}" if args.mesh else ""
        return str(args.model) + mesh if answer.plan is None else f"{answer.plan.model} ({args.model}){mesh}"
    return str(answer.scenario) if args.activations != "auto" else f"{answer.scenario} (auto)"


def is_plan_file(path: str) -> bool:
    """Whether ``path`` is a file that does not say it is a model's configuration."""
    if not Path(path).is_file():
        return path.endswith(".json") and not path.endswith("config.json")
    try:
        data = read_json(path, max_nbytes=CONFIG_MAX_NBYTES)
    except (OSError, FormatError):
        return True
    return not (isinstance(data, dict) and "model_type" in data)


def refuse_model_options(args: argparse.Namespace) -> None:
    """Refuse the options by which a model is planned, since ``args`` name a plan."""
    parser = argparse.ArgumentParser()
    add_training_options(parser)
    names = ("world_size", "batch", "seq", "dtype", "activations", "clip", "policy", "chunk_size", "accumulate")
    for name in (*names, "shard", "optimizer", "mesh"):
        if getattr(args, name) != parser.get_default(name):
            option = "--" + name.replace("_", "-")
            raise ChunkcError(f"{option} is for planning, and {args.model} is a plan already: leave it out")


def _of_function(args: argparse.Namespace) -> Answer:
    for option in ("batch", "seq", "clip"):
        if getattr(args, option) is not None:
            given = f"--no-{option}" if getattr(args, option) is False else f"--{option}"
            raise ChunkcError(f"{given} is for built-in models and config.json; {args.model} {_BRINGS[option]}")
    model, example_inputs = model_and_inputs(args.model)
    options = {"hw": args.hw, "dtype": DTYPES[args.dtype], "chunk_size": args.chunk_size}
    options["world_size"] = args.world_size
    if args.accumulate > 1:
        options["accumulate"] = args.accumulate
    if args.shard != "all":
        options["shard"] = args.shard
    if args.mesh is not None:
        options["mesh"] = args.mesh
    if args.activations != "auto":
        options["activations"] = args.activations
    if args.optimizer != "adamw":
        options["optimizer"] = args.optimizer
    try:
        plan = Plan.of((args.planner or _planner())(model, example_inputs=example_inputs, **options))
    except BudgetError as error:
        return Answer(None, shortage=error)
    timeline, unpriced = priced(plan, Hardware.of(args.hw))
    return Answer(None, plan, timeline=timeline, unpriced=unpriced)


def _accumulate(args: argparse.Namespace) -> int:
    if args.accumulate > 1 and args.policy != policies()[0]:
        raise ChunkcError(
            f"--accumulate {args.accumulate} is planned by {policies()[0]}'s policy so far; leave out --policy "
            f"{args.policy}, or --accumulate"
        )
    return int(args.accumulate)


def _planner() -> Planner:
    """`chunkc.api.plan`, imported when it is needed: the other commands start without it."""
    planner: Planner = importlib.import_module("chunkc.api").plan
    return planner
