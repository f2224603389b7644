"""Order in which the host updates chunks: the earliest deadline first among those released.

An update is *released* when its gradient is at home, and it is *due* when the next forward fetches the chunk. Backward
lands gradients in about the opposite order of the next forward's uses. The rule never waits while an update is
released, and takes of those released the one that is due first (Schrage's schedule for one machine with release times).
The largest delay behind a deadline is less than one update longer than in the best of all orders (Kise, Ibaraki and
Mine, 1979).

An update with a second home has begun before the step, and takes no time of it.

Where updates follow a decision, or the device computes on the thread that launches, none is released before backward
has ended, and the order is that of the deadlines.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from chunkc.cost.actions import segment_ms
from chunkc.cost.rates import CostRates
from chunkc.cost.spread import Dims
from chunkc.ir.actions import Op, Stream
from chunkc.ir.layout import Chunk, Layout
from chunkc.ir.plan import Segment
from chunkc.ir.state_spec import StateSpec
from chunkc.passes.support.draft import ActionAccess, Draft, Liveness, decided


@dataclass(frozen=True, slots=True)
class Job:
    """One update on the host: when it is released and how long it takes, in one unit."""

    chunk: int
    release: float
    duration: float


def earliest_deadline_first(jobs: Sequence[Job]) -> tuple[int, ...]:
    """The chunks of ``jobs``, which stand in the order of their deadlines, in the order of their updates."""
    coming = sorted(range(len(jobs)), key=lambda j: jobs[j].release, reverse=True)
    released: list[int] = []
    order: list[int] = []
    now = 0.0
    while coming or released:
        if not released:
            now = max(now, jobs[coming[-1]].release)
        while coming and jobs[coming[-1]].release <= now:
            heapq.heappush(released, coming.pop())
        job = jobs[heapq.heappop(released)]
        order.append(job.chunk)
        now += job.duration
    return tuple(order)


def by_first_use(layout: Layout, liveness: Liveness) -> tuple[int, ...]:
    """Own trained chunks in order of first use, those that only other graphs use last (padding is none)."""
    order: dict[int, None] = {}
    for param in liveness.use_order:
        order.update(dict.fromkeys(layout.placements[param].chunks))
    trained = dict.fromkeys(c.index for c in layout.owned() if c.os_home is not None and c.used_numel)
    return (*(c for c in order if c in trained), *(c for c in trained if c not in order))


def host_order(draft: Draft, chunks: Sequence[int]) -> tuple[int, ...]:
    """Put ``chunks``, given in order of their deadlines, in the order in which the host updates them."""
    layout, target = decided(draft.layout, "layout"), draft.target
    if draft.options.tracks_grad_norm or target.runs_inline:
        return tuple(chunks)
    segments = tuple(s for line in decided(draft.timelines, "segments") for s in line.segments)
    pace = (
        _Positions(segments, layout, chunks)
        if target.rates is None
        else _Milliseconds(segments, target.rates, layout.state_spec, target.mesh)
    )
    at_home = _released(decided(draft.accesses, "actions")[1], layout, pace)

    def duration(chunk: Chunk) -> float:
        return 0.0 if chunk.has_second_home else pace.update(chunk.used_numel, chunk.dtype)

    jobs = [Job(c, at_home.get(c, 0.0), duration(layout.chunks[c])) for c in chunks]
    return earliest_deadline_first(jobs)


class _Milliseconds:
    """How long things take where the rates are known: each alone."""

    def __init__(self, segments: Sequence[Segment], rates: CostRates, states: StateSpec, dims: Dims) -> None:
        self._rates, self._states = rates, states
        self._segments = {s.name: segment_ms(s, rates, dims) for s in segments}

    def run(self, segment: str) -> float:
        return self._segments[segment]

    def copy_home(self, nbytes: int) -> float:
        return self._rates.copies[Stream.D2H].time_ms(nbytes)

    def update(self, numel: int, dtype: str) -> float:
        table = self._rates.cpu_update_gparam_per_s
        return numel / self._rates.update_gparam_per_s(table, dtype, self._states) * 1e-6


class _Positions:
    """Durations without rates: an operator takes 1, a copy 0, all updates as much as all operators."""

    def __init__(self, segments: Sequence[Segment], layout: Layout, chunks: Sequence[int]) -> None:
        self._segments = {s.name: float(s.end_op - s.first_op) for s in segments}
        total = sum(layout.chunks[c].used_numel for c in chunks)
        self._per_element = sum(self._segments.values()) / total if total else 0.0

    def run(self, segment: str) -> float:
        return self._segments[segment]

    def copy_home(self, nbytes: int) -> float:
        return 0.0

    def update(self, numel: int, dtype: str) -> float:
        return numel * self._per_element


def _released(backward: Sequence[ActionAccess], layout: Layout, pace: _Milliseconds | _Positions) -> dict[int, float]:
    """When the gradient of each chunk is at home, if computing and copies never wait for fetches."""
    computed = copied = 0.0
    released: dict[int, float] = {}
    for action in (access.action for access in backward):
        if action.op is Op.RUN:
            computed += pace.run(action.target)
        elif action.op is Op.EVICT:
            chunk = layout.chunks[action.index]
            copied = max(computed, copied) + pace.copy_home(chunk.used_nbytes)
            released[chunk.index if chunk.partner is None else chunk.partner] = copied
    return released
