"""Pass ``residency``: decide which chunk blocks are on the device in each step, and which leave.

The blocks that leave are chosen by Belady's rule (``belady.py``). Forward and backward are one static order of uses.
Clean blocks are dropped; those in which gradients landed are written back once, right after their last use. A plan with
everything resident has no residency intervals.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from chunkc.ir.layout import Layout
from chunkc.passes.support.arena import num_payload_slots
from chunkc.passes.support.belady import belady
from chunkc.passes.support.budget import available_ranges
from chunkc.passes.support.draft import Demand, Draft, ResidencyInterval, decided


def plan_intervals(layout: Layout, demand: Demand, num_ranges: int) -> tuple[ResidencyInterval, ...]:
    """The intervals of all blocks over both graphs in ``num_ranges`` slot ranges."""
    steps = [s.blocks for s in demand.steps]
    widths = demand.blocks.num_groups
    of_grad = demand.blocks.of_grad
    modified = [sorted({block for p in s.lands for block in of_grad[p]}) for s in demand.steps]
    weights, isolate_wide = _weights(layout, demand), layout.world_size > 1
    return belady(steps, modified, num_ranges, widths=widths, weights=weights, isolate_wide=isolate_wide)


def used_ranges(demand: Demand, intervals: Iterable[ResidencyInterval]) -> int:
    """Slot ranges that ``intervals`` use, and at least those that serve any shape of the layout."""
    widths = demand.blocks.num_groups
    return max(demand.min_ranges, *(i.slot_range + widths[i.block] for i in intervals), 0)


def block_chunks(layout: Layout, demand: Demand, block: int) -> range:
    """Indexes of the chunks of ``block``."""
    size = layout.world_size
    first = demand.blocks.first_group[block] * size
    return range(first, first + demand.blocks.num_groups[block] * size)


def landed_chunks(layout: Layout, demand: Demand, intervals: Iterable[ResidencyInterval]) -> list[tuple[int, ...]]:
    """Per interval: the chunks in which gradients landed while it lasted."""
    landings: dict[int, list[tuple[int, int]]] = {}
    grad_chunks = layout.grad_chunks()
    for index, step in enumerate(demand.steps):
        for param in step.lands:
            chunks = [grad_chunks.get(c, c) for c in layout.placements[param].chunks]
            for block in demand.blocks.of_grad[param]:
                members = block_chunks(layout, demand, block)
                landings.setdefault(block, []).extend((index, c) for c in chunks if c in members)
    return [
        tuple(sorted({c for at, c in landings.get(i.block, ()) if i.dirty and i.begin <= at <= i.end}))
        for i in intervals
    ]


def moved_nbytes(
    layout: Layout, demand: Demand, intervals: tuple[ResidencyInterval, ...], *, all_ranks: bool = False
) -> int:
    """Bytes that this rank (or all of them together) copies in both directions in one iteration."""
    total = 0
    for interval, landed in zip(intervals, landed_chunks(layout, demand, intervals), strict=True):
        for chunk in block_chunks(layout, demand, interval.block):
            if all_ranks or layout.owner(chunk) == layout.rank:
                total += layout.chunks[chunk].used_nbytes * (2 if chunk in landed else 1)
    return total


def _weights(layout: Layout, demand: Demand) -> list[int]:
    return [
        sum(layout.chunks[c].used_nbytes for c in block_chunks(layout, demand, block))
        for block in range(len(demand.blocks.first_group))
    ]


@dataclass(frozen=True, slots=True)
class ResidencyPass:
    """Decides ``residency``: the intervals, and the number of slot ranges."""

    name: str = "residency"
    requires: frozenset[str] = frozenset({"liveness", "mapping", "os_home", "states"})
    provides: frozenset[str] = frozenset({"residency"})
    conflicts: frozenset[str] = frozenset({"programs"})

    def __call__(self, draft: Draft) -> Draft:
        layout, demand = decided(draft.layout, "layout"), decided(draft.demand, "demand")
        if draft.is_resident:
            return replace(draft, intervals=(), note="everything resident")
        if draft.fixed_layout is not None:
            num_ranges = num_payload_slots(layout) // layout.world_size
        else:
            num_ranges = available_ranges(layout, demand, draft.target, draft.options)
        intervals = plan_intervals(layout, demand, num_ranges)
        moved = moved_nbytes(layout, demand, intervals)
        note = f"{num_ranges} places for {sum(demand.blocks.num_groups)} groups, {moved / 2**20:.2f} MiB moved"
        return replace(draft, intervals=intervals, note=note)
