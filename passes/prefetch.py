"""Pass ``prefetch``: when each copy starts, and with that the segments that are compiled and run.

A slot range is freed right after its block's last use, and the fetch into it is issued at once, ahead of later runs;
fetches keep the order in which they are needed, since the stream is a queue. Base segments without an action between
them merge while the non-model bytes stay within what the arena leaves. A resident plan fetches nothing: each graph is
one segment, or over several ranks a few, between which groups are gathered and reduced.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from chunkc.ir.layout import Layout
from chunkc.ir.plan import Segment
from chunkc.ir.schedule import GraphKind, Schedule
from chunkc.ir.tiers import Tier
from chunkc.ir.work import work_of
from chunkc.passes.residency import used_ranges
from chunkc.passes.segments import GRAPHS, ranges, segment_costs
from chunkc.passes.support.arena import lay_out
from chunkc.passes.support.budget import most_ranges
from chunkc.passes.support.draft import BaseSegment, Demand, Draft, Liveness, ResidencyInterval, Timeline, decided


@dataclass(frozen=True, slots=True)
class Timing:
    """For one interval: issued before step ``issue``, its slot ranges free after step ``free``."""

    interval: ResidencyInterval
    issue: int
    free: int


def time_intervals(
    intervals: tuple[ResidencyInterval, ...], widths: tuple[int, ...], num_forward: int, num_steps: int
) -> list[Timing]:
    """Issue and free step of every interval, in order of need."""
    graph_start = [0 if s.begin < num_forward else num_forward for s in intervals]
    frees = _free_steps(intervals, widths, num_forward, num_steps)
    ready: dict[int, int] = {}
    gone: dict[int, int] = {}
    queue = [0, num_forward]
    timings = []
    for index, interval in enumerate(intervals):
        slot_ranges = range(interval.slot_range, interval.slot_range + widths[interval.block])
        after = max(graph_start[index], gone.get(interval.block, 0), *(ready.get(p, 0) for p in slot_ranges))
        which = 0 if interval.begin < num_forward else 1
        queue[which] = max(queue[which], after)
        timings.append(Timing(interval, queue[which], frees[index]))
        gone[interval.block] = frees[index] + 1
        ready.update(dict.fromkeys(slot_ranges, frees[index] + 1))
    return timings


def _free_steps(
    intervals: tuple[ResidencyInterval, ...], widths: tuple[int, ...], num_forward: int, num_steps: int
) -> list[int]:
    """The step after which each interval ends: its last use, or later if nobody waits for its slots."""
    wanted: dict[int, int] = {}
    again: dict[int, int] = {}
    frees = [0] * len(intervals)
    for index in range(len(intervals) - 1, -1, -1):
        interval = intervals[index]
        slot_ranges = range(interval.slot_range, interval.slot_range + widths[interval.block])
        successor = min([again.get(interval.block, num_steps), *(wanted.get(p, num_steps) for p in slot_ranges)])
        if interval.dirty:
            frees[index] = interval.end
        elif interval.end < num_forward <= successor < num_steps:
            frees[index] = num_forward - 1
        else:
            frees[index] = interval.end if successor < num_steps else num_steps - 1
        again[interval.block] = interval.begin
        wanted.update(dict.fromkeys(slot_ranges, interval.begin))
    return frees


def merged_starts(
    demand: Demand, timings: list[Timing], cuts: tuple[tuple[int, ...], tuple[int, ...]] | None, cap_nbytes: int
) -> list[int]:
    """The steps at which merged segments start."""
    num_forward = sum(1 for s in demand.steps if s.graph == "forward")
    forced = {0, num_forward}
    for timing in timings:
        forced.update((timing.interval.begin, timing.free + 1))
    if cuts is not None:
        cut_ops = {(graph, op) for graph, ops in zip(GRAPHS, cuts, strict=True) for op in ops}
        forced.update(i for i, s in enumerate(demand.steps) if (s.graph, s.first_op) in cut_ops)
    starts: list[int] = []
    live = work = pending = 0
    for index, step in enumerate(demand.steps):
        live, work = max(live, step.live_nbytes + pending), max(work, step.workspace_nbytes)
        if index in forced or live + work > cap_nbytes:
            starts.append(index)
            live, work, pending = step.live_nbytes, step.workspace_nbytes, 0
        pending += step.landed_nbytes
    return starts


def _segments(schedule: Schedule, liveness: Liveness, which: int, starts: list[int]) -> tuple[Segment, ...]:
    operators = schedule.graphs[which].operators
    lands: list[list[int]] = [[] for _ in operators]
    if which == 1:
        for param in liveness.trained:
            lands[liveness.landing_op[param]].append(param)
    result = []
    costs = segment_costs(liveness.costs[which], starts)
    for index, ((first, end), (live, work)) in enumerate(zip(ranges(starts, len(operators)), costs, strict=True)):
        reads = tuple(sorted({p for op in operators[first:end] for p in op.reads}))
        landing = tuple(sorted(p for op in lands[first:end] for p in op))
        counts, away = work_of(operators[first:end]), min(liveness.costs[which].away[first:end], default=0)
        result.append(Segment(GRAPHS[which], index, first, end, reads, landing, live + away, work, counts, away))
    return tuple(result)


def timeline(
    graph: GraphKind, segments: tuple[Segment, ...], starts: list[int], timings: list[Timing], steps: range
) -> Timeline:
    """The intervals of one graph's ``steps`` by merged segment, which start at ``starts``."""
    fetches: list[list[ResidencyInterval]] = [[] for _ in segments]
    frees: list[list[ResidencyInterval]] = [[] for _ in segments]
    for timing in timings:
        if timing.interval.begin in steps:
            fetches[bisect_right(starts, timing.issue) - 1].append(timing.interval)
        if timing.free in steps:
            frees[bisect_right(starts, timing.free) - 1].append(timing.interval)
    for freed in frees:
        freed.sort(key=lambda s: (not s.dirty, s.slot_range))
    return Timeline(graph, segments, tuple(map(tuple, fetches)), tuple(map(tuple, frees)))


