"""One iteration as pictures show it: every action as a bar on its stream, in a window of one period.

The window begins where the forward's first segment does. What starts before that (a prefetch) stands at the window's
end; what ends after it (an update beside the next forward) goes on at its beginning.

Where nobody knows how long actions take, they stand in the order of the plan, one after the other, each one unit wide.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice
from typing import Final

from chunkc.cost.timeline import Timeline
from chunkc.errors import ChunkcError
from chunkc.ir.actions import Action, Op, Stream
from chunkc.ir.layout import ChunkList
from chunkc.ir.plan import Plan, Program

_SHORTEST_WAIT = 1e-9


class Work(StrEnum):
    """Kinds of work that a bar stands for, as the legend names them."""

    FORWARD = "forward"
    BACKWARD = "backward"
    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    STATES = "optimizer states"
    ACTIVATIONS = "activations"
    GATHER = "gather"
    REDUCE = "reduce"
    UPDATE = "update"
    OTHER = "other"


_OF_OP = {
    Op.FETCH: Work.PARAMETERS,
    Op.EVICT: Work.GRADIENTS,
    Op.LOAD: Work.STATES,
    Op.STORE: Work.STATES,
    Op.OFFLOAD: Work.ACTIVATIONS,
    Op.RELOAD: Work.ACTIVATIONS,
    Op.GATHER: Work.GATHER,
    Op.REDUCE: Work.REDUCE,
    Op.SUM: Work.REDUCE,
    Op.BEGIN: Work.UPDATE,
    Op.UPDATE: Work.UPDATE,
}


LANE_NAMES: Final = {
    Stream.COMPUTE: "device",
    Stream.H2D: "host to device",
    Stream.D2H: "device to host",
    Stream.COMM: "between ranks",
    Stream.CPU: "host",
}
"""Streams as pictures name them; the text of an action has their short names."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One action: ``start`` lies in the window, ``end`` may lie behind it; ``text`` is without waits."""

    label: str
    text: str
    stream: Stream
    work: Work
    start: float
    end: float

    @property
    def duration(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the window, by what the compute stream does or waits for: a program of the iteration."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Frame:
    """A window of one period.

    Attributes:
        period: its width: milliseconds, or the number of actions.
        in_ms: which of them.
        bars: all actions of the iteration, by stream and then by start.
        phases: in order, without gaps.
        waits: parts in which the compute stream stands still before one of its actions, in order; none where times
            are unknown.
    """

    period: float
    in_ms: bool
    bars: tuple[Bar, ...]
    phases: tuple[Phase, ...]
    waits: tuple[tuple[float, float], ...]

    @property
    def streams(self) -> tuple[Stream, ...]:
        """Those that have bars, in the order of `Stream`."""
        used = {bar.stream for bar in self.bars}
        return tuple(stream for stream in Stream if stream in used)

    def lane(self, stream: Stream) -> tuple[Bar, ...]:
        """The bars of one stream, by start."""
        return tuple(bar for bar in self.bars if bar.stream is stream)

    def pieces(self, bar: Bar) -> Iterator[tuple[float, float]]:
        """Where ``bar`` stands in the window: once, or also at the beginning if it passes the end."""
        return pieces(bar.start, bar.end, self.period)


def pieces(start: float, end: float, period: float) -> Iterator[tuple[float, float]]:
    """Parts in ``0 .. period`` of an interval that repeats with the period; a longer one covers itself.

    >>> list(pieces(7.0, 12.0, 10.0))
    [(7.0, 10.0), (0.0, 2.0)]
    """
    shift = math.floor(start / period) * period
    start, end = start - shift, end - shift
    while end > period:
        yield start, period
        start, end = 0.0, end - period
    if end > start:
        yield start, end


Clock = dict[str, tuple[float, float]]
"""Start and end of every action of an iteration, by its label."""


def clock_of(plan: Plan, timeline: Timeline | None) -> tuple[Clock, float]:
    """Start and end of an iteration's actions, from the start of the first segment, and the period.

    Times may be negative or lie behind the period: they are those of one iteration, not yet laid into the window.
    Without a timeline, positions in the plan.

    Raises:
        ChunkcError: when the timeline is one of another plan.
    """
    if timeline is None:
        labels = [label for _, label, _ in plan.labelled()]
        return {label: (float(i), float(i + 1)) for i, label in enumerate(labels)}, float(max(1, len(labels)))
    if timeline.plan_digest != plan.digest():
        raise ChunkcError(
            f"the timeline is one of plan {timeline.plan_digest}, this is plan {plan.digest()}: simulate this plan"
        )
    origin_ms = _origin_ms(plan, timeline)
    clock = {s.label: (s.start_ms - origin_ms, s.end_ms - origin_ms) for s in timeline.slices}
    return clock, timeline.step_ms or max((end for _, end in clock.values()), default=0.0) or 1.0


def _origin_ms(plan: Plan, timeline: Timeline) -> float:
    """The start of the first segment; of the first action where there is none."""
    first = next((label for _, label, action in plan.labelled() if action.op is Op.RUN), None)
    return next((s.start_ms for s in timeline.slices if s.label == first), 0.0)


def frame_of(plan: Plan, timeline: Timeline | None) -> Frame:
    """The window of a steady iteration, by ``timeline`` or in plan order; raises as `clock_of`."""
    clock, period = clock_of(plan, timeline)
    unordered = [_bar(plan, program, label, action, clock[label], period) for program, label, action in plan.labelled()]
    order = {stream: number for number, stream in enumerate(Stream)}
    bars = tuple(sorted(unordered, key=lambda bar: (order[bar.stream], bar.start)))
    in_ms = timeline is not None
    if not in_ms:
        return Frame(period, in_ms, bars, _in_order(plan), ())
    return Frame(period, in_ms, bars, _phases(plan, clock, period), _waits(bars, period))


def _in_order(plan: Plan) -> tuple[Phase, ...]:
    """One phase for each program that has actions, as wide as they are many."""
    phases, start = [], 0
    for program in plan.iteration():
        end = start + len(program.actions)
        phases.append(Phase(program.name, float(start), float(end)))
        start = end
    return tuple(phase for phase in phases if phase.end > phase.start)


def _bar(plan: Plan, program: Program, label: str, action: Action, times: tuple[float, float], period: float) -> Bar:
    start = times[0] % period
    text = str(replace(action, waits=()))
    return Bar(label, text, action.stream, _work(plan, program, action), start, start + times[1] - times[0])


def _work(plan: Plan, program: Program, action: Action) -> Work:
    if action.op is Op.RUN:
        return Work.BACKWARD if program.role == "backward" else Work.FORWARD
    if action.op is Op.FETCH and plan.layout.chunks[action.index].list is ChunkList.GRAD:
        return Work.GRADIENTS
    return _OF_OP.get(action.op, Work.OTHER)


def _phases(plan: Plan, clock: Clock, period: float) -> tuple[Phase, ...]:
    """Phases, each ended by the next program's first segment or by the end of its own computing."""
    if plan.is_evaluation:
        return (Phase("evaluate", 0.0, period),)
    names, begins, last = ["forward"], [0.0], 0.0
    labels = iter(plan.labelled())
    for program in plan.iteration():
        actions = islice(labels, len(program.actions))
        computing = [clock[label] for _, label, action in actions if action.stream is Stream.COMPUTE]
        if not computing or program.role == "step":
            continue
        last = min(period, max(end for _, end in computing))
        if names[-1] != program.name:
            names.append(program.name)
            begins.append(min(start for start, _ in computing))
    if len(names) == 1:
        return (Phase("forward", 0.0, period),)
    edges = [*begins, last, period]
    phases = (Phase(*facts) for facts in zip([*names, "step"], edges, edges[1:], strict=False))
    return tuple(phase for phase in phases if phase.end > phase.start)


def _waits(bars: Sequence[Bar], period: float) -> tuple[tuple[float, float], ...]:
    """Gaps between the bars of the compute stream, those at the window's ends included."""
    computing = [bar for bar in bars if bar.stream is Stream.COMPUTE]
    busy = sorted(piece for bar in computing for piece in pieces(bar.start, bar.end, period))
    waits, free_from = [], 0.0
    for start, end in (*busy, (period, period)):
        if start - free_from > _SHORTEST_WAIT * period:
            waits.append((free_from, start))
        free_from = max(free_from, end)
    return tuple(waits) if computing else ()
