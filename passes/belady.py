"""Which unit leaves when another needs its place: the one whose next use lies furthest ahead (Belady 1966).

The order of uses is static, so the future is known. Each step needs a set of units at once. A clean victim is dropped
for nothing; a dirty one costs a write. Where dirty units are read again later, choosing well is NP-hard (Beckmann,
Gibbons, Haeupler, McGuffey, "Writeback-aware caching", 2020): there the rule is run with several weights on the
distance of dirty victims, and the cheapest run wins. When units become dirty in their last use only, as in a
forward and backward pass with one landing, every write is paid exactly once whatever is chosen, and the plain rule,
which minimises fetches, is optimal.

Blocks (units wider than one place) have a designated range; singles take any free place, outside the ranges first, and
there the one that has been free for longest: a copy into it can start as early as possible.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from chunkc.passes.draft import Stay

NEVER = 1 << 60
DIRTY_WEIGHTS = (1.0, 0.75, 0.5, 0.25, 0.0)


def belady(
    steps: Sequence[Sequence[int]],
    dirties: Sequence[Sequence[int]],
    num_places: int,
    *,
    widths: Sequence[int],
    starts: Sequence[int],
    weights: Sequence[int] | None = None,
    separate: bool = False,
) -> tuple[Stay, ...]:
    """The stays of all units with the least known volume.

    Args:
        steps: units needed in each step, all at once.
        dirties: units that each step leaves dirty (a subset of its units).
        num_places: capacity.
        widths: places per unit.
        starts: first place of each unit wider than one; ignored for others.
        weights: bytes of each unit, to compare runs; default one.
        separate: whether singles keep out of designated ranges, so that a block never displaces a unit in use.

    Returns:
        Stays in order of their first step. A dirty unit without a later use ends its stay at its last use.
    """
    cost = [1] * len(widths) if weights is None else weights
    best = _Places(steps, dirties, num_places, widths, starts, DIRTY_WEIGHTS[0], separate).run()
    if not _writes_early(best):
        return best
    for weight in DIRTY_WEIGHTS[1:]:
        other = _Places(steps, dirties, num_places, widths, starts, weight, separate).run()
        best = min(best, other, key=lambda stays: volume(stays, cost))
    return best


def volume(stays: Sequence[Stay], weights: Sequence[int]) -> int:
    """Fetches and write-backs, each weighing as its unit does."""
    return sum(weights[s.unit] * (2 if s.dirty else 1) for s in stays)


def _writes_early(stays: Sequence[Stay]) -> bool:
    """Whether a unit is written back although it is needed again."""
    last = {s.unit: s.begin for s in stays}
    return any(s.dirty and s.begin < last[s.unit] for s in stays)


class _Places:
    """The state of one run: who stands where, until when, and who would leave next."""

    def __init__(
        self,
        steps: Sequence[Sequence[int]],
        dirties: Sequence[Sequence[int]],
        num_places: int,
        widths: Sequence[int],
        starts: Sequence[int],
        dirty_weight: float,
        separate: bool,
    ) -> None:
        self.steps, self.dirties, self.widths, self.starts = steps, dirties, widths, starts
        self.dirty_weight, self.separate = dirty_weight, separate
        self.uses: list[list[int]] = [[] for _ in widths]
        for step, units in enumerate(steps):
            for unit in units:
                self.uses[unit].append(step)
        for uses in self.uses:
            uses.append(NEVER)
            uses.reverse()
        self.occupant = [-1] * num_places
        self.place: list[int] = [-1] * len(widths)
        self.begin: list[int] = [0] * len(widths)
        self.last: list[int] = [0] * len(widths)
        self.dirty: list[bool] = [False] * len(widths)
        designated = {p for u, w in enumerate(widths) if w > 1 for p in range(starts[u], starts[u] + w)}
        self.is_designated = [p in designated for p in range(num_places)]
        self.num_freed = 0
        self.free = sorted((d, 0, p) for p, d in enumerate(self.is_designated) if not (separate and d))
        self.leaving: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
        self.stays: list[Stay] = []

    def run(self) -> tuple[Stay, ...]:
        for step, units in enumerate(self.steps):
            self._make_resident(step, units)
            self._use(step, units, self.dirties[step])
        for unit, place in enumerate(self.place):
            if place >= 0:
                self._end(unit)
        return tuple(sorted(self.stays, key=lambda s: (s.begin, s.place)))

    def _make_resident(self, step: int, units: Sequence[int]) -> None:
        for unit in units:
            if self.widths[unit] > 1 and self.place[unit] < 0:
                start = self.starts[unit]
                for place in range(start, start + self.widths[unit]):
                    if self.occupant[place] >= 0:
                        self._end(self.occupant[place])
                self._enter(unit, start, step)
        for unit in units:
            if self.place[unit] < 0:
                self._enter(unit, self._take_place(step), step)

    def _use(self, step: int, units: Sequence[int], dirtied: Sequence[int]) -> None:
        for unit in dirtied:
            self.dirty[unit] = True
        for unit in units:
            self.last[unit] = step
            self.uses[unit].pop()
            if self.uses[unit][-1] == NEVER and self.dirty[unit]:
                self._end(unit)
            elif self.widths[unit] == 1 or not self.separate:
                heapq.heappush(self.leaving[self.dirty[unit]], (-self.uses[unit][-1], unit))

    def _take_place(self, step: int) -> int:
        while True:
            while self.free:
                place = heapq.heappop(self.free)[2]
                if self.occupant[place] < 0:
                    return place
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
            raise ValueError(f"step {step} needs more than {len(self.occupant)} places")
        heapq.heappop(self.leaving[which])
        return chosen[1]

    def _furthest(self, which: int) -> tuple[int, int] | None:
        """``(next use, unit)`` of the resident clean (0) or dirty (1) unit whose next use is furthest."""
        heap = self.leaving[which]
        while heap:
            next_use, unit = -heap[0][0], heap[0][1]
            if self.place[unit] >= 0 and self.dirty[unit] == bool(which) and self.uses[unit][-1] == next_use:
                return next_use, unit
            heapq.heappop(heap)
        return None

    def _enter(self, unit: int, place: int, step: int) -> None:
        self.place[unit], self.begin[unit], self.dirty[unit] = place, step, False
        for p in range(place, place + self.widths[unit]):
            self.occupant[p] = unit

    def _end(self, unit: int) -> None:
        place = self.place[unit]
        self.stays.append(Stay(unit, place, self.begin[unit], self.last[unit], self.dirty[unit]))
        self.place[unit] = -1
        for p in range(place, place + self.widths[unit]):
            self.occupant[p] = -1
            if not (self.separate and self.is_designated[p]):
                self.num_freed += 1
                heapq.heappush(self.free, (self.is_designated[p], self.num_freed, p))


def min_places(steps: Sequence[Sequence[int]], widths: Sequence[int], separate: bool = False) -> int:
    """The smallest capacity with which every step's units fit, blocks in designated ranges."""
    starts = _tight_ranges(steps, widths)
    ranges_end = max((starts[u] + w for u, w in enumerate(widths) if w > 1), default=0)
    if separate:
        return ranges_end + max((sum(1 for u in step if widths[u] == 1) for step in steps), default=0)
    return max((ranges_end, *(sum(widths[u] for u in step) for step in steps)))


