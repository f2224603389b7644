"""Does a mapping fit, what would fit, and the message when nothing does.

Two ways to stand on the device. *Resident*: all payloads, all OS triples and the non-model bytes of whole graphs (also
over several ranks, whose plans cut graphs and take less).
*Evicted*: an arena of places that holds what single operators need, beside the peak of non-model bytes of the base
segments; everything has a home on the host, except for OS triples that the caller wants on the device or that host
memory does not hold. The smallest arena that works is known exactly, so the budgets that a ``BudgetError`` names really
work, and one byte less does not.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from chunkc.errors import BudgetError
from chunkc.ir.layout import ChunkList, Home, Layout
from chunkc.ir.plan import Plan
from chunkc.ir.schedule import DTYPE_NBYTES, SEGMENT_PREFIX, Schedule
from chunkc.passes.chunk_mapping import commonest_dtype, units_of
from chunkc.passes.segments import base_segments, segment_costs
from chunkc.passes.support.belady import min_places
from chunkc.passes.support.draft import BaseSegment, Demand, Liveness, PlanOptions, Target, Units
from chunkc.passes.support.triples import residence_order, triples_nbytes

Cuts = tuple[tuple[int, ...], tuple[int, ...]] | None


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes that one mapping takes.

    Attributes:
        place_nbytes: of one place (``world_size`` slots).
        num_places: places that would hold every unit at once.
        resident_nbytes: device bytes with everything resident.
        evicted_nbytes: least device bytes with all homes on the host.
        resident_host_nbytes, evicted_host_nbytes: host bytes of homes in both cases.
        triples_nbytes: what the first k triples that stay on the device move there from the host, for k from 0 to all.
    """

    place_nbytes: int
    num_places: int
    resident_nbytes: int
    evicted_nbytes: int
    resident_host_nbytes: int
    evicted_host_nbytes: int
    triples_nbytes: tuple[int, ...] = (0,)


def demand_of(layout: Layout, liveness: Liveness, cuts: Cuts) -> Demand:
    """Units, base segments and the least arena of ``layout``."""
    units = units_of(layout)
    steps = base_segments(liveness, units, cuts, keep_open=layout.world_size > 1 and not liveness.beside)
    homes = [layout.chunks[first * layout.world_size].home for first in units.first_group]
    if layout.world_size == 1 and Home.DEVICE in homes:
        units, steps = _moving(units, steps, [unit for unit, home in enumerate(homes) if home is Home.HOST])
    least = min_places([s.units for s in steps], units.num_groups, separate=layout.world_size > 1)
    if layout.grad_chunks() and units.first_group:
        least = max(least, 2)  # an update on the device has gradients beside the payload
    return Demand(units, steps, least, max((s.nonmodel_nbytes for s in steps), default=0))


def _moving(units: Units, steps: Sequence[BaseSegment], kept: Sequence[int]) -> tuple[Units, tuple[BaseSegment, ...]]:
    """Reduce ``units`` and ``steps`` to the units ``kept``, the only ones that ever move."""
    number = {unit: new for new, unit in enumerate(kept)}

    def left(found: Sequence[int]) -> tuple[int, ...]:
        return tuple(number[unit] for unit in found if unit in number)

    moving = Units(
        tuple(units.first_group[unit] for unit in kept),
        tuple(units.num_groups[unit] for unit in kept),
        tuple(number.get(unit, -1) for unit in units.of_param),
        tuple(map(left, units.of_grad)),
    )
    return moving, tuple(replace(step, units=left(step.units)) for step in steps)


def whole_graph_nbytes(liveness: Liveness, cuts: Cuts) -> int:
    """Peak non-model bytes when segments start at ``cuts`` only."""
    peak = 0
    for which, costs in enumerate(liveness.costs):
        starts = sorted({0, *(() if cuts is None else cuts[which])}) if costs.live else []
        peak = max(peak, *(live + work for live, work in segment_costs(costs, starts)), 0)
    return peak


def chunk_nbytes(layout: Layout) -> int:
    """Bytes of every chunk and payload slot of ``layout``."""
    return layout.chunk_numel * DTYPE_NBYTES[commonest_dtype(layout.params)]


