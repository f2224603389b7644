"""Device bytes through one iteration by holder: exact steps, in milliseconds or in plan order.

A payload or a state holds its bytes from the start of the copy that brings it to the end of what takes it away. A
chunk holds gradients from its first stash until its update is done. The rest of the arena is allocated and not in use.
Non-model bytes are the plan's peak for a segment, held from its start until the next one starts.

The window joins an iteration to itself. Where iterations only repeat in a cycle of several, a slot may therefore seem
taken a little before it is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice

from chunkc.cost.timeline import Timeline
from chunkc.ir.actions import LANDINGS, Action, Op
from chunkc.ir.layout import ChunkList
from chunkc.ir.occupancy import Occupancy
from chunkc.ir.plan import TRANSITIONS, Plan
from chunkc.report.frame import Clock, clock_of, pieces

_SLACK = 1e-6
"""Part of the period by which a steady iteration may differ from the one before."""


class Kind(StrEnum):
    """Kinds of content of device memory, in the order in which pictures stack them."""

    STATES = "optimizer states"
    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    GROUPS = "gathered from other ranks"
    UNUSED = "arena, not in use"
    NONMODEL = "non-model"


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """A piecewise constant function of the time in the window of one period (`chunkc.report.frame`).

    Attributes:
        edges: piece ``i`` lasts from ``edges[i]`` to ``edges[i + 1]``, in milliseconds, or in actions.
        nbytes: by kind, one figure for each piece; all kinds together are what the device has given away.
        budget_nbytes: what it may give away.
        in_ms: whether edges are milliseconds.
    """

    edges: tuple[float, ...]
    nbytes: Mapping[Kind, tuple[int, ...]]
    budget_nbytes: int
    in_ms: bool

    @property
    def total_nbytes(self) -> tuple[int, ...]:
        """Of each piece: arena and non-model bytes."""
        return tuple(sum(piece) for piece in zip(*self.nbytes.values(), strict=True))

    @property
    def peak_nbytes(self) -> int:
        """The most of any piece."""
        return max(self.total_nbytes)

    def kinds(self) -> tuple[Kind, ...]:
        """Those that hold a byte at some time, in stacking order."""
        return tuple(kind for kind in Kind if any(self.nbytes[kind]))


def memory_curve(plan: Plan, timeline: Timeline | None) -> MemoryCurve:
    """The curve of a steady iteration, in actions without a timeline; raises as `clock_of`."""
    clock, period = clock_of(plan, timeline)
    held = _Replay(plan, clock, period)
    edges, sums = _steps([*held.intervals(), *_nonmodel(plan, clock)], period)
    used = [sum(sums[kind][i] for kind in _IN_ARENA) for i in range(len(edges) - 1)]
    arena_nbytes = plan.layout.arena_nbytes
    unused = tuple(max(0, arena_nbytes - taken) for taken in used)
    nbytes = {kind: tuple(sums[kind]) for kind in Kind} | {Kind.UNUSED: unused}
    return MemoryCurve(edges, nbytes, plan.memory.device_budget_nbytes, timeline is not None)


_IN_ARENA = (Kind.STATES, Kind.PARAMETERS, Kind.GRADIENTS, Kind.GROUPS)


@dataclass(frozen=True, slots=True)
class _Held:
    """Bytes of one kind from ``start`` to ``end``, unfolded."""

    kind: Kind
    nbytes: int
    start: float
    end: float


@dataclass(slots=True)
class _Replay:
    """Who stands on the device since when, through the programs of an iteration in order.

    ``standing``: kind, bytes and since when of every resident target; since None means since before the iteration.
    """

    plan: Plan
    clock: Clock
    period: float
    occupancy: Occupancy = field(init=False)
    standing: dict[str, tuple[Kind, int, float | None]] = field(default_factory=dict)
    graded: set[int] = field(default_factory=set)
    since_before: dict[str, tuple[Kind, int, float]] = field(default_factory=dict)
    ended: list[_Held] = field(default_factory=list)

    def intervals(self) -> list[_Held]:
        """Of all targets; one that passes the end of the iteration is one interval."""
        self.occupancy = Occupancy.of(self.plan.layout, self.plan.cold.resident)
        for target in self.occupancy.slot_of:
            self.standing[target] = (*self._facts(target), None)
        for _, label, action in self.plan.labelled():
            self._apply(action, *self.clock[label])
        for target, (kind, nbytes, since) in self.standing.items():
            before = self.since_before.pop(target, None)
            if since is None:
                self.ended.append(_Held(kind, nbytes, 0.0, self.period))
            elif before is not None:
                self.ended.append(_Held(kind, nbytes, since, before[2] + self.period))
        return self.ended

    def _apply(self, action: Action, start: float, end: float) -> None:
        for target in self.occupancy.apply(action):
            if target not in self.occupancy.slot_of:
                self._leave(target, end)
            elif action.op is Op.GATHER:
                chunk = self.plan.layout.chunks[int(target[1:])]
                self.standing[target] = (Kind.GROUPS, chunk.nbytes, start)
            elif action.op is Op.OPEN and self.plan.layout.owner(action.index) != self.plan.layout.rank:
                self.standing[target] = (Kind.GRADIENTS, self._facts(target)[1], start)
            else:
                self.standing[target] = (*self._facts(target), start)
        if action.op is Op.STASH and action.index not in self.graded:
            self.graded.add(action.index)
            self._turn(action.target, end)
        elif action.op in (Op.UPDATE, Op.RESTORE) and action.index in self.graded:
            self.graded.discard(action.index)
            self._turn(action.target, end)

    def _leave(self, target: str, end: float) -> None:
        kind, nbytes, since = self.standing.pop(target)
        if since is None:
            self.since_before[target] = (kind, nbytes, end)
        else:
            self.ended.append(_Held(kind, nbytes, since, end))

    def _turn(self, target: str, now: float) -> None:
        """Record that what stands in a slot becomes something else at ``now``."""
        if target in self.standing and self.standing[target][0] is not Kind.GROUPS:
            self._leave(target, now)
            self.standing[target] = (*self._facts(target), now)

    def _facts(self, target: str) -> tuple[Kind, int]:
        index = int(target.lstrip("cos"))
        chunk = self.plan.layout.chunks[index]
        if target[0] == "o":
            return Kind.STATES, self.plan.layout.os_nbytes_of(chunk)
        holds_gradients = chunk.list is ChunkList.GRAD or index in self.graded
        return Kind.GRADIENTS if holds_gradients else Kind.PARAMETERS, chunk.nbytes


def _nonmodel(plan: Plan, clock: Clock) -> Iterator[_Held]:
    """Non-model bytes of the segments."""
    nonmodel = {s.name: s.nonmodel_nbytes for s in plan.segments}
    running: tuple[int, float] | None = None
    labels = iter(plan.labelled())
    for program in plan.iteration():
        done = 0.0
        for _, label, action in islice(labels, len(program.actions)):
            start, end = clock[label]
            if running is not None and action.op is Op.RUN:
                yield _Held(Kind.NONMODEL, running[0], running[1], start)
            if action.op is Op.RUN:
                running = (nonmodel[action.target], start)
            if action.op in (Op.RUN, *LANDINGS):
                done = end
        if running is not None and program.role not in ("forward", *TRANSITIONS):
            yield _Held(Kind.NONMODEL, running[0], running[1], done)
            running = None


def _steps(held: list[_Held], period: float) -> tuple[tuple[float, ...], dict[Kind, list[int]]]:
    """Edges of the pieces, and for every kind the bytes in each piece."""
    folded = [(h, *piece) for h in held for piece in pieces(h.start, h.end, period)]
    snapped = _snap((t for h, *times in folded if h.kind in _IN_ARENA for t in times), period)
    changes: dict[float, dict[Kind, int]] = {0.0: {}, period: {}}
    for h, *times in folded:
        start, end = (snapped[t] if h.kind in _IN_ARENA else t for t in times)
        for time, nbytes in ((start, h.nbytes), (end, -h.nbytes)):
            change = changes.setdefault(time, {})
            change[h.kind] = change.get(h.kind, 0) + nbytes
    edges = tuple(sorted(changes))
    now = dict.fromkeys(Kind, 0)
    sums: dict[Kind, list[int]] = {kind: [] for kind in Kind}
    for edge in edges[:-1]:
        for kind, nbytes in changes[edge].items():
            now[kind] += nbytes
        for kind in Kind:
            sums[kind].append(now[kind])
    return edges, sums


def _snap(times: Iterable[float], period: float) -> dict[float, float]:
    """Times that differ less than a steady iteration may, as one: slots are left as others enter them."""
    snapped: dict[float, float] = {}
    slack, anchor = _SLACK * period, 0.0
    for time in sorted({0.0, *times}):
        anchor = time if time - anchor > slack else anchor
        snapped[time] = period if period - time <= slack else anchor
    return snapped
