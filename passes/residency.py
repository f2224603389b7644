"""Pass ``residency``: decide which units are on the device in each step, and which leave.

The units that leave are chosen by Belady's rule (``belady.py``). Forward and backward are one static order of uses.
Clean units are dropped; those in which gradients landed are written back once, right after their last use when the
optimizer runs on the host. A plan with everything resident has no stays.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from chunkc.ir.layout import Home, Layout
from chunkc.passes.support.arena import num_payload_slots
from chunkc.passes.support.belady import belady
from chunkc.passes.support.budget import available_places
from chunkc.passes.support.draft import Demand, Draft, ResidencyInterval, decided


def plan_stays(layout: Layout, demand: Demand, num_places: int) -> tuple[ResidencyInterval, ...]:
    """The stays of all units over both graphs in ``num_places`` places (at least ``demand.min_places``)."""
    steps = [s.units for s in demand.steps]
    widths = demand.units.num_groups
    of_grad = demand.units.of_grad
    dirties = [sorted({unit for p in s.lands for unit in of_grad[p]}) for s in demand.steps]
    weights, separate = _weights(layout, demand), layout.world_size > 1
    return belady(steps, dirties, num_places, widths=widths, weights=weights, separate=separate)


def unit_chunks(layout: Layout, demand: Demand, unit: int) -> range:
    """Indexes of the chunks of ``unit``."""
    size = layout.world_size
    first = demand.units.first_group[unit] * size
    return range(first, first + demand.units.num_groups[unit] * size)


def landed_chunks(layout: Layout, demand: Demand, stays: Iterable[ResidencyInterval]) -> list[tuple[int, ...]]:
    """Per stay: the chunks in which gradients landed while it lasted."""
    landings: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
    beside = layout.grad_chunks()
    for index, step in enumerate(demand.steps):
        for param in step.lands:
            chunks = [beside.get(c, c) for c in layout.placements[param].chunks]
            for unit in demand.units.of_grad[param]:
                own = unit_chunks(layout, demand, unit)
                landings.setdefault(unit, []).append((index, tuple(c for c in chunks if c in own)))
    result = []
    for stay in stays:
        found = landings.get(stay.unit, ()) if stay.dirty else ()
        result.append(tuple(sorted({c for at, chunks in found if stay.begin <= at <= stay.end for c in chunks})))
    return result


def moved_nbytes(
    layout: Layout, demand: Demand, stays: tuple[ResidencyInterval, ...], *, all_ranks: bool = False
) -> int:
    """Bytes that this rank (or all of them together) copies in both directions in one iteration."""
    total = 0
    for stay, landed in zip(stays, landed_chunks(layout, demand, stays), strict=True):
        for chunk in unit_chunks(layout, demand, stay.unit):
            if all_ranks or layout.owner(chunk) == layout.rank:
                total += layout.chunks[chunk].used_nbytes * (2 if chunk in landed else 1)
    return total


def _weights(layout: Layout, demand: Demand) -> list[int]:
    return [
        sum(layout.chunks[c].used_nbytes for c in unit_chunks(layout, demand, unit))
        for unit in range(len(demand.units.first_group))
    ]


@dataclass(frozen=True, slots=True)
class ResidencyPass:
    """Decides ``residency``: the stays, and the number of places."""

    name: str = "residency"
    requires: frozenset[str] = frozenset({"liveness", "mapping", "os_home", "states"})
    provides: frozenset[str] = frozenset({"residency"})
    conflicts: frozenset[str] = frozenset({"programs"})

    def __call__(self, draft: Draft) -> Draft:
        layout, demand = decided(draft.layout, "layout"), decided(draft.demand, "demand")
        if draft.os_home is Home.DEVICE:
            return replace(draft, stays=(), note="everything resident")
        if draft.fixed_layout is not None:
            places = num_payload_slots(layout) // layout.world_size
        else:
            places = available_places(layout, demand, draft.target, draft.options)
        stays = plan_stays(layout, demand, places)
        moved = moved_nbytes(layout, demand, stays)
        note = f"{places} places for {sum(demand.units.num_groups)} groups, {moved / 2**20:.2f} MiB moved"
        return replace(draft, stays=stays, note=note)
