"""The replay of an iteration against capture's own liveness, which counts the same bytes operator by operator."""

from dataclasses import replace

import pytest
import torch
from captures import capture_once
from models import CASES
from plan_runner import BIG_NBYTES
from schedules import target
from torch import nn

from chunkc.capture.graphs import Captured
from chunkc.compiler.build import lower_graph
from chunkc.compiler.memory.correct import corrected, stated
from chunkc.compiler.memory.footprint import graph_footprint
from chunkc.compiler.memory.iteration import SegmentBytes, iteration_bytes
from chunkc.compiler.plan_ahead import capture_ahead
from chunkc.errors import BudgetError
from chunkc.ir.plan import Plan
from chunkc.ir.schedule import Schedule
from chunkc.passes import PlanOptions, make_plan

MODELS = ("odd", "resnet", "albert", "gpt2_dropout")


def plan_for(schedule: Schedule, device_nbytes: int) -> Plan:
    try:
        return make_plan(schedule, target(device_nbytes)).plan
    except BudgetError as error:
        return make_plan(schedule, target(error.min_device_nbytes)).plan


def replayed(captured: Captured, plan: Plan) -> tuple[SegmentBytes, ...]:
    graphs = {
        "forward": lower_graph(captured.forward, plan, "forward"),
        "backward": lower_graph(captured.backward, plan, "backward"),
    }
    footprints = {kind: [graph_footprint(s.module) for s in graph.segments] for kind, graph in graphs.items()}
    return iteration_bytes(captured, plan.segments, graphs, footprints)


@pytest.mark.long(but="gpt2_dropout-0")
@pytest.mark.parametrize(
    ("name", "device_nbytes"),
    [
        *((name, 0) for name in MODELS),
        *(pytest.param(name, BIG_NBYTES, marks=() if name == "odd" else pytest.mark.slow) for name in MODELS),
    ],
)
def test_interpreted_segments_take_what_capture_counted(name: str, device_nbytes: int) -> None:
    """To the byte: live, workspace, gradients that wait to land, outputs of the iteration before."""
    case = CASES[name]
    captured = capture_ahead(case.build(), None, case.batches()[0], "eager")
    plan = plan_for(captured.schedule, device_nbytes)
    assert (len(plan.segments) > 2) == (device_nbytes == 0)
    found = replayed(captured, plan)
    for taken, segment in zip(found, plan.segments, strict=True):
        empty = sum(plan.layout.params[p].numel == 0 for p in segment.lands)
        for nbytes, counted in ((taken.live_nbytes, segment.live_nbytes), (taken.peak_nbytes, segment.nonmodel_nbytes)):
            assert nbytes in {counted, counted + 4 * empty}, "the gradient of an empty parameter views one element"


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.second(torch.relu(self.first(x)))
        return logits.square().mean(), logits


def test_tangents_of_unused_outputs_count_and_so_do_outputs_that_the_user_holds() -> None:
    captured = capture_once(TwoOutputs(), torch.randn(256, 32))
    plan = plan_for(captured.schedule, BIG_NBYTES)
    logits_nbytes, x_nbytes, hidden_nbytes = 256 * 32 * 4, 256 * 32 * 4, 256 * 64 * 4
    before, after = replayed(captured, plan)
    assert captured.user_outputs and before.exit_nbytes == x_nbytes + hidden_nbytes + 2 * (logits_nbytes + 4)
    held = x_nbytes + logits_nbytes + 4
    assert after.live_nbytes >= held + hidden_nbytes + logits_nbytes, "the tangent of the logits"
    none = replace(captured, user_outputs=())
    assert replayed(none, plan)[0].exit_nbytes == before.exit_nbytes - logits_nbytes - 4


# --- correcting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", (0.3, 0.9, 1.0, 1.4))
def test_a_corrected_schedule_gives_just_the_bytes_that_were_found(share: float) -> None:
    """Planned with the same cuts: segment for segment, whether less was found than planned or more."""
    case = CASES["odd"]
    schedule = capture_ahead(case.build(), None, case.batches()[0], "eager").schedule
    plan = plan_for(schedule, 0)
    found = []
    for position, segment in enumerate(plan.segments):
        live = max(int(segment.live_nbytes * share) + 64 * position, _waiting_nbytes(plan, schedule, position))
        found.append(SegmentBytes(live, live + int(segment.workspace_nbytes * share) + position, live))
    true = stated(plan, found, is_estimate=True)
    assert [s.live_nbytes for s in true.segments] == [f.live_nbytes for f in found]
    assert true.memory.nonmodel_nbytes == max(f.peak_nbytes for f in found) and true.memory.is_estimate
    cuts = [tuple(s.first_op for s in plan.graph_segments(g)[1:]) for g in ("forward", "backward")]
    again = make_plan(
        corrected(schedule, plan.segments, found),
        target(1 << 40),
        PlanOptions(chunk_numel=plan.layout.chunk_numel, cuts=(cuts[0], cuts[1]), os_home="host"),
    ).plan
    spans = [(s.graph, s.first_op, s.end_op) for s in plan.segments]
    assert [(s.graph, s.first_op, s.end_op) for s in again.segments] == spans
    assert [s.live_nbytes for s in again.segments] == [f.live_nbytes for f in found]
    assert [s.nonmodel_nbytes for s in again.segments] == [f.peak_nbytes for f in found]


def _waiting_nbytes(plan: Plan, schedule: Schedule, position: int) -> int:
    """Gradients that stand beside a segment's activations at its end: no segment can take less."""
    segment = plan.segments[position]
    if segment.graph == "forward":
        return 0
    made = [p for op in schedule.backward.operators[: segment.end_op] for p in op.grads]
    landed = [p for s in plan.graph_segments("backward")[: segment.index] for p in s.lands]
    return sum(schedule.params[p].nbytes for p in made) - sum(schedule.params[p].nbytes for p in landed)
