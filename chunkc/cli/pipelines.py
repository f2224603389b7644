"""``chunkc plan --mesh pp=4,...``: a plan for each stage of a pipeline, and the step of all.

Without ``--stage`` the answer is a table of stages, and the step that they make together; with it, the plan of that
stage is shown, drawn and saved like that of a model.
"""

from __future__ import annotations

import argparse
import json
from typing import Any, Final

import torch

from chunkc.cli.advice import missing
from chunkc.cli.options import DTYPES
from chunkc.cli.output import show, tell
from chunkc.cli.pictures import wished
from chunkc.cli.screen import answer_json
from chunkc.cli.subjects import num_stages_of, quietly, scenario_of, transformer_of
from chunkc.errors import BudgetError, ChunkcError
from chunkc.hardware import Hardware
from chunkc.ir.tiers import Tier
from chunkc.passes import budgets_of
from chunkc.report.columns import table, wrapped
from chunkc.report.timeline import duration
from chunkc.report.units import percent, size
from chunkc.scenarios.pipelines import Pipeline, StageAnswer, pipelined
from chunkc.scenarios.scenario import Scenarios

_MEMORY: Final = ("stage", "layers", "in flight", "recompute", "device", "share", "host", "")
_OF_THE_WHOLE: Final = frozenset({"step_ms", "tokens_per_s", "samples_per_s", "model_tflops", "advice", "hw", "model"})
_TIMES: Final = ("stage", "forward", "backward", "update", "busy")


def shows_stages(args: argparse.Namespace) -> bool:
    """Whether the answer is that of all stages; ChunkcError for options that name one plan then."""
    num_stages = num_stages_of(args)
    if num_stages > 1:
        _check(args, num_stages)
    if args.stage is not None and (num_stages == 1 or args.stage > num_stages):
        mesh = f"--mesh {args.mesh}" if args.mesh else "a plan without --mesh"
        raise ChunkcError(f"--stage {args.stage} names a stage of a mesh with pp, and {mesh} has {num_stages}")
    if num_stages == 1 or args.stage is not None:
        return False
    named = [f"--{name}" for name in ("save", "table", "full") if getattr(args, name)] + wished(args)
    if named:
        raise ChunkcError(
            f"{', '.join(named)}: one plan is meant, and a pipeline has {num_stages}: name a stage by --stage 1 to "
            f"--stage {num_stages}"
        )
    return True


def _check(args: argparse.Namespace, num_stages: int) -> None:
    """Refuse what stages cannot do, before anything is captured; say where some have nothing to do."""
    hw, dtype = Hardware.of(args.hw), DTYPES[args.dtype]
    if torch.float16 in (dtype, hw.compute_dtype if dtype == "auto" else None) and args.clip is not False:
        raise ChunkcError(
            f"stages of a pipeline cannot scale gradients of fp16, the compute dtype of {hw}: a stage that overflows "
            "would skip a step that others take. Give --dtype float32, or --no-clip, with which no loss is scaled"
        )
    if args.accumulate < num_stages:
        tell(f"--accumulate {args.accumulate}: fewer micro-batches than the {num_stages} stages, so some always wait")


def run(args: argparse.Namespace, scenarios: Scenarios) -> int:
    """Plan all stages and print the answer; the exit code is 1 where one does not fit."""
    num_stages = num_stages_of(args)
    with quietly():
        model = transformer_of(args.model)
        if model is None:
            raise ChunkcError(
                f"{args.model} is one model, which is not divided into stages: let the function return a stage, and "
                "leave pp out of --mesh"
            )
        found = pipelined(scenario_of(args, model), num_stages, scenarios)
    show(json.dumps(pipeline_json(found)) if args.json else render(found))
    return 0 if found.fits else 1


def render(found: Pipeline) -> str:
    """One screen: does every stage fit, what does each need, how long is a step and its bubble."""
    scenario, budgets = found.scenario, budgets_of(found.scenario.hw)
    verdict = "fits" if found.fits else "does not fit"
    rows = [_memory(each, budgets[Tier.DEVICE].nbytes) for each in found.stages]
    shortages = [_shortage(each, each.answer.shortage) for each in found.stages if each.answer.shortage is not None]
    lines = [*_speed(found), *_buffers(found)]
    parts = [
        wrapped(f"{scenario} on {scenario.hw}, each rank of a stage: {verdict}", "  "),
        table(_MEMORY, rows, "rrrlrrrl"),
        "\n".join(shortages),
        _times(found),
        "\n".join(wrapped(line, " " * 10) for line in lines),
        wrapped("a stage's own plan: --stage 1 with --table, --full or --save plan.json", "  "),
    ]
    return "\n\n".join(part for part in parts if part)


