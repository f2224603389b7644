"""Belady's rule (1966): the chunk block whose next use lies furthest ahead leaves.

The order of uses is static, so the future is known. Each step needs a set of blocks at once. A clean victim is dropped
for nothing; a dirty one costs a write. Where dirty blocks are read again later, choosing well is NP-hard (Beckmann,
Gibbons, Haeupler, McGuffey, "Writeback-aware caching", 2020): there the rule is run with several weights on the
distance of dirty victims, and the cheapest run wins. Where blocks become dirty in their last use only, every write is
paid exactly once, and the plain rule, which minimises fetches, is optimal.

    slot ranges   0 1 2 3 4 5 | 6 7 8 9      wide blocks take spans of the first ``room`` slot ranges,
                  A A A B B B | c d . e      narrow ones (one slot range) stand behind them first

Both take the slot ranges that have been free for longest, or idle since, so that a copy into them can start early. For
a wide block the rule is applied to spans. Where that leaves no span beside the blocks needed with it, every wide block
has a reserved span (`_reserved_spans`), for which `min_ranges` slot ranges suffice.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from chunkc.passes.support.draft import ResidencyInterval

NEVER = 1 << 60
DIRTY_WEIGHTS = (1.0, 0.75, 0.5, 0.25, 0.0)


def belady(
    steps: Sequence[Sequence[int]],
    modified: Sequence[Sequence[int]],
    num_ranges: int,
    *,
    widths: Sequence[int],
    weights: Sequence[int] | None = None,
    isolate_wide: bool = False,
) -> tuple[ResidencyInterval, ...]:
    """The residency intervals of all blocks with the least known volume, in order of their first step.

    ``steps``: blocks needed in each, all at once; ``modified``: those that it leaves dirty, whose interval without a
    later use ends with the last use. ``widths``: slot ranges of each block; ``weights``: bytes of each, to compare
    runs. With ``isolate_wide`` narrow blocks keep out of the room of wide ones, which then displace none in use.
    ValueError when a step needs more than ``num_ranges``.
    """
    cost = [1] * len(widths) if weights is None else weights
    candidates = [
        (intervals, division)
        for division in _divisions(steps, widths, num_ranges, isolate_wide)
        for intervals in _runs(steps, modified, division)
    ]
    if not candidates:
        starts = _reserved_spans(steps, widths)
        division = _Division(num_ranges, widths, _end_of_spans(starts, widths), isolate_wide, starts)
        candidates = [(intervals, division) for intervals in _runs(steps, modified, division)]
    return _idlest_ranges(*min(candidates, key=lambda pair: volume(pair[0], cost)))


def _runs(
    steps: Sequence[Sequence[int]], modified: Sequence[Sequence[int]], division: _Division
) -> Iterator[tuple[ResidencyInterval, ...]]:
    """Yield the intervals by the plain rule, then by other weights while blocks are written early."""
    for weight in DIRTY_WEIGHTS:
        try:
            intervals = _Run(steps, modified, division, weight).run()
        except _NoSpanError:
            continue
        yield intervals
        if not _writes_early(intervals):
            return


@dataclass(frozen=True, slots=True)
class _Division:
    """The slot ranges of one run, divided between wide and narrow blocks.

    Wide blocks stand in the first ``room`` slot ranges, narrow ones elsewhere first (with ``isolate_wide`` only there).
    ``reserved``: where each wide block has a reserved span, its start.
    """

    num_ranges: int
    widths: Sequence[int]
    room: int
    isolate_wide: bool
    reserved: Sequence[int] | None = None


def _divisions(
    steps: Sequence[Sequence[int]], widths: Sequence[int], num_ranges: int, isolate_wide: bool
) -> tuple[_Division, ...]:
    """Divide in proportion (each kind has what some step needs), or give one kind as much as possible."""
    num_narrow, most_narrow = sum(1 for w in widths if w == 1), _most_narrow(steps, widths)
    least_room = _end_of_spans(_reserved_spans(steps, widths), widths)
    if not least_room:
        return (_Division(num_ranges, widths, 0, isolate_wide),)
    most_room = num_ranges - most_narrow if isolate_wide else num_ranges
    in_proportion = num_ranges - max(most_narrow, round(num_ranges * num_narrow / sum(widths)))
    rooms = (max(least_room, room) for room in (in_proportion, most_room, num_ranges - num_narrow))
    return tuple(_Division(num_ranges, widths, room, isolate_wide) for room in dict.fromkeys(rooms))


class _NoSpanError(Exception):
    """A wide block finds no span beside the blocks that are needed with it."""


def volume(intervals: Sequence[ResidencyInterval], weights: Sequence[int]) -> int:
    """Fetches and write-backs, each weighing as its block does."""
    return sum(weights[s.block] * (2 if s.dirty else 1) for s in intervals)


def _writes_early(intervals: Sequence[ResidencyInterval]) -> bool:
    last = {s.block: s.begin for s in intervals}
    return any(s.dirty and s.begin < last[s.block] for s in intervals)


def _idlest_ranges(intervals: Sequence[ResidencyInterval], division: _Division) -> tuple[ResidencyInterval, ...]:
    """Move each interval to the slot range that has been idle for longest.

    Intervals remain as they are where a wide block then finds no span. A block that does not stay until its next use
    may leave right after its last.
    """
    until = [-1] * division.num_ranges
    moved = list[ResidencyInterval]()
    for interval in intervals:  # in order of their first step
        width = division.widths[interval.block]
        starts = range(division.room - width + 1) if width > 1 else _narrow_ranges(division)
        free = [s for s in starts if all(until[p] < interval.begin for p in range(s, s + width))]
        if not free:
            return tuple(intervals)
        start = min(free, key=lambda s: (width == 1 and s < division.room, max(until[s : s + width]), s))
        until[start : start + width] = [interval.end] * width
        moved.append(replace(interval, slot_range=start))
    return tuple(sorted(moved, key=lambda s: (s.begin, s.slot_range)))


def _narrow_ranges(division: _Division) -> range:
    return range(division.room if division.isolate_wide else 0, division.num_ranges)


class _Run:
    """One run of the rule: the blocks in all slot ranges, their next uses, and who would leave next."""

    def __init__(
        self,
        steps: Sequence[Sequence[int]],
        modified: Sequence[Sequence[int]],
        division: _Division,
        dirty_weight: float,
    ) -> None:
        widths, num_ranges = division.widths, division.num_ranges
        self.steps, self.modified, self.widths, self.reserved = steps, modified, widths, division.reserved
        self.dirty_weight, self.isolate_wide, self.room = dirty_weight, division.isolate_wide, division.room
        self.uses: list[list[int]] = [[] for _ in widths]
        for step, blocks in enumerate(steps):
            for block in blocks:
                self.uses[block].append(step)
        for uses in self.uses:
            uses.append(NEVER)
            uses.reverse()
        self.occupant = [-1] * num_ranges
        self.slot_range: list[int] = [-1] * len(widths)
        self.begin: list[int] = [0] * len(widths)
        self.last: list[int] = [0] * len(widths)
        self.dirty: list[bool] = [False] * len(widths)
        self.idle_since = [-1] * num_ranges  # of free slot ranges: the last step that used what stood there
        self.num_freed = 0
        self.free = sorted((p < self.room, 0, p) for p in range(self.room if self.isolate_wide else 0, num_ranges))
        self.leaving: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
        self.intervals: list[ResidencyInterval] = []

    def run(self) -> tuple[ResidencyInterval, ...]:
        for step, blocks in enumerate(self.steps):
            self._make_resident(step, blocks)
            self._use(step, blocks, self.modified[step])
        for block, slot_range in enumerate(self.slot_range):
            if slot_range >= 0:
                self._end(block)
        return tuple(sorted(self.intervals, key=lambda s: (s.begin, s.slot_range)))

    def _make_resident(self, step: int, blocks: Sequence[int]) -> None:
        for block in blocks:
            if self.widths[block] > 1 and self.slot_range[block] < 0:
                start = self._span(step, block, set(blocks)) if self.reserved is None else self.reserved[block]
                for slot_range in range(start, start + self.widths[block]):
                    if self.occupant[slot_range] >= 0:
                        self._end(self.occupant[slot_range])
                self._enter(block, start, step)
        for block in blocks:
            if self.slot_range[block] < 0:
                self._enter(block, self._take_range(step), step)

    def _span(self, step: int, block: int, needed: Collection[int]) -> int:
        """Start of the span whose blocks are needed last; of those never needed again, of the longest idle.

        Spans start or end where another block does: else room for one more would be lost in between.
        """
        width, best = self.widths[block], None
        idle_since = [t if o < 0 else self.last[o] for t, o in zip(self.idle_since, self.occupant, strict=True)]
        for start in dict.fromkeys(self._edges(width)):
            occupants = set(self.occupant[start : start + width]) - {-1}
            if occupants.isdisjoint(needed):
                ahead = min([self._distance(step, o) for o in occupants], default=float(NEVER))
                if best is None or ahead >= best[0]:
                    best = max(best or (-1.0, 0, 0), (ahead, -max(idle_since[start : start + width]), -start))
        if best is None:
            raise _NoSpanError
        return -best[2]

    def _edges(self, width: int) -> Iterator[int]:
        """Starts of spans of ``width`` that touch another block, a free slot range or the end of the room."""
        before = -2
        for slot_range, occupant in enumerate(self.occupant[: self.room]):
            if occupant != before or occupant == -1:
                before = occupant
                if slot_range + width <= self.room:
                    yield slot_range
                if slot_range >= width:
                    yield slot_range - width
        yield self.room - width

    def _distance(self, step: int, block: int) -> float:
        """Steps to the next use of a block; fewer of a dirty one, which costs a write."""
        next_use = self.uses[block][-1]
        if next_use == NEVER:
            return float(NEVER)
        return (next_use - step) * (self.dirty_weight if self.dirty[block] else 1.0)

    def _use(self, step: int, blocks: Sequence[int], newly_dirty: Sequence[int]) -> None:
        for block in newly_dirty:
            self.dirty[block] = True
        for block in blocks:
            self.last[block] = step
            self.uses[block].pop()
            if self.uses[block][-1] == NEVER and self.dirty[block]:
                self._end(block)
            elif self.widths[block] == 1 or not self.isolate_wide:
                heapq.heappush(self.leaving[self.dirty[block]], (-self.uses[block][-1], block))

    def _take_range(self, step: int) -> int:
        while True:
            while self.free:
                slot_range = heapq.heappop(self.free)[2]
                if self.occupant[slot_range] < 0:
                    return slot_range
            self._end(self._victim(step))

    def _victim(self, step: int) -> int:
        clean, dirty = self._furthest(0), self._furthest(1)
        if dirty is None or (clean is not None and clean[0] - step >= self.dirty_weight * (dirty[0] - step)):
            chosen, which = clean, 0
        else:
            chosen, which = dirty, 1
        if chosen is not None and chosen[0] <= step:
            chosen, which = (clean, 0) if which else (dirty, 1)
        if chosen is None or chosen[0] <= step:
            raise ValueError(f"step {step} needs more than {len(self.occupant)} slot ranges")
        heapq.heappop(self.leaving[which])
        return chosen[1]

    def _furthest(self, which: int) -> tuple[int, int] | None:
        """``(next use, block)`` of the resident clean (0) or dirty (1) block whose next use is furthest."""
        heap = self.leaving[which]
        while heap:
            next_use, block = -heap[0][0], heap[0][1]
            if self.slot_range[block] >= 0 and self.dirty[block] == bool(which) and self.uses[block][-1] == next_use:
                return next_use, block
            heapq.heappop(heap)
        return None

    def _enter(self, block: int, slot_range: int, step: int) -> None:
        self.slot_range[block], self.begin[block], self.dirty[block] = slot_range, step, False
        for p in range(slot_range, slot_range + self.widths[block]):
            self.occupant[p] = block

    def _end(self, block: int) -> None:
        slot_range = self.slot_range[block]
        begin, end = self.begin[block], self.last[block]
        self.intervals.append(ResidencyInterval(block, slot_range, begin, end, self.dirty[block]))
        self.slot_range[block] = -1
        for p in range(slot_range, slot_range + self.widths[block]):
            self.occupant[p], self.idle_since[p] = -1, self.last[block]
            if not (self.isolate_wide and p < self.room):
                self.num_freed += 1
                heapq.heappush(self.free, (p < self.room, self.num_freed, p))


def min_ranges(steps: Sequence[Sequence[int]], widths: Sequence[int], isolate_wide: bool = False) -> int:
    """The fewest slot ranges with which every step's blocks fit, wide ones in reserved spans."""
    spans_end = _end_of_spans(_reserved_spans(steps, widths), widths)
    if isolate_wide:
        return spans_end + _most_narrow(steps, widths)
    return max((spans_end, *(sum(widths[b] for b in step) for step in steps)))


