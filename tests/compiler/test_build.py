"""From a capture to a plan whose segments fit, over made-up figures of what compiled segments take."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from captures import capture_once
from schedules import chain, target
from torch import nn

from chunkc.capture.graphs import Captured
from chunkc.compiler.build import CompiledPlan, PlanRequest, budget_chooser, build
from chunkc.compiler.memory.footprint import Footprint, Step, graph_footprint
from chunkc.compiler.segment_compiler import SegmentCompiler, compile_eager
from chunkc.errors import BudgetError
from chunkc.ir.actions import Stream
from chunkc.ir.plan import Plan
from chunkc.ir.schedule import Schedule
from chunkc.ir.tiers import Tier
from chunkc.ir.verify import verify
from chunkc.passes import Planned, PlanOptions, Target, make_plan, pipeline
from chunkc.passes.lower import LoweredSegment
from chunkc.runtime.execution.bound_action import SegmentCallable

Reader = Callable[[LoweredSegment, SegmentCallable], Footprint]
OPTIONS = PlanOptions(chunk_numel=64 * 64, activations="keep")


class Wavy(nn.Module):
    def __init__(self, num_layers: int = 6, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            h = layer(x)
            x = h.sin() + h.cos() * (h + 1).tanh() + (h - 1).sigmoid()
        return x.square().mean()


@pytest.fixture(scope="module")
def captured() -> Captured:
    return capture_once(Wavy(), torch.randn(48, 64))


class Schedules:
    """The same schedule for any budget."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule

    def __call__(self, budget: float) -> Schedule:
        return self.schedule

    def forget(self, budget: float) -> None:
        pass


def test_budgets_of_activations_without_rates_are_tried_without_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """And without plans that only tell whether moves would do."""
    made = list[float]()

    def plan(schedule: Schedule, target: Target, options: PlanOptions, **given: Any) -> Planned:
        made.append(options.moved_share)
        return make_plan(schedule, target, options, **given)

    monkeypatch.setattr(pipeline, "make_plan", plan)
    choose = budget_chooser(PlanRequest(target(1)))
    assert choose is not None
    choose(Schedules(chain(4, numel=4096, live=1 << 16)))
    assert made and not any(made)


def fused(segment: LoweredSegment, _: SegmentCallable) -> Footprint:
    """Temporaries take nothing: everything that a segment does not hand out is fused away."""
    found = graph_footprint(segment.module)
    kept = set(found.outputs)
    nbytes = tuple(n if i in kept else 0 for i, n in enumerate(found.nbytes, found.num_inputs))
    steps = tuple(replace(s, workspace_nbytes=0) for s in found.steps)
    return replace(found, nbytes=nbytes, steps=steps, is_exact=True)


def with_scratch(nbytes: int, least_ops: int) -> Reader:
    """As ``fused``, but segments of ``least_ops`` nodes and more take ``nbytes`` of scratch: fusing them backfires."""

    def read(segment: LoweredSegment, compiled: SegmentCallable) -> Footprint:
        found = fused(segment, compiled)
        if len(segment.module.graph.nodes) < least_ops:
            return found
        return replace(found, steps=(Step((), (), nbytes), *found.steps))

    return read


class Counting(SegmentCompiler):
    def __init__(self, read: Reader | None) -> None:
        self.asked: list[str] = []
        super().__init__(self.compile_one, read)

    def compile_one(self, segment: LoweredSegment) -> SegmentCallable:
        self.asked.append(segment.name)
        return compile_eager(segment)


def built(captured: Captured, device_nbytes: int, read: Reader | None) -> tuple[CompiledPlan, Counting]:
    compiler = Counting(read)
    found = build(captured, PlanRequest(target(device_nbytes), OPTIONS), compiler)
    verify(found.planned.plan)
    assert found.planned.plan.memory.device_peak_nbytes <= device_nbytes
    assert found.planned.plan.memory.device_budget_nbytes == device_nbytes
    assert found.planned.plan.schedule_digest == captured.schedule.digest()
    return found, compiler