def _shortage(each: StageAnswer, shortage: BudgetError) -> str:
    least = f"{size(shortage.min_device_nbytes)} of device and {size(shortage.min_host_nbytes)} of host memory"
    return wrapped(f"stage {each.stage.number + 1} does not fit: {missing(shortage)}; it takes {least}", "  ")


def _memory(each: StageAnswer, budget_nbytes: int) -> tuple[str, ...]:
    """``budget_nbytes``: of a device, with what is kept for buffers."""
    plan, scenario = each.answer.plan, each.answer.scenario
    names = (str(each.stage.number + 1), str(each.stage.num_own_layers))
    if plan is None or scenario is None:
        return (*names, *[""] * 5, "no plan")
    device_nbytes = plan.memory.device_peak_nbytes
    share = percent(device_nbytes + each.buffers_nbytes, budget_nbytes)
    needs = (size(device_nbytes), share, size(plan.memory.host_nbytes))
    return (*names, str(plan.in_flight), str(scenario.recompute), *needs, "")


def _times(found: Pipeline) -> str:
    """Table of a forward and a backward of one micro-batch, the update, and the busy share of a step."""
    if found.time is None:
        return ""
    rows = [
        (
            str(each.stage.number + 1),
            *map(duration, (each.times.forward_ms, each.times.backward_ms, each.times.step_ms)),
            percent(busy_ms, found.time.step_ms),
        )
        for each, busy_ms in zip(found.stages, found.time.rank_busy_ms, strict=True)
        if each.times is not None
    ]
    return table(_TIMES, rows, "rrrrr")


def _speed(found: Pipeline) -> list[str]:
    if found.time is None:
        return [found.unpriced] if found.unpriced else []
    micro_batches = f"{found.scenario.accumulate} micro-batches; {duration(found.sent_ms)} from stage to stage"
    return [
        f"step      {duration(found.time.step_ms)}, simulated, not measured; {found.tokens_per_s:,.0f} tokens/s; "
        f"{found.samples_per_s:,.4g} samples/s",
        f"compute   {found.model_tflops:.4g} TFLOPS, the mean of all ranks",
        f"bubble    {percent(found.time.bubble_share, 1.0)} of the ranks' time, by 1F1B with {micro_batches}",
    ]


def _buffers(found: Pipeline) -> list[str]:
    nbytes = max(each.buffers_nbytes for each in found.stages)
    return [f"buffers   at most {size(nbytes)} of a device are kept for what torch.distributed.pipelining sends"]


def pipeline_json(found: Pipeline) -> dict[str, Any]:
    """Plain data for ``json.dumps``: the step of all stages, and each stage as `answer_json` has a model."""
    scenario, time = found.scenario, found.time
    return {
        "fits": found.fits,
        "model": scenario.model.label,
        "mesh": scenario.mesh,
        "batch": scenario.batch,
        "sequence": scenario.sequence,
        "accumulate": scenario.accumulate,
        "world_size": scenario.num_ranks,
        "hw": str(scenario.hw),
        "step_ms": None if time is None else time.step_ms,
        "bubble_share": None if time is None else time.bubble_share,
        "samples_per_s": found.samples_per_s,
        "tokens_per_s": found.tokens_per_s,
        "model_tflops": found.model_tflops,
        "sent_ms": None if time is None else found.sent_ms,
        "unpriced": found.unpriced,
        "stages": [_stage_json(each, found) for each in found.stages],
    }


def _stage_json(each: StageAnswer, found: Pipeline) -> dict[str, Any]:
    """As `answer_json` has it, less rates of the stage alone, which would be read as those of the model."""
    times, about = each.times, answer_json(each.answer, found.scenario.hw, ())
    own = {key: value for key, value in about.items() if key not in _OF_THE_WHOLE}
    return own | {
        "num_layers": each.stage.num_own_layers,
        "forward_ms": None if times is None else times.forward_ms,
        "backward_ms": None if times is None else times.backward_ms,
        "update_ms": None if times is None else times.step_ms,
    }