def _most_narrow(steps: Sequence[Sequence[int]], widths: Sequence[int]) -> int:
    return max((sum(1 for b in step if widths[b] == 1) for step in steps), default=0)


def _end_of_spans(starts: Sequence[int], widths: Sequence[int]) -> int:
    return max((starts[b] + w for b, w in enumerate(widths) if w > 1), default=0)


def _reserved_spans(steps: Sequence[Sequence[int]], widths: Sequence[int]) -> list[int]:
    """Start of a span for each wide block (0: narrow), disjoint for blocks needed together."""
    wide = [b for b, w in enumerate(widths) if w > 1]
    conflicts = _conflicts(steps, widths)
    starts = [0] * len(widths)
    for position, block in enumerate(wide):
        starts[block] = _first_fit(block, [b for b in wide[:position] if b in conflicts[block]], starts, widths)
    return starts


def _conflicts(steps: Sequence[Sequence[int]], widths: Sequence[int]) -> dict[int, set[int]]:
    """For each wide block, the wide blocks that some step needs together with it."""
    conflicts: dict[int, set[int]] = {b: set() for b, w in enumerate(widths) if w > 1}
    for step in steps:
        together = [b for b in step if widths[b] > 1]
        for block in together:
            conflicts[block].update(together)
    return conflicts


def _first_fit(block: int, others: list[int], starts: list[int], widths: Sequence[int]) -> int:
    start = 0
    for begin, end in sorted((starts[o], starts[o] + widths[o]) for o in others):
        if start + widths[block] <= begin:
            break
        start = max(start, end)
    return start