def designated_ranges(
    steps: Sequence[Sequence[int]], widths: Sequence[int], num_places: int, separate: bool = False
) -> list[int]:
    """First place of each block (0 for singles): ranges of blocks needed together are disjoint, others where they fit.

    ``num_places`` must be at least ``min_places``.
    """
    if separate:
        return _tight_ranges(steps, widths)
    blocks = [u for u, w in enumerate(widths) if w > 1]
    conflicts = _conflicts(steps, widths)
    starts = [0] * len(widths)
    for position, block in enumerate(blocks):
        placed = blocks[:position]
        start = _first_fit(block, placed, starts, widths)
        if start + widths[block] > num_places:
            start = _first_fit(block, [b for b in placed if b in conflicts[block]], starts, widths)
        if start + widths[block] > num_places:
            return _tight_ranges(steps, widths)
        starts[block] = start
    return starts


def _tight_ranges(steps: Sequence[Sequence[int]], widths: Sequence[int]) -> list[int]:
    blocks = [u for u, w in enumerate(widths) if w > 1]
    conflicts = _conflicts(steps, widths)
    starts = [0] * len(widths)
    for position, block in enumerate(blocks):
        starts[block] = _first_fit(block, [b for b in blocks[:position] if b in conflicts[block]], starts, widths)
    return starts


def _conflicts(steps: Sequence[Sequence[int]], widths: Sequence[int]) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {u: set() for u, w in enumerate(widths) if w > 1}
    for step in steps:
        together = [u for u in step if widths[u] > 1]
        if len(together) > 1:
            for unit in together:
                found[unit].update(together)
    return found


def _first_fit(block: int, others: list[int], starts: list[int], widths: Sequence[int]) -> int:
    start = 0
    for begin, end in sorted((starts[o], starts[o] + widths[o]) for o in others):
        if start + widths[block] <= begin:
            break
        start = max(start, end)
    return start
