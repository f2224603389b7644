"""Pass ``os_placement``: where payloads and optimizer states live.

On the device where payloads, OS triples and the non-model bytes of whole graphs fit together; then nothing moves at
all, and the arena is laid out here. Otherwise on the host, except for as many triples as the options wish to stay on
the device, or as must because the host has no room for them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from chunkc.errors import BudgetError
from chunkc.ir.layout import ChunkList, Home, Layout, Slot
from chunkc.passes.support.arena import lead_slots, num_payload_slots, payload_slots, static_payloads
from chunkc.passes.support.budget import (
    choose_home,
    chunk_nbytes,
    demand_of,
    most_within,
    refuse,
    resident_triples,
    sizes_of,
    whole_graph_nbytes,
    with_homes,
    with_residents,
)
from chunkc.passes.support.draft import Demand, Draft, Liveness, Target, decided
from chunkc.passes.support.triples import triples_nbytes


def most_resident_triples(
    layout: Layout,
    demand: Demand,
    liveness: Liveness,
    target: Target,
    num_ranges: int | None = None,
    *,
    keeps_payloads: bool = False,
) -> int:
    """The device's margin in OS triples beside activations and payloads (PatrickStar, section 8.2).

    Args:
        num_ranges: slot ranges to keep for payloads; default the fewest that work.
        keeps_payloads: whether the payload, and a gradient chunk, of each triple stays with it, beside these.
    """
    num_ranges = demand.min_ranges if num_ranges is None else num_ranges
    arena_nbytes = num_ranges * chunk_nbytes(layout) * layout.world_size
    margin_nbytes = target.device_budget_nbytes - demand.peak_nbytes - arena_nbytes
    sizes_nbytes = triples_nbytes(layout, liveness)
    if keeps_payloads:
        payload_nbytes = chunk_nbytes(layout) * lead_slots(layout)
        sizes_nbytes = tuple(nbytes + count * payload_nbytes for count, nbytes in enumerate(sizes_nbytes))
    return most_within(sizes_nbytes, margin_nbytes)


def resident_slots(layout: Layout) -> tuple[Slot, ...]:
    """Slot ``i`` for the payload of chunk ``i``, then one slot for each OS triple that this rank owns."""
    slots = list(payload_slots(layout, sum(1 for c in layout.chunks if c.list is not ChunkList.UNUSED)))
    offset = slots[-1].end if slots else 0
    for chunk in layout.owned():
        if chunk.os_home is Home.DEVICE:
            slots.append(Slot(len(slots), offset, layout.os_nbytes_of(chunk)))
            offset = slots[-1].end
    return tuple(slots)


@dataclass(frozen=True, slots=True)
class OsPlacementPass:
    """Decides ``os_home`` and the homes of all chunks."""

    name: str = "os_placement"
    requires: frozenset[str] = frozenset({"liveness", "mapping"})
    provides: frozenset[str] = frozenset({"os_home"})
    conflicts: frozenset[str] = frozenset({"residency"})

    def __call__(self, draft: Draft) -> Draft:
        liveness, layout = decided(draft.liveness, "liveness"), decided(draft.layout, "layout")
        demand = demand_of(layout, liveness, draft.options.cuts)
        if draft.fixed_layout is not None:
            return _keep(draft, layout, demand)
        sizes = sizes_of(layout, demand, liveness, draft.options.cuts)
        home = choose_home(sizes, draft.target, draft.options)
        if home is None:
            raise refuse(draft.schedule, draft.target, draft.options, demand, sizes, layout.chunk_numel)
        layout = with_homes(layout, home)
        note = f"optimizer states on the {home}, {layout.os_nbytes() / 2**20:.2f} MiB"
        if home is Home.DEVICE:
            slots = resident_slots(layout)
            layout = replace(layout, slots=slots, arena_nbytes=slots[-1].end if slots else 0)
        elif triples := resident_triples(sizes, draft.target, draft.options):
            layout, demand = with_residents(layout, demand, liveness, draft.target, draft.options, triples)
            note += f", {sizes.triples_nbytes[triples] / 2**20:.2f} MiB ({triples} chunks) of them on the device"
            staying = len(static_payloads(layout))
            note += f", {staying} payloads with them" if staying else ""
        return replace(draft, layout=layout, demand=demand, os_home=home, note=note)


def _keep(draft: Draft, layout: Layout, demand: Demand) -> Draft:
    """The homes of a fixed layout, after checking that its arena serves this schedule.

    Raises:
        BudgetError: when it does not.
    """
    resident = all(c.home is Home.DEVICE for c in layout.chunks if c.list is not ChunkList.UNUSED)
    liveness, target, cuts = decided(draft.liveness, "liveness"), draft.target, draft.options.cuts
    whole_nbytes, margin_nbytes = whole_graph_nbytes(liveness, cuts), target.device_budget_nbytes - layout.arena_nbytes
    if resident and whole_nbytes <= margin_nbytes:
        return replace(draft, demand=demand, os_home=Home.DEVICE, note=f"kept on the {Home.DEVICE}")
    is_whole = resident and layout.world_size > 1  # of one rank, graphs that are cut need no slots either
    peak_nbytes = whole_nbytes if is_whole else demand.peak_nbytes
    enough = is_whole or demand.min_ranges * layout.world_size <= num_payload_slots(layout)
    if enough and peak_nbytes <= margin_nbytes:
        return replace(draft, demand=demand, os_home=Home.HOST, note=f"kept on the {Home.HOST}")
    sizes = sizes_of(layout, demand, liveness, cuts)
    error = refuse(draft.schedule, target, draft.options, demand, sizes, layout.chunk_numel)
    staying_nbytes = sum(layout.os_nbytes_of(c) for c in layout.owned() if c.os_home is Home.DEVICE)
    need_nbytes = layout.arena_nbytes + peak_nbytes if enough else sizes.evicted_nbytes + staying_nbytes
    raise BudgetError(
        f"another shape of {target.model} does not fit beside the arena of {layout.arena_nbytes} bytes that its first "
        f"shape laid out: it needs {need_nbytes} bytes of device memory"
        + ("" if enough else f" and {demand.min_ranges * layout.world_size} payload slots")
        + f", {target.hw} gives {target.device_budget_nbytes}. Train the largest shape first, or use smaller ones.",
        moment=error.moment,
        tensors=error.tensors,
        missing_nbytes=max(0, need_nbytes - target.device_budget_nbytes),
        min_device_nbytes=target.device_memory_nbytes(need_nbytes),
        min_host_nbytes=target.host_memory_nbytes(layout.host_nbytes()),
    )
