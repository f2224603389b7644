"""PatrickStar's chunks: parameters in the order of initialisation, one module's kept together.

As in section 6.1.1 of its paper, a chunk that cannot take all parameters of a module is closed. All chunks are of the
size that wastes least; they are dealt out to ranks in turn, and their number is rounded up.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from chunkc.baselines.stretches import Course

STEP = 32 * 2**20
SIZES = tuple(range(4 * STEP, 17 * STEP, STEP))
"""Elements of a chunk, as the authors search them: 128 Mi to 512 Mi (section 8.1)."""


@dataclass(frozen=True, slots=True)
class Packing:
    """A mapping of parameters to chunks; chunk ``i`` belongs to rank ``i % ranks`` of a group.

    ``used``: elements in use of each chunk; none in those that fill up the last group.
    """

    chunk_numel: int
    chunk_of: tuple[int, ...]
    used: tuple[int, ...]
    ranks: int = 1

    @property
    def num_groups(self) -> int:
        """Groups: chunks of one rank."""
        return len(self.used) // self.ranks

    @property
    def utilisation(self) -> float:
        """Share of elements in use, of chunks that hold any."""
        held = [n for n in self.used if n]
        return sum(held) / (len(held) * self.chunk_numel) if held else 1.0

    def groups_of(self, params: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self.chunk_of[p] // self.ranks for p in params))

    def used_by_most(self, group: int) -> int:
        """Elements in use of the fullest chunk of a group: what its slowest rank updates."""
        return max(self.used[group * self.ranks : (group + 1) * self.ranks])


def pack(course: Course, chunk_numel: int, ranks: int = 1) -> Packing | None:
    """The packing in chunks of ``chunk_numel`` elements; None where a module is larger than that."""
    used: list[int] = [0]
    chunk_of: list[int] = []
    for numels in _modules(course):
        if sum(numels) > chunk_numel:
            return None
        if used[-1] + sum(numels) > chunk_numel:
            used.append(0)
        used[-1] += sum(numels)
        chunk_of += [len(used) - 1] * len(numels)
    used += [0] * (-len(used) % ranks)
    return Packing(chunk_numel, tuple(chunk_of), tuple(used), ranks)


def packings(course: Course, sizes: tuple[int, ...], ranks: int) -> list[Packing]:
    """Packings that are possible, the least wasteful first, the smaller chunk among equals.

    Rank padding counts as waste. Where a module is larger than all sizes, as many are tried from that module on.
    """
    largest = max((sum(numels) for numels in _modules(course)), default=0)
    if largest > max(sizes):
        first = -(-largest // STEP) * STEP
        sizes = tuple(first + number * STEP for number in range(len(sizes)))
    possible = [p for size in sizes if (p := pack(course, size, ranks)) is not None]
    return sorted(possible, key=lambda p: (len(p.used) * p.chunk_numel, p.chunk_numel))


def _modules(course: Course) -> list[list[int]]:
    """Elements of the parameters of each module, in order."""
    members = groupby(course.schedule.params, key=lambda info: info.name.rpartition(".")[0])
    return [[info.numel for info in infos] for _, infos in members]
