"""Belady's rule (1966): the unit whose next use lies furthest ahead gives its place to another.

The order of uses is static, so the future is known. Each step needs a set of units at once. A clean victim is dropped
for nothing; a dirty one costs a write. Where dirty units are read again later, choosing well is NP-hard (Beckmann,
Gibbons, Haeupler, McGuffey, "Writeback-aware caching", 2020): there the rule is run with several weights on the
distance of dirty victims, and the cheapest run wins. When units become dirty in their last use only, as in a
forward and backward pass with one landing, every write is paid exactly once whatever is chosen, and the plain rule,
which minimises fetches, is optimal.

Units wider than one place are *blocks*, others *singles*. Blocks stand in the first places, as many as their share of
all units, singles in the others first. Both take what has been free for longest, or idle since, so that a copy into it
can start as early as possible; for a block the rule is applied to ranges. Where that leaves no range for a block beside
the units needed with it, every block has one range for good (`_tight_ranges`), which any capacity of `min_places` has.
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
    dirties: Sequence[Sequence[int]],
    num_places: int,
    *,
    widths: Sequence[int],
    weights: Sequence[int] | None = None,
    separate: bool = False,
) -> tuple[ResidencyInterval, ...]:
    """The stays of all units with the least known volume.

    Args:
        steps: units needed in each step, all at once.
        dirties: units that each step leaves dirty (a subset of its units).
        num_places: capacity, at least ``min_places``.
        widths: places per unit.
        weights: bytes of each unit, to compare runs; default one.
        separate: whether singles keep out of the places of blocks, so that a block never displaces a unit in use.

    Returns:
        Stays in order of their first step. A dirty unit without a later use ends its stay at its last use.

    Raises:
        ValueError: when a step needs more places.
    """
    cost = [1] * len(widths) if weights is None else weights
    found = [
        (stays, shares)
        for shares in _shares(steps, widths, num_places, separate)
        for stays in _runs(steps, dirties, shares)
    ]
    if not found:
        starts = _tight_ranges(steps, widths)
        shares = _Shares(num_places, widths, _end_of_ranges(starts, widths), separate, starts)
        found = [(stays, shares) for stays in _runs(steps, dirties, shares)]
    return _idlest_places(*min(found, key=lambda pair: volume(pair[0], cost)))


def _runs(
    steps: Sequence[Sequence[int]], dirties: Sequence[Sequence[int]], shares: _Shares
) -> Iterator[tuple[ResidencyInterval, ...]]:
    """Yield the stays by the plain rule, and by the other weights.

    The other weights follow while the stays write units back that are needed again.
    """
    for weight in DIRTY_WEIGHTS:
        try:
            stays = _Places(steps, dirties, shares, weight).run()
        except _NoRangeError:
            continue
        yield stays
        if not _writes_early(stays):
            return


@dataclass(frozen=True, slots=True)
class _Shares:
    """The places of one run, shared between blocks and singles.

    Blocks stand in the first ``room`` places. Singles stand elsewhere first, or, where they are ``separate``, only
    elsewhere. ``starts``: the range of each block, where it has one for good.
    """

    num_places: int
    widths: Sequence[int]
    room: int
    separate: bool
    starts: Sequence[int] | None = None


def _shares(
    steps: Sequence[Sequence[int]], widths: Sequence[int], num_places: int, separate: bool
) -> tuple[_Shares, ...]:
    """Return the ways to share the places between blocks and singles.

    One way is in proportion, with at least as many places of each as some step needs. The others give as many as
    possible to the blocks, or to the singles.
    """
    num_singles, most_singles = sum(1 for w in widths if w == 1), _most_singles(steps, widths)
    least_room = _end_of_ranges(_tight_ranges(steps, widths), widths)
    if not least_room:
        return (_Shares(num_places, widths, 0, separate),)
    most_room = num_places - most_singles if separate else num_places
    in_proportion = num_places - max(most_singles, round(num_places * num_singles / sum(widths)))
    rooms = (max(least_room, room) for room in (in_proportion, most_room, num_places - num_singles))
    return tuple(_Shares(num_places, widths, room, separate) for room in dict.fromkeys(rooms))


class _NoRangeError(Exception):
    """A block finds no range beside the units that are needed with it."""


def volume(stays: Sequence[ResidencyInterval], weights: Sequence[int]) -> int:
    """Fetches and write-backs, each weighing as its unit does."""
    return sum(weights[s.unit] * (2 if s.dirty else 1) for s in stays)


def _writes_early(stays: Sequence[ResidencyInterval]) -> bool:
    """Whether a unit is written back although it is needed again."""
    last = {s.unit: s.begin for s in stays}
    return any(s.dirty and s.begin < last[s.unit] for s in stays)


def _idlest_places(stays: Sequence[ResidencyInterval], shares: _Shares) -> tuple[ResidencyInterval, ...]:
    """Move each stay to the place where nobody has stood for longest.

    Stays remain as they are where a block then finds no range. Which units stay is decided; a unit that does not stay
    until its next use may leave right after its last.
    """
    until = [-1] * shares.num_places
    found = list[ResidencyInterval]()
    for stay in stays:  # in order of their first step
        width = shares.widths[stay.unit]
        starts = range(shares.room - width + 1) if width > 1 else _single_places(shares)
        free = [s for s in starts if all(until[p] < stay.begin for p in range(s, s + width))]
        if not free:
            return tuple(stays)
        start = min(free, key=lambda s: (width == 1 and s < shares.room, max(until[s : s + width]), s))
        until[start : start + width] = [stay.end] * width
        found.append(replace(stay, place=start))
    return tuple(sorted(found, key=lambda s: (s.begin, s.place)))


def _single_places(shares: _Shares) -> range:
    return range(shares.room if shares.separate else 0, shares.num_places)


class _Places:
    """The state of one run: who stands where, until when, and who would leave next."""

    def __init__(
        self, steps: Sequence[Sequence[int]], dirties: Sequence[Sequence[int]], shares: _Shares, dirty_weight: float
    ) -> None:
        widths, num_places = shares.widths, shares.num_places
        self.steps, self.dirties, self.widths, self.starts = steps, dirties, widths, shares.starts
        self.dirty_weight, self.separate, self.room = dirty_weight, shares.separate, shares.room
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
        self.idle_since = [-1] * num_places
        self.num_freed = 0
        self.free = sorted((p < self.room, 0, p) for p in range(self.room if self.separate else 0, num_places))
        self.leaving: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
        self.stays: list[ResidencyInterval] = []

    def run(self) -> tuple[ResidencyInterval, ...]:
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
                start = self._range(step, unit, set(units)) if self.starts is None else self.starts[unit]
                for place in range(start, start + self.widths[unit]):
                    if self.occupant[place] >= 0:
                        self._end(self.occupant[place])
                self._enter(unit, start, step)
        for unit in units:
            if self.place[unit] < 0:
                self._enter(unit, self._take_place(step), step)

    def _range(self, step: int, unit: int, needed: Collection[int]) -> int:
        """Return the start of the range whose units are needed last.

        Of the ranges that nobody needs any more, the longest idle is taken. Ranges start or end where another unit
        does: between them, room for one more is lost.
        """
        width, best = self.widths[unit], None
        for start in self._edges(width):
            occupants = {o for o in self.occupant[start : start + width] if o >= 0}
            if occupants.isdisjoint(needed):
                ahead = min((self._distance(step, o) for o in occupants), default=float(NEVER))
                idle = max(self._idle_since(p) for p in range(start, start + width))
                best = max(best or (-1.0, 0, 0), (ahead, -idle, -start))
        if best is None:
            raise _NoRangeError
        return -best[2]

    def _edges(self, width: int) -> Iterator[int]:
        """Starts of ranges of ``width`` beside another unit, a free place or the end of the room of blocks."""
        before = -2
        for place, occupant in enumerate(self.occupant[: self.room]):
            if occupant != before or occupant == -1:
                before = occupant
                if place + width <= self.room:
                    yield place
                if place >= width:
                    yield place - width
        yield self.room - width

    def _distance(self, step: int, unit: int) -> float:
        """Steps to the next use of a unit; fewer of a dirty one, which costs a write."""
        next_use = self.uses[unit][-1]
        if next_use == NEVER:
            return float(NEVER)
        return (next_use - step) * (self.dirty_weight if self.dirty[unit] else 1.0)

    def _idle_since(self, place: int) -> int:
        """The last step that used what stands, or stood last, at ``place``."""
        occupant = self.occupant[place]
        return self.idle_since[place] if occupant < 0 else self.last[occupant]

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
        self.stays.append(ResidencyInterval(unit, place, self.begin[unit], self.last[unit], self.dirty[unit]))
        self.place[unit] = -1
        for p in range(place, place + self.widths[unit]):
            self.occupant[p], self.idle_since[p] = -1, self.last[unit]
            if not (self.separate and p < self.room):
                self.num_freed += 1
                heapq.heappush(self.free, (p < self.room, self.num_freed, p))


def min_places(steps: Sequence[Sequence[int]], widths: Sequence[int], separate: bool = False) -> int:
    """The smallest capacity with which every step's units fit, blocks in designated ranges."""
    ranges_end = _end_of_ranges(_tight_ranges(steps, widths), widths)
    if separate:
        return ranges_end + _most_singles(steps, widths)
    return max((ranges_end, *(sum(widths[u] for u in step) for step in steps)))


def _most_singles(steps: Sequence[Sequence[int]], widths: Sequence[int]) -> int:
    """The most units of one place that a step needs."""
    return max((sum(1 for u in step if widths[u] == 1) for step in steps), default=0)


def _end_of_ranges(starts: Sequence[int], widths: Sequence[int]) -> int:
    """The end of the last range of a block; 0 where there is none."""
    return max((starts[u] + w for u, w in enumerate(widths) if w > 1), default=0)


def _tight_ranges(steps: Sequence[Sequence[int]], widths: Sequence[int]) -> list[int]:
    """Return the first place of each block (0 for singles).

    Ranges of blocks needed together are disjoint, others may overlap.
    """
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
