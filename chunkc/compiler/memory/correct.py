"""Correcting a schedule and a plan by what their compiled segments really take.

The schedule's bytes are exact for operators that run one by one, and an estimate for a compiler that fuses them. Once
segments are compiled, the bytes of each are known, and no operator of it needs more: so its operators are capped there.
Planned again with the same cuts, such a schedule gives exactly the known bytes. With other cuts it is an estimate, that
holds or not when those segments are compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from chunkc.compiler.memory.iteration import SegmentBytes
from chunkc.ir.plan import Plan, Segment
from chunkc.ir.schedule import GraphSchedule, Operator, Schedule


def stated(plan: Plan, found: Sequence[SegmentBytes], *, is_estimate: bool) -> Plan:
    """``plan`` with the bytes of its segments as found, and of other micro-batches in flight."""
    waiting_nbytes = _waiting_nbytes(plan, found)
    others_nbytes = (plan.in_flight - 1) * waiting_nbytes
    segments = tuple(
        replace(segment, live_nbytes=nbytes.live_nbytes + others_nbytes, workspace_nbytes=nbytes.workspace_nbytes)
        for segment, nbytes in zip(plan.segments, found, strict=True)
    )
    worst = max(segments, key=lambda s: s.nonmodel_nbytes, default=None)
    memory = replace(
        plan.memory,
        nonmodel_nbytes=0 if worst is None else worst.nonmodel_nbytes,
        nonmodel_segment="" if worst is None else worst.name,
        is_estimate=is_estimate,
    )
    return replace(plan, segments=segments, memory=memory, waiting_nbytes=waiting_nbytes)


def _waiting_nbytes(plan: Plan, found: Sequence[SegmentBytes]) -> int:
    """Bytes of the device that a forward leaves for its backward."""
    if plan.in_flight == 1:
        return 0
    left_nbytes = found[len(plan.graph_segments("forward")) - 1].exit_nbytes
    return max(left_nbytes, sum(value.nbytes for value in plan.saved)) - plan.copies_nbytes


def corrected(schedule: Schedule, segments: Sequence[Segment], found: Sequence[SegmentBytes]) -> Schedule:
    """``schedule`` with the operators of every segment changed so that the segment takes what was found."""
    pairs = list(zip(segments, found, strict=True))
    forward, backward = (
        _graph(schedule, graph, [(s, nbytes) for s, nbytes in pairs if s.graph == graph.kind])
        for graph in schedule.graphs
    )
    return replace(schedule, forward=forward, backward=backward)


def _graph(schedule: Schedule, graph: GraphSchedule, pairs: Sequence[tuple[Segment, SegmentBytes]]) -> GraphSchedule:
    """Gradients that are final and have not landed come on top of the operators' own bytes."""
    operators = list(graph.operators)
    waiting_nbytes = 0
    for segment, nbytes in pairs:
        waiting = []
        for index in range(segment.first_op, segment.end_op):
            waiting.append(waiting_nbytes)
            waiting_nbytes += sum(schedule.params[p].nbytes for p in operators[index].grads)
        span = operators[segment.first_op : segment.end_op]
        operators[segment.first_op : segment.end_op] = _capped(span, waiting, nbytes, waiting_nbytes)
        waiting_nbytes -= sum(schedule.params[p].nbytes for p in segment.lands)
    return replace(graph, operators=tuple(operators))


def _capped(
    operators: Sequence[Operator], waiting: Sequence[int], nbytes: SegmentBytes, waiting_at_end_nbytes: int
) -> list[Operator]:
    """The operators of one segment, none above the segment's bytes and one of them just there."""
    after = [*waiting[1:], waiting_at_end_nbytes]
    capped = [
        replace(
            op,
            live_nbytes=max(0, min(op.live_nbytes, nbytes.live_nbytes - waiting[i])),
            live_after_nbytes=max(0, min(op.live_after_nbytes, nbytes.live_nbytes - after[i])),
            crossing_nbytes=op.crossing_nbytes if i else 0,
        )
        for i, op in enumerate(operators)
    ]
    capped[-1] = replace(capped[-1], live_after_nbytes=max(0, nbytes.exit_nbytes - waiting_at_end_nbytes))
    top = max(range(len(capped)), key=lambda i: capped[i].live_nbytes + waiting[i])
    capped[top] = replace(capped[top], live_nbytes=max(0, nbytes.live_nbytes - waiting[top]))
    room = [max(0, nbytes.peak_nbytes - op.live_nbytes - w) for op, w in zip(capped, waiting, strict=True)]
    capped = [replace(op, workspace_nbytes=min(op.workspace_nbytes, r)) for op, r in zip(capped, room, strict=True)]
    tight = max(range(len(capped)), key=lambda i: capped[i].workspace_nbytes - room[i])
    capped[tight] = replace(capped[tight], workspace_nbytes=room[tight])
    return capped
