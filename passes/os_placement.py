"""Pass ``os_placement``: where payloads and optimizer states live.

On the device where payloads, states and the non-model bytes of whole graphs fit together; then nothing moves at
all, and the arena is laid out here. Otherwise on the host, except for as many states as the options wish to stay on
the device, or as must because the host has no room for them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from chunkc.errors import BudgetError
from chunkc.ir.layout import ChunkList, Layout, Slot
from chunkc.ir.tiers import Tier
from chunkc.passes.support.arena import lead_slots, num_payload_slots, payload_slots, static_payloads
from chunkc.passes.support.budget import (
    choose_home,
    chunk_nbytes,
    demand_of,
    most_within,
    refuse,
    resident_states,
    sizes_of,
    whole_graph_nbytes,
    with_homes,
    with_residents,
)
from chunkc.passes.support.draft import Demand, Draft, Liveness, Target, decided
from chunkc.passes.support.resident_states import states_nbytes
from chunkc.passes.support.second_homes import with_second_homes


def most_resident_states(
    layout: Layout,
    demand: Demand,
    liveness: Liveness,
    target: Target,
    num_ranges: int | None = None,
    *,
    keeps_payloads: bool = False,
) -> int:
    """The device's margin in chunks' states beside activations and payloads (PatrickStar, section 8.2).

    Args:
        num_ranges: slot ranges to keep for payloads; default the fewest that work.
        keeps_payloads: whether the payload, and a gradient chunk, of the same chunk stays with them, beside these.
    """
    num_ranges = demand.min_ranges if num_ranges is None else num_ranges
    arena_nbytes = num_ranges * chunk_nbytes(layout) * layout.world_size
    margin_nbytes = target.budget_nbytes(Tier.DEVICE) - demand.peak_nbytes - arena_nbytes
    sizes_nbytes = states_nbytes(layout, liveness)
    if keeps_payloads:
        payload_nbytes = chunk_nbytes(layout) * lead_slots(layout)
        sizes_nbytes = tuple(nbytes + count * payload_nbytes for count, nbytes in enumerate(sizes_nbytes))
    return most_within(sizes_nbytes, margin_nbytes)


def resident_slots(layout: Layout) -> tuple[Slot, ...]:
    """Slot ``i`` for the payload of chunk ``i``, then one for the states of each chunk of this rank."""
    slots = list(payload_slots(layout, sum(1 for c in layout.chunks if c.list is not ChunkList.UNUSED)))
    offset = slots[-1].end if slots else 0
    for chunk in layout.owned():
        if chunk.has_resident_os:
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
        if home.is_fastest:
            slots = resident_slots(layout)
            layout = replace(layout, slots=slots, arena_nbytes=slots[-1].end if slots else 0)
        elif num_states := resident_states(sizes, draft.target, draft.options):
            layout, demand = with_residents(layout, demand, liveness, draft.target, draft.options, num_states)
            note += f", {sizes.states_nbytes[num_states] / 2**20:.2f} MiB ({num_states} chunks) of them on the device"
            staying = len(static_payloads(layout))
            note += f", {staying} payloads with them" if staying else ""
        if draft.options.num_second_homes and not home.is_fastest:
            share, num_homes = draft.options.streamed_share, draft.options.num_second_homes
            layout = with_second_homes(layout, liveness, draft.target, share, num_homes)
            nbytes = layout.second_home_nbytes(Tier.HOST)
            num_homes = sum(c.has_second_home for c in layout.owned())
            note += f", second homes of {num_homes} chunks ({nbytes / 2**20:.2f} MiB)"
        return replace(draft, layout=layout, demand=demand, os_home=home, note=note)


def _check_copies(draft: Draft, layout: Layout, peak_nbytes: int) -> None:
    """Refuse, by BudgetError, copies of saved values for which a fixed layout leaves no host memory."""
    needs = {Tier.DEVICE: layout.arena_nbytes + peak_nbytes, Tier.HOST: layout.nbytes_in(Tier.HOST)}
    missing_nbytes = needs[Tier.HOST] - draft.target.budget_nbytes(Tier.HOST)
    if not draft.moves or missing_nbytes <= 0:
        return
    copies_nbytes = draft.options.in_flight * sum(move.value.nbytes for move in draft.moves)
    least = draft.target.memory_nbytes(needs)
    raise BudgetError(
        f"another shape of {draft.target.model} moves {copies_nbytes} bytes of activations to host memory, "
        f"{missing_nbytes} more than the first shape has left there. Train the largest shape first, or use smaller "
        "ones, or activations='keep' or 'recompute'.",
        moment=str(Tier.HOST),
        tensors=(),
        missing_nbytes=missing_nbytes,
        min_device_nbytes=least[Tier.DEVICE],
        min_host_nbytes=least[Tier.HOST],
    )


def _keep(draft: Draft, layout: Layout, demand: Demand) -> Draft:
    """The homes of a fixed layout, after checking that its arena serves this schedule.

    Raises:
        BudgetError: when it does not.
    """
    resident = all(c.is_resident for c in layout.chunks if c.list is not ChunkList.UNUSED)
    liveness, target, cuts = decided(draft.liveness, "liveness"), draft.target, draft.options.cuts
    whole_nbytes, budget_nbytes = whole_graph_nbytes(liveness, cuts), target.budget_nbytes(Tier.DEVICE)
    margin_nbytes = budget_nbytes - layout.arena_nbytes
    home = Tier.DEVICE if resident and whole_nbytes <= margin_nbytes else Tier.HOST
    is_whole = resident and layout.world_size > 1  # of one rank, graphs that are cut need no slots either
    peak_nbytes = whole_nbytes if is_whole else demand.peak_nbytes
    enough = is_whole or demand.min_ranges * layout.world_size <= num_payload_slots(layout)
    if home.is_fastest or (enough and peak_nbytes <= margin_nbytes):
        _check_copies(draft, layout, peak_nbytes)
        return replace(draft, demand=demand, os_home=home, note=f"kept on the {home}")
    sizes = sizes_of(layout, demand, liveness, cuts)
    error = refuse(draft.schedule, target, draft.options, demand, sizes, layout.chunk_numel)
    least_nbytes = sizes.evicted[Tier.DEVICE] + layout.os_nbytes(Tier.DEVICE)
    need_nbytes = layout.arena_nbytes + peak_nbytes if enough else least_nbytes
    least = target.memory_nbytes({Tier.DEVICE: need_nbytes, Tier.HOST: layout.nbytes_in(Tier.HOST)})
    raise BudgetError(
        f"another shape of {target.model} does not fit beside the arena of {layout.arena_nbytes} bytes that its first "
        f"shape laid out: it needs {need_nbytes} bytes of device memory"
        + ("" if enough else f" and {demand.min_ranges * layout.world_size} payload slots")
        + f", {target.hw} gives {budget_nbytes}. Train the largest shape first, or use smaller ones.",
        moment=error.moment,
        tensors=error.tensors,
        missing_nbytes=max(0, need_nbytes - budget_nbytes),
        min_device_nbytes=least[Tier.DEVICE],
        min_host_nbytes=least[Tier.HOST],
    )