def least(captured: Captured, read: Reader | None) -> int:
    with pytest.raises(BudgetError) as caught:
        built(captured, 1, read)
    assert str(caught.value.min_device_nbytes) in str(caught.value)
    assert caught.value.missing_nbytes == caught.value.min_device_nbytes - 1
    return caught.value.min_device_nbytes


def bound(captured: Captured) -> int:
    with pytest.raises(BudgetError) as caught:
        make_plan(captured.schedule, target(1), OPTIONS)
    return caught.value.min_device_nbytes


def moved(plan: Plan) -> int:
    return plan.moved_nbytes(Stream.H2D) + plan.moved_nbytes(Stream.D2H)


def test_without_fusion_there_is_one_plan(captured: Captured) -> None:
    found, _ = built(captured, bound(captured), None)
    assert found.planned.plan == make_plan(captured.schedule, target(bound(captured)), OPTIONS).plan
    assert least(captured, None) == bound(captured)


def test_a_budget_below_the_bound_is_enough_when_compiled_segments_fit(captured: Captured) -> None:
    """The bound's refusal is not final; the budget that the error names works, and one byte less does not."""
    nbytes = least(captured, fused)
    assert nbytes < 0.8 * bound(captured)
    found, _ = built(captured, nbytes, fused)
    assert found.planned.plan.memory.device_peak_nbytes == nbytes
    with pytest.raises(BudgetError) as caught:
        built(captured, nbytes - 1, fused)
    assert caught.value.min_device_nbytes == nbytes
    worst = found.planned.plan.segment(caught.value.moment)
    assert worst.nonmodel_nbytes == found.planned.plan.memory.nonmodel_nbytes
    assert caught.value.tensors and set(caught.value.tensors) <= {p.name for p in captured.schedule.params}


def test_what_compiled_segments_leave_free_saves_moves(captured: Captured) -> None:
    nbytes = bound(captured)
    alone = make_plan(captured.schedule, target(nbytes), OPTIONS).plan
    plan = built(captured, nbytes, fused)[0].planned.plan
    assert moved(plan) < moved(alone)
    assert plan.layout.arena_nbytes > alone.layout.arena_nbytes
    assert plan.memory.nonmodel_nbytes < alone.memory.nonmodel_nbytes


def test_the_plan_states_what_compiled_segments_take(captured: Captured) -> None:
    plan = built(captured, 1 << 30, fused)[0].planned.plan
    alone = make_plan(captured.schedule, target(1 << 30), OPTIONS).plan
    assert [(s.first_op, s.end_op) for s in plan.segments] == [(s.first_op, s.end_op) for s in alone.segments]
    for segment, by_itself in zip(plan.segments, alone.segments, strict=True):
        assert segment.live_nbytes < by_itself.live_nbytes and segment.workspace_nbytes == 0
    assert plan.digest() != alone.digest() and not plan.memory.is_estimate
    assert plan.stages[-1].name == "fusion"
    rough = built(captured, 1 << 30, lambda s, _: graph_footprint(s.module))[0].planned.plan
    assert rough.memory.is_estimate and rough.memory.nonmodel_nbytes == alone.memory.nonmodel_nbytes


def test_a_plan_without_moves_is_compiled_once(captured: Captured) -> None:
    _, compiler = built(captured, 1 << 30, fused)
    assert sorted(compiler.asked) == ["bwd.0", "fwd.0"]


