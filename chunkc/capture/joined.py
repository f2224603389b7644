"""Several graphs of one forward, as one iteration: what their common layout is made from.

Where a forward breaks into graphs, they run one after another, and backward runs through them in reverse. What an
earlier graph saved, and gave out, is alive while the later ones run forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from chunkc.ir.schedule import GraphSchedule, Operator, Schedule

Cuts = tuple[tuple[int, ...], tuple[int, ...]]


def saved_nbytes(schedule: Schedule, concurrent_nbytes: int = 0) -> int:
    """Non-model bytes alive when the forward graph has ended, but for ``concurrent_nbytes`` of others."""
    operators = schedule.forward.operators
    return operators[-1].live_after_nbytes - concurrent_nbytes if operators else 0


def with_concurrent(schedule: Schedule, nbytes: int, also_trained: Sequence[int]) -> Schedule:
    """Return ``schedule`` with ``nbytes`` more alive all the time; ``also_trained`` are trained elsewhere."""

    def held(graph: GraphSchedule) -> GraphSchedule:
        return replace(graph, operators=tuple(more(op) for op in graph.operators))

    def more(op: Operator) -> Operator:
        return replace(op, live_nbytes=op.live_nbytes + nbytes, live_after_nbytes=op.live_after_nbytes + nbytes)

    own = schedule.trained_params()
    elsewhere = tuple(p for p in also_trained if p not in own)
    return replace(schedule, forward=held(schedule.forward), backward=held(schedule.backward), also_trained=elsewhere)


def join(schedules: Sequence[Schedule], also_trained: Sequence[int]) -> tuple[Schedule, Cuts]:
    """Make one iteration of all graphs, and the operators at which a new graph begins.

    ``schedules`` come as forwards run, each `with_concurrent`. A gradient of several graphs counts where the last of
    them runs; the others read the parameter. ``also_trained`` are parameters with gradients from anywhere.
    """
    forward: list[Operator] = []
    backward: list[Operator] = []
    num_behind = sum(len(s.backward.operators) for s in schedules)
    seen: set[int] = set()
    for schedule in schedules:  # in reverse of the order of backward: the last contribution is met first
        num_behind -= len(schedule.backward.operators)
        forward += [
            replace(op, read_by=tuple(num_behind + r for r in op.read_by), used_until=None)
            for op in schedule.forward.operators
        ]
        operators = [_contributing(op, seen) for op in schedule.backward.operators]
        seen |= schedule.trained_params()
        backward = operators + backward
    cuts = (_starts([s.forward for s in schedules]), _starts([s.backward for s in reversed(schedules)]))
    joined = Schedule(
        params=schedules[0].params,
        forward=GraphSchedule("forward", tuple(forward)),
        backward=GraphSchedule("backward", tuple(backward)),
        held_nbytes=max(s.held_nbytes for s in schedules),
        also_trained=tuple(p for p in also_trained if p not in seen),
        num_samples=max(s.num_samples for s in schedules),
        num_tokens=max(s.num_tokens for s in schedules),
    )
    return joined, cuts


def _contributing(op: Operator, later: set[int]) -> Operator:
    shared = tuple(p for p in op.grads if p in later)
    if not shared:
        return op
    return replace(op, reads=tuple(sorted({*op.reads, *shared})), grads=tuple(p for p in op.grads if p not in later))


def _starts(graphs: Sequence[GraphSchedule]) -> tuple[int, ...]:
    starts, end = [], 0
    for graph in graphs:
        if end and graph.operators and end not in starts:
            starts.append(end)
        end += len(graph.operators)
    return tuple(starts)
