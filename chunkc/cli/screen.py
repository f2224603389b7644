"""An answer as people and programs read it: the first screen of ``chunkc plan``, and one JSON object."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from chunkc.cli.advice import Advice, missing
from chunkc.cost.actions import exchanged_ms
from chunkc.cost.rates import cost_rates
from chunkc.distributed.mesh import CP, TP
from chunkc.hardware import Hardware
from chunkc.hardware.usable_memory import Budget
from chunkc.ir.tiers import Tier
from chunkc.passes import budgets_of
from chunkc.report.columns import table, wrapped
from chunkc.report.timeline import Timeline, bounds, duration
from chunkc.report.units import exchanged_by_model, mesh_text, percent, size
from chunkc.scenarios.scenario import Answer, Scenario

_TIMES: Final = ("step_ms", "tokens_per_s", "samples_per_s", "model_tflops", "bound", "next_bound")
TIGHT_SHARE: Final = 0.97
"""Of the memory that is there: a plan that needs more is tight, since bytes of activations are estimates."""


def render_answer(answer: Answer, hw: Hardware, advice: Sequence[Advice], title: str, where: str) -> str:
    """One screen: does it fit, by how much, how fast, what bounds it, what would help, where is the plan.

    ``title`` names the model and its training; ``where`` says how to see the whole plan.
    """
    is_one = answer.plan is None or (answer.plan.layout.world_size == 1 and not answer.plan.mesh)
    ranks = "" if is_one else ", each rank"
    verdict = "fits" if answer.shortage is None else f"does not fit: {missing(answer.shortage)}"
    parts = [
        wrapped(f"{title} on {hw}{ranks}: {verdict}", "  "),
        _memory(answer, hw),
        *_speed(answer, hw),
        *_advice(advice),
    ]
    return "\n\n".join([*parts, wrapped(where, "  ")] if where else parts)


def _memory(answer: Answer, hw: Hardware) -> str:
    """Table of what one rank needs of the memory for training, and lines on what is kept from it."""
    rows, needs, budgets = [], _needs(answer, hw), _budgets(answer, hw)
    for tier, budget in budgets.items():
        needed, there = needs[tier], budget.nbytes
        tight = "tight" if answer.fits and needed > TIGHT_SHARE * there else ""
        rows.append((tier, size(needed), size(there), size(there - needed), percent(needed, there), tight))
    lines = table(("memory", "needed", "there", "left", "share", ""), rows, "lrrrrl")
    return "\n".join((lines, *_kept(hw), *_buffers(answer)))


def _budgets(answer: Answer, hw: Hardware) -> dict[Tier, Budget]:
    """Those of one rank of ``hw``, without what a stage of a pipeline keeps for its buffers."""
    buffers_nbytes = 0 if answer.scenario is None else answer.scenario.buffers_nbytes
    return {tier: b.less(buffers_nbytes if tier.is_fastest else 0) for tier, b in budgets_of(hw).items()}


def _kept(hw: Hardware) -> Iterator[str]:
    if not hw.emulated:
        budgets = budgets_of(hw)
        of_device = hw.gpu_memory_nbytes - budgets[Tier.DEVICE].nbytes
        of_host = hw.host_nbytes_per_rank - budgets[Tier.HOST].nbytes
        yield wrapped(f"kept (assumed): {size(of_device)} for CUDA and fragments, {size(of_host)} for the system", "  ")


def _buffers(answer: Answer) -> Iterator[str]:
    if answer.scenario is not None and answer.scenario.buffers_nbytes:
        yield f"buffers: {size(answer.scenario.buffers_nbytes)} of a device for what torch.distributed.pipelining sends"


def _needs(answer: Answer, hw: Hardware) -> dict[Tier, int]:
    """Bytes of one rank: of the plan, or the least with which there would be one."""
    if answer.plan is not None:
        return answer.plan.memory.needs
    if answer.shortage is None:
        raise ValueError("an answer has a plan or a shortage")
    host_nbytes = answer.shortage.min_host_nbytes * hw.gpus_per_node
    least = replace(hw, gpu_memory_nbytes=answer.shortage.min_device_nbytes, host_memory_nbytes=host_nbytes)
    return {tier: budget.nbytes for tier, budget in _budgets(answer, least).items()}


def _speed(answer: Answer, hw: Hardware) -> Iterator[str]:
    timeline = answer.timeline
    if timeline is not None:
        of_stage = "" if answer.scenario is None or answer.scenario.model.place is None else " of this stage alone"
        lines = [f"step      {duration(timeline.step_ms)}{of_stage}, simulated, not measured{_speeds(timeline)}"]
        lines.append(f"compute   {', '.join(_rates(timeline))}")
        lines += _exchanges(answer, hw)
        lines.append(f"bound by  {'; '.join(bounds(timeline))}")
        yield "\n".join(wrapped(line, " " * 10) for line in lines)


def _exchanges(answer: Answer, hw: Hardware) -> Iterator[str]:
    """The collectives of the model's own, among what is computed."""
    plan, timeline = answer.plan, answer.timeline
    number, nbytes = (0, 0) if plan is None else exchanged_by_model(plan)
    if plan is not None and timeline is not None and number:
        elapsed_ms = exchanged_ms(plan, cost_rates(hw))
        takes = f"{duration(elapsed_ms)}, {percent(elapsed_ms, timeline.step_ms)} of the step"
        dim = CP if CP in dict(plan.mesh) else TP
        yield f"along {dim}  {number:,} collectives, {size(nbytes)} to each rank: {takes}"