@pytest.mark.parametrize("read", (fused, with_scratch(200_000, 40), with_scratch(90_000, 20)))
def test_every_budget_is_kept_or_refused_with_one_that_works(captured: Captured, read: Reader) -> None:
    """From nothing to everything: estimates that turn out wrong are stepped back from, and errors tell the truth."""
    nbytes = least(captured, read)
    resident = bound(captured) + 16 * captured.schedule.params[0].nbytes * len(captured.schedule.params)
    for step in range(9):
        built(captured, nbytes + (resident - nbytes) * step // 8, read)


def test_segments_that_take_more_than_the_bound_are_refused_or_planned_with_what_they_take(captured: Captured) -> None:
    """An unlucky compiler: the bound's least budget does not work, and what the error then names does."""

    def read(segment: LoweredSegment, _: SegmentCallable) -> Footprint:
        found = graph_footprint(segment.module)
        return replace(found, steps=(Step((), (), 400_000), *found.steps), is_exact=True)

    with pytest.raises(BudgetError) as caught:
        built(captured, bound(captured), read)
    assert caught.value.min_device_nbytes > bound(captured)
    assert caught.value.min_device_nbytes == least(captured, read)
    built(captured, caught.value.min_device_nbytes, read)


def test_the_same_call_decides_the_same(captured: Captured) -> None:
    for nbytes in (least(captured, fused), bound(captured), 1 << 30):
        plans = [built(captured, nbytes, fused)[0].planned.plan for _ in range(2)]
        assert plans[0].digest() == plans[1].digest()


def test_another_shape_keeps_the_layout_and_is_corrected_too(captured: Captured) -> None:
    """Beside the arena of the first shape a larger one fits only as it is compiled."""
    first = built(captured, least(captured, fused), fused)[0].planned.plan
    larger = capture_once(Wavy(), torch.randn(52, 64))
    with pytest.raises(BudgetError) as caught:
        make_plan(larger.schedule, target(bound(captured)), OPTIONS, layout=first.layout)
    request = PlanRequest(target(bound(captured)), OPTIONS, layout=first.layout)
    plan = build(larger, request, Counting(fused)).planned.plan
    assert plan.layout == first.layout
    assert first.memory.device_peak_nbytes < plan.memory.device_peak_nbytes <= bound(captured)
    assert caught.value.min_device_nbytes > bound(captured)


def test_reserved_bytes_are_part_of_what_an_error_asks_for(captured: Captured) -> None:
    for read in (None, fused):
        where = target(5001).less({Tier.DEVICE: 5000})
        with pytest.raises(BudgetError) as caught:
            build(captured, PlanRequest(where, OPTIONS), Counting(read))
        assert caught.value.min_device_nbytes == least(captured, read) + 5000
        assert caught.value.missing_nbytes == least(captured, read) - 1
        assert "5000 of them reserved" in str(caught.value)


# --- saved values that move -------------------------------------------------------------------------------------------

MOVING = replace(OPTIONS, activations="offload", moved_share=1.0)


def in_one_buffer(segment: LoweredSegment, compiled: SegmentCallable) -> Footprint:
    """As ``fused``, but the first two results of each segment are made in the buffer of the first."""
    found = fused(segment, compiled)
    if len(found.outputs) < 2 or min(found.outputs[:2]) < found.num_inputs:
        return found
    return replace(found, outputs=(found.outputs[0], found.outputs[0], *found.outputs[2:]))


def within_a_larger_one(segment: LoweredSegment, compiled: SegmentCallable) -> Footprint:
    """As ``fused``, but every result has a buffer of 64 bytes more."""
    found = fused(segment, compiled)
    return replace(found, nbytes=tuple(n + 64 if n else 0 for n in found.nbytes))


@pytest.mark.parametrize("read", (in_one_buffer, within_a_larger_one))
def test_values_that_share_a_buffer_stay_and_the_rest_moves_as_planned(captured: Captured, read: Reader) -> None:
    """Planned again with what cannot move on the device, within the budget that this takes."""
    compiler = Counting(read)
    moving = build(captured, PlanRequest(target(1 << 30), MOVING), Counting(fused)).plan
    assert len(moving.moves) > 4
    found = build(captured, PlanRequest(target(1 << 30), MOVING), compiler)
    verify(found.plan)
    assert not found.staying and len(found.plan.moves) < len(moving.moves)
    assert bool(found.plan.moves) == (read is in_one_buffer)
    assert found.plan.memory.nonmodel_nbytes > moving.memory.nonmodel_nbytes
    with pytest.raises(BudgetError) as caught:
        build(captured, PlanRequest(target(1), MOVING), compiler)
    least = build(captured, PlanRequest(target(caught.value.min_device_nbytes), MOVING), compiler)
    assert not least.staying and least.plan.memory.device_peak_nbytes <= caught.value.min_device_nbytes