def with_homes(layout: Layout, home: Home) -> Layout:
    """Set the homes of payloads and triples of ``layout`` to ``home``.

    Unused parameters always stay on the host.
    """
    chunks = tuple(
        replace(
            c,
            home=Home.HOST if c.list is ChunkList.UNUSED else home,
            os_home=home if c.list is ChunkList.TRAINED else None,
        )
        for c in layout.chunks
    )
    return replace(layout, chunks=chunks)


def with_resident_triples(layout: Layout, liveness: Liveness, num: int) -> Layout:
    """Place ``num`` of this rank's triples of ``layout`` on the device.

    Triples of the same groups on other ranks are placed there too.
    """
    groups = {layout.group_of(c).index for c in residence_order(layout, liveness)[:num]}
    chunks = (replace(c, os_home=Home.DEVICE) if layout.group_of(c.index).index in groups else c for c in layout.chunks)
    return replace(layout, chunks=tuple(chunks))


def with_residents(
    layout: Layout, demand: Demand, liveness: Liveness, target: Target, options: PlanOptions, num: int
) -> tuple[Layout, Demand]:
    """Place ``num`` triples of ``layout`` on the device, and return what then asks for places.

    Their payloads stay there too as ``options`` wish and room allows.
    """
    layout = with_resident_triples(layout, liveness, num)
    if not options.keeps_payloads or layout.world_size > 1:
        return layout, demand
    kept = _with_resident_payloads(layout, demand)
    remaining = demand_of(kept, liveness, options.cuts)
    fits = remaining.min_places <= most_places(kept, remaining, target, options)
    return (kept, remaining) if fits else (layout, demand)


def _with_resident_payloads(layout: Layout, demand: Demand) -> Layout:
    """One rank's ``layout`` with the payloads, and the gradient chunks, of resident triples on the device.

    What a tensor larger than a chunk spans stays adjacent, and so on the host.
    """
    widths = zip(demand.units.first_group, demand.units.num_groups, strict=True)
    movable = {first for first, num in widths if num == 1}
    beside = layout.grad_chunks()
    found = [c.index for c in layout.chunks if c.os_home is Home.DEVICE]
    whole = {c for c in found if {c, beside.get(c, c)} <= movable}
    whole |= {beside[c] for c in whole if c in beside}
    chunks = (replace(c, home=Home.DEVICE) if c.index in whole else c for c in layout.chunks)
    return replace(layout, chunks=tuple(chunks))


def sizes_of(layout: Layout, demand: Demand, liveness: Liveness, cuts: Cuts) -> Sizes:
    """Bytes that ``layout`` takes, resident and evicted."""
    place_nbytes = chunk_nbytes(layout) * layout.world_size
    num_places = sum(demand.units.num_groups)
    os_nbytes = layout.os_nbytes()
    owned = layout.owned()
    unused_nbytes = sum(c.nbytes for c in owned if c.list is ChunkList.UNUSED)
    static_nbytes = sum(c.nbytes for c in owned if c.home is Home.DEVICE)
    return Sizes(
        place_nbytes=place_nbytes,
        num_places=num_places,
        resident_nbytes=num_places * place_nbytes + static_nbytes + os_nbytes + whole_graph_nbytes(liveness, cuts),
        evicted_nbytes=demand.peak_nbytes + demand.min_places * place_nbytes + static_nbytes,
        resident_host_nbytes=unused_nbytes,
        evicted_host_nbytes=sum(c.nbytes for c in owned) - static_nbytes + os_nbytes,
        triples_nbytes=triples_nbytes(layout, liveness),
    )


def resident_triples(sizes: Sizes, target: Target, options: PlanOptions) -> int | None:
    """Return how many triples stand on the device when payloads are at home on the host.

    The number is the one that ``options`` wish, or the least that leaves the host enough room, whichever is larger. The
    result is None where no number leaves the host enough room.
    """
    missing_nbytes = sizes.evicted_host_nbytes - target.host_budget_nbytes
    found = max(_wished(sizes, options), bisect_left(sizes.triples_nbytes, missing_nbytes))
    return found if found < len(sizes.triples_nbytes) else None