@dataclass(frozen=True, slots=True)
class PrefetchPass:
    """Decides ``segments`` and ``prefetch``, and lays out the arena with the slot ranges that are used."""

    name: str = "prefetch"
    requires: frozenset[str] = frozenset({"liveness", "mapping", "os_home", "residency"})
    provides: frozenset[str] = frozenset({"segments", "prefetch"})
    conflicts: frozenset[str] = frozenset({"programs"})

    def __call__(self, draft: Draft) -> Draft:
        layout = _with_arena(draft)
        liveness, demand = decided(draft.liveness, "liveness"), decided(draft.demand, "demand")
        intervals, cuts = decided(draft.intervals, "residency"), draft.options.cuts
        if draft.is_resident:
            num_exchanges = draft.options.num_exchanges if layout.world_size > 1 else 0
            both = [
                {0, *(cuts[w] if cuts else ()), *exchange_starts(demand, w, num_exchanges)}
                if liveness.costs[w].live
                else ()
                for w in (0, 1)
            ]
            whole = (_segments(draft.schedule, liveness, w, sorted(both[w])) for w in (0, 1))
            forward, backward = (timeline(*line, [], [], range(0)) for line in zip(GRAPHS, whole, strict=True))
            return replace(draft, layout=layout, timelines=(forward, backward), note="nothing to fetch")
        num_steps = len(demand.steps)
        num_forward = sum(1 for s in demand.steps if s.graph == "forward")
        timings = time_intervals(intervals, demand.blocks.num_groups, num_forward, num_steps)
        cap_nbytes = draft.target.budget_nbytes(Tier.DEVICE) - layout.arena_nbytes
        starts = merged_starts(demand, timings, cuts, cap_nbytes)
        timelines = []
        for which, steps in enumerate((range(num_forward), range(num_forward, num_steps))):
            first_steps = [s for s in starts if s in steps]
            segments = _segments(draft.schedule, liveness, which, [demand.steps[s].first_op for s in first_steps])
            timelines.append(timeline(GRAPHS[which], segments, first_steps, timings, steps))
        note = f"{len(starts)} segments of {num_steps}, {len(intervals)} fetches"
        return replace(draft, layout=layout, timelines=(timelines[0], timelines[1]), note=note)


def exchange_starts(demand: Demand, which: int, num_exchanges: int) -> list[int]:
    """Choose the operators at which the segments of a resident plan's graph start.

    With several segments, about ``num_exchanges`` (0: one), exchanges go on beside computing. Each needs as many
    further groups as the others (forward), or follows the landing of as many (backward).
    """
    if not num_exchanges:
        return []
    steps = [step for step in demand.steps if step.graph == GRAPHS[which]]
    widths = demand.blocks.num_groups
    exchanged = _first_needed(steps) if which == 0 else _last_landed(demand, steps)
    counts = [sum(widths[block] for block in blocks) for blocks in exchanged]
    share, passed, starts = sum(counts) / num_exchanges, 0, list[int]()
    for step, count in zip(steps, counts, strict=True):
        if passed and passed >= share * (len(starts) + 1) and (count or which == 1):
            starts.append(step.first_op)
        passed += count
    return starts


def _first_needed(steps: Sequence[BaseSegment]) -> list[set[int]]:
    """The blocks that each step is the first to need."""
    seen, new_blocks = set[int](), list[set[int]]()
    for step in steps:
        new_blocks.append(set(step.blocks) - seen)
        seen.update(step.blocks)
    return new_blocks


def _last_landed(demand: Demand, steps: Sequence[BaseSegment]) -> list[set[int]]:
    """The blocks whose last gradient lands in each step."""
    last = {block: index for index, step in enumerate(steps) for p in step.lands for block in demand.blocks.of_grad[p]}
    return [{block for block, at in last.items() if at == index} for index in range(len(steps))]


def _with_arena(draft: Draft) -> Layout:
    """The layout with slots for the intervals and for states; a fixed or resident one is kept."""
    layout, demand = decided(draft.layout, "layout"), decided(draft.demand, "demand")
    if draft.fixed_layout is not None or draft.is_resident:
        return layout
    used = used_ranges(demand, decided(draft.intervals, "residency"))
    most = most_ranges(layout, demand, draft.target, draft.options)
    return lay_out(layout, decided(draft.liveness, "liveness"), used, most, draft.options.streamed_share)
