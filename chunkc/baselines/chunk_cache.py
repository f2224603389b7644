"""Places of PatrickStar's chunks through an iteration, with the moves, gathers and reductions for it.

A rank's own chunk of a group is on the device or on the host; the other ranks' chunks are on the device from the first
use of the group in a pass to its last (algorithms 1 and 2 of the paper). Where there is no room for a group, the one
used last is evicted (Belady), or in the order of the list. In the update states need their gradients beside them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from chunkc.baselines.packing import Packing
from chunkc.baselines.stretches import Course, Stretch

MoveKind = Literal["fetch", "evict", "gather", "release", "reduce", "run", "update_cpu", "update_gpu"]


@dataclass(frozen=True, slots=True)
class Move:
    """One thing that happens, with the group or the stretch that it happens to."""

    kind: MoveKind
    group: int = -1
    stretch: Stretch | None = None


class NoRoom(Exception):
    """A stretch needs more bytes than there are, ``missing_nbytes`` of them."""

    def __init__(self, stretch: str, missing_nbytes: int) -> None:
        super().__init__(f"{stretch} needs {missing_nbytes} bytes more")
        self.stretch, self.missing_nbytes = stretch, missing_nbytes


@dataclass(slots=True)
class ChunkCache:
    """The steady iteration of one rank, with the states of the first groups on the device.

    ``room_nbytes``: for chunks while a stretch runs, gathered ones included. ``by_list_order``: evict in the order of
    the list, not what is used last.
    """

    course: Course
    packing: Packing
    payload_nbytes: int
    room_nbytes: Callable[[Stretch], int]
    num_device_states: int
    by_list_order: bool = False

    def iteration(self) -> tuple[list[Move], int]:
        """Moves of an iteration that ends as it began, and its most payloads on the host; may raise NoRoom."""
        standing: frozenset[int] = frozenset()
        seen: list[frozenset[int]] = []
        while standing not in seen:
            seen.append(standing)
            walk = _Walk(self, set(standing), self._uses())
            moves = list(walk.moves())
            standing = frozenset(walk.standing)
        walk = _Walk(self, set(standing), self._uses())
        moves = list(walk.moves())
        return moves, walk.most_on_host

    def _uses(self) -> list[list[int]]:
        uses: list[list[int]] = [[] for _ in range(self.packing.num_groups)]
        for number, stretch in enumerate(self.course.stretches):
            for group in self.packing.groups_of(stretch.params):
                uses[group].append(number)
        return uses


@dataclass(slots=True)
class _Walk:
    """One iteration, move by move; ``standing``: groups whose own chunk is on the device."""

    cache: ChunkCache
    standing: set[int]
    uses: list[list[int]]
    most_on_host: int = 0

    def moves(self) -> Iterator[Move]:
        stretches, packing = self.cache.course.stretches, self.cache.packing
        gathered: set[int] = set()
        for number, stretch in enumerate(stretches):
            needed = packing.groups_of(stretch.params)
            yield from self._make_room(number, set(needed), gathered)
            for group in needed:
                if group not in self.standing:
                    self.standing.add(group)
                    yield Move("fetch", group)
                if packing.ranks > 1 and group not in gathered:
                    gathered.add(group)
                    yield Move("gather", group)
            self.most_on_host = max(self.most_on_host, packing.num_groups - len(self.standing))
            yield Move("run", stretch=stretch)
            for group in [g for g in needed if g in gathered and self._is_last(g, number)]:
                gathered.discard(group)
                yield Move("reduce" if stretch.graph == "backward" else "release", group)
        yield from self._update()

    def _is_last(self, group: int, number: int) -> bool:
        stretches = self.cache.course.stretches
        later = [n for n in self.uses[group] if n > number]
        return not later or stretches[later[0]].graph != stretches[number].graph

    def _make_room(self, number: int, needed: set[int], gathered: set[int]) -> Iterator[Move]:
        cache, stretch = self.cache, self.cache.course.stretches[number]
        others = cache.packing.ranks - 1
        room = cache.room_nbytes(stretch) // cache.payload_nbytes
        busy = needed | gathered
        least = len(busy) + others * len(busy)
        if least > room:
            raise NoRoom(stretch.name, (least - room) * cache.payload_nbytes)
        while len(self.standing | busy) + others * len(busy) > room:
            victims = self.standing - busy
            victim = min(victims) if cache.by_list_order else max(victims, key=lambda g: (self._next(g, number), g))
            self.standing.discard(victim)
            yield Move("evict", victim)

    def _next(self, group: int, number: int) -> int:
        """The next stretch that uses the group, in this iteration or the next."""
        uses = self.uses[group]
        later = bisect_right(uses, number)
        if not uses:
            return 2 * len(self.cache.course.stretches)
        return uses[later] if later < len(uses) else uses[0] + len(self.cache.course.stretches)

    def _update(self) -> Iterator[Move]:
        """Activations are gone by then, so that a group whose states are on the device finds room there."""
        for group in range(self.cache.packing.num_groups):
            if group < self.cache.num_device_states:
                if group not in self.standing:
                    self.standing.add(group)
                    yield Move("fetch", group)
                yield Move("update_gpu", group)
                continue
            if group in self.standing:
                self.standing.discard(group)
                yield Move("evict", group)
            yield Move("update_cpu", group)
        self.most_on_host = max(self.most_on_host, self.cache.packing.num_groups - len(self.standing))