def most_within(sizes_nbytes: Sequence[int], margin_nbytes: int) -> int:
    """Return how many triples fit into ``margin_nbytes``; 0 for a negative margin.

    ``sizes_nbytes``: the bytes of the first k triples.
    """
    return max(0, bisect_right(sizes_nbytes, margin_nbytes) - 1)


def _wished(sizes: Sizes, options: PlanOptions) -> int:
    return min(options.num_resident_triples, len(sizes.triples_nbytes) - 1)


def choose_home(sizes: Sizes, target: Target, options: PlanOptions) -> Home | None:
    """The home that ``options`` wish for or that moves least among those that fit; None where none fits."""
    slots = sizes.num_places * target.world_size
    unlimited = options.max_slots is None or options.max_slots >= slots
    fits = sizes.resident_nbytes <= target.device_budget_nbytes
    fits = fits and sizes.resident_host_nbytes <= target.host_budget_nbytes
    if options.os_home != "host" and unlimited and fits:
        return Home.DEVICE
    if options.os_home == "device":
        return None
    triples = resident_triples(sizes, target, options)
    if triples is None:
        return None
    return Home.HOST if sizes.evicted_nbytes + sizes.triples_nbytes[triples] <= target.device_budget_nbytes else None


def most_places(layout: Layout, demand: Demand, target: Target, options: PlanOptions) -> int:
    """Return the number of places of the largest arena that the budget allows.

    The arena stands beside the peak of non-model bytes and resident triples.
    """
    static_nbytes = sum(layout.os_nbytes_of(c) for c in layout.owned() if c.os_home is Home.DEVICE)
    static_nbytes += sum(c.nbytes for c in layout.owned() if c.home is Home.DEVICE)
    margin_nbytes = target.device_budget_nbytes - demand.peak_nbytes - static_nbytes
    places = margin_nbytes // (chunk_nbytes(layout) * layout.world_size)
    return places if options.max_slots is None else min(places, options.max_slots // target.world_size)


def available_places(layout: Layout, demand: Demand, target: Target, options: PlanOptions) -> int:
    """As ``most_places``, but no more than every unit at once would take."""
    return min(most_places(layout, demand, target, options), sum(demand.units.num_groups))


def needed_nbytes(sizes: Sizes, target: Target, options: PlanOptions) -> tuple[int, int]:
    """``(device, host)`` budgets with which the mapping works.

    Where the device has room for the segments and what ``options`` wish there, host memory is what misses: the least
    with which the device's is enough, as many triples as fit standing there. Else, and unless host memory does not even
    hold the payloads, device memory misses: the least with which the host's is enough.
    """
    if options.os_home == "device":
        return sizes.resident_nbytes, sizes.resident_host_nbytes
    triples, wished = resident_triples(sizes, target, options), _wished(sizes, options)
    margin_nbytes = target.device_budget_nbytes - sizes.evicted_nbytes
    if triples is None or sizes.triples_nbytes[wished] <= margin_nbytes < sizes.triples_nbytes[triples]:
        triples = max(wished, most_within(sizes.triples_nbytes, margin_nbytes))
    moved_nbytes = sizes.triples_nbytes[triples]
    return sizes.evicted_nbytes + moved_nbytes, sizes.evicted_host_nbytes - moved_nbytes


def refuse(
    schedule: Schedule, target: Target, options: PlanOptions, demand: Demand, sizes: Sizes, chunk_numel: int
) -> BudgetError:
    """The error for a mapping that does not fit: device memory first, then host memory."""
    device_nbytes, host_nbytes = needed_nbytes(sizes, target, options)
    if device_nbytes > target.device_budget_nbytes:
        missing_nbytes = device_nbytes - target.device_budget_nbytes
        moment, params, reason = _device_moment(demand, sizes, options, sizes.evicted_host_nbytes - host_nbytes)
        text = _device_text(target, missing_nbytes)
    else:
        missing_nbytes = host_nbytes - target.host_budget_nbytes
        moment, params = "host", tuple(range(len(schedule.params)))
        reason = "host memory must hold every payload and optimizer state that has no place on the device"
        text = f"{target.hw} gives {target.host_budget_nbytes} bytes of host memory, {missing_nbytes} too few"
    names = tuple(schedule.params[p].name for p in params)
    needs = (device_nbytes, host_nbytes)
    return _error(target, options, text, moment, names, reason, chunk_numel, missing_nbytes, needs)


def too_small(plan: Plan, target: Target, options: PlanOptions) -> BudgetError:
    """Make the error for a plan that takes more device memory than ``target`` has.

    Other plans that are known take more.
    """
    memory, layout = plan.memory, plan.layout
    missing_nbytes = memory.device_peak_nbytes - target.device_budget_nbytes
    worst = plan.segment(memory.nonmodel_segment)
    resident = options.os_home == "device"
    params = range(len(layout.params)) if resident else sorted({*worst.reads, *worst.lands})
    return _error(
        target,
        options,
        _device_text(target, missing_nbytes),
        worst.name,
        tuple(layout.params[p].name for p in params),
        f"the arena takes {memory.arena_nbytes} bytes and activations, as compiled, up to {memory.nonmodel_nbytes} "
        "bytes; resident together must be the chunks with",
        layout.chunk_numel,
        missing_nbytes,
        (memory.device_peak_nbytes, memory.host_nbytes),
    )


def _device_text(target: Target, missing_nbytes: int) -> str:
    return f"{target.hw} gives {target.device_budget_nbytes} bytes of device memory, {missing_nbytes} too few"


def _error(
    target: Target,
    options: PlanOptions,
    text: str,
    moment: str,
    names: tuple[str, ...],
    reason: str,
    chunk_numel: int,
    missing_nbytes: int,
    needs: tuple[int, int],
) -> BudgetError:
    device_nbytes, host_nbytes = target.device_memory_nbytes(needs[0]), target.host_memory_nbytes(needs[1])
    more = (device_nbytes - needs[0], host_nbytes - needs[1])
    reserved, kept = (f" ({nbytes} of them reserved)" if nbytes else "" for nbytes in more)
    message = (
        f"{target.model} cannot be trained: {text}. At {moment}: {reason} ({_listed(names)}), in chunks of "
        f"{chunk_numel} elements. It works with {device_nbytes} bytes of device memory{reserved} and {host_nbytes} "
        f"bytes of host memory{kept}; or use a smaller batch, shorter sequences"
        + (", or optimizer states on the host" if options.os_home == "device" else "")
        + (", or another chunk_size" if options.chunk_numel is not None else "")
        + "."
    )
    return BudgetError(
        message,
        moment=moment,
        tensors=names,
        missing_nbytes=missing_nbytes,
        min_device_nbytes=device_nbytes,
        min_host_nbytes=host_nbytes,
    )


def _device_moment(
    demand: Demand, sizes: Sizes, options: PlanOptions, triples_nbytes: int
) -> tuple[str, tuple[int, ...], str]:
    """``(segment name, parameters, reason)`` of the segment that needs most device memory."""
    widths = demand.units.num_groups

    def need(index: int) -> int:
        step = demand.steps[index]
        return step.nonmodel_nbytes + sum(widths[u] for u in step.units) * sizes.place_nbytes

    if not demand.steps:
        return "fwd.0", (), "all parameters must be resident"
    worst = max(range(len(demand.steps)), key=need)
    step = demand.steps[worst]
    number = worst - next(i for i, s in enumerate(demand.steps) if s.graph == step.graph)
    moment = f"{SEGMENT_PREFIX[step.graph]}.{number}"
    if options.os_home == "device":
        params = tuple(p for p, u in enumerate(demand.units.of_param) if u >= 0)
        return moment, params, f"all payloads and optimizer states, and {step.nonmodel_nbytes} bytes of activations"
    units = zip(demand.units.of_param, demand.units.of_grad, strict=True)
    params = tuple(p for p, (own, of_grad) in enumerate(units) if not {own, *of_grad}.isdisjoint(step.units))
    states = f", optimizer states that stay on the device {triples_nbytes}" if triples_nbytes else ""
    reason = (
        f"the arena takes {demand.min_places * sizes.place_nbytes} bytes{states} and activations up to "
        f"{demand.peak_nbytes} bytes; resident together must be the chunks with"
    )
    return moment, params, reason


def _listed(names: Sequence[str], limit: int = 6) -> str:
    shown = ", ".join(names[:limit])
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")