def _speeds(timeline: Timeline) -> str:
    speeds = ((timeline.tokens_per_s, "tokens/s"), (timeline.samples_per_s, "samples/s"))
    return "".join(
        f"; {speed:,.4g} {name}" if speed < 1000 else f"; {speed:,.0f} {name}" for speed, name in speeds if speed
    )


def _rates(timeline: Timeline) -> Iterator[str]:
    yield f"{timeline.model_tflops:.4g} TFLOPS"
    yield f"{timeline.hardware_tflops:.4g} with what is computed again"
    if timeline.patrickstar_tflops is not None:
        yield f"{timeline.patrickstar_tflops:.4g} as PatrickStar counts"


def _advice(advice: Sequence[Advice]) -> Iterator[str]:
    if advice:
        yield table(("with", "it"), [(suggestion.change, suggestion.effect) for suggestion in advice], "ll")


def _stage_json(scenario: Scenario) -> dict[str, Any]:
    """Place of a stage of a pipeline, and what it keeps beside its plan; of a whole model nothing."""
    place = scenario.model.place
    if place is None:
        return {}
    in_flight = scenario.model.in_flight(scenario.accumulate)
    counts = {"stage": place.place, "num_stages": place.num_places, "in_flight": in_flight}
    return counts | {"buffers_nbytes": scenario.buffers_nbytes}


def answer_json(answer: Answer, hw: Hardware, advice: Sequence[Advice]) -> dict[str, Any]:
    """Plain data for ``json.dumps``. Bytes are those of one rank; what is not known is None."""
    plan, shortage, timeline, scenario = answer.plan, answer.shortage, answer.timeline, answer.scenario
    memory = None if plan is None else plan.memory
    data: dict[str, Any] = {
        "fits": answer.fits,
        "missing_nbytes": 0 if shortage is None else shortage.missing_nbytes,
        "device_peak_nbytes": None if memory is None else memory.device_peak_nbytes,
        "device_budget_nbytes": None if memory is None else memory.device_budget_nbytes,
        "host_nbytes": None if memory is None else memory.host_nbytes,
        "host_budget_nbytes": None if memory is None else memory.host_budget_nbytes,
        "min_device_nbytes": None if shortage is None else shortage.min_device_nbytes,
        "min_host_nbytes": None if shortage is None else shortage.min_host_nbytes,
        "moment": shortage.moment if shortage is not None else None if memory is None else memory.nonmodel_segment,
        "digest": None if plan is None else plan.digest(),
        "unpriced": answer.unpriced,
        "mesh": None if plan is None or not plan.mesh else mesh_text(plan),
        "exchanged_nbytes": None if plan is None else exchanged_by_model(plan)[1],
        **dict.fromkeys(_TIMES),
        "advice": [suggestion.to_json() for suggestion in advice],
        "hw": str(hw),
    }
    if shortage is not None:
        data["tensors"] = list(shortage.tensors)
    if timeline is not None:
        data |= {name: getattr(timeline, name) for name in _TIMES}
    if scenario is not None:
        data |= {"model": scenario.model.label, "batch": scenario.batch, "sequence": scenario.sequence}
        data |= {"recompute": str(scenario.recompute), "world_size": scenario.num_ranks}
        data |= _stage_json(scenario)
    return data
