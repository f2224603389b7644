"""Does a mapping fit, what would fit, and the message when nothing does.

Two ways to stand on the device. *Resident*: all payloads, all OS triples and the non-model bytes of whole graphs.
*Evicted*: an arena that holds what single operators need, beside the peak of non-model bytes of the base segments;
everything has a home on the host, except for OS triples that the caller wants on the device or that host memory does
not hold. The smallest arena is known exactly: budgets that a ``BudgetError`` names work, one byte less does not.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from chunkc.errors import BudgetError
from chunkc.ir.layout import ChunkList, Home, Layout
from chunkc.ir.plan import Plan, Segment
from chunkc.ir.schedule import DTYPE_NBYTES, SEGMENT_PREFIX, SavedValue, Schedule, commonest_dtype, largest_saved
from chunkc.passes.chunk_mapping import blocks_of
from chunkc.passes.segments import base_segments, segment_costs
from chunkc.passes.support.belady import min_ranges
from chunkc.passes.support.draft import BaseSegment, ChunkBlocks, Demand, Liveness, PlanOptions, Target
from chunkc.passes.support.triples import residence_order, triples_nbytes

Cuts = tuple[tuple[int, ...], tuple[int, ...]] | None


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes that one mapping takes, resident and evicted.

    ``num_ranges``: slot ranges that would hold every block at once. ``evicted_nbytes``: least device bytes, all homes
    on the host. ``triples_nbytes``: what the first k triples (none to all) that stay on the device move there.
    """

    range_nbytes: int
    num_ranges: int
    resident_nbytes: int
    evicted_nbytes: int
    resident_host_nbytes: int
    evicted_host_nbytes: int
    triples_nbytes: tuple[int, ...] = (0,)


def demand_of(layout: Layout, liveness: Liveness, cuts: Cuts) -> Demand:
    """Chunk blocks, base segments and the least arena of ``layout``."""
    blocks = blocks_of(layout)
    steps = base_segments(liveness, blocks, cuts, keep_open=layout.world_size > 1 and not liveness.has_grad_chunks)
    homes = [layout.chunks[first * layout.world_size].home for first in blocks.first_group]
    if layout.world_size == 1 and Home.DEVICE in homes:
        blocks, steps = _moving(blocks, steps, [block for block, home in enumerate(homes) if home is Home.HOST])
    least = min_ranges([s.blocks for s in steps], blocks.num_groups, isolate_wide=layout.world_size > 1)
    if layout.grad_chunks() and blocks.first_group:
        least = max(least, 2)  # an update on the device has gradients beside the payload
    return Demand(blocks, steps, least, max((s.nonmodel_nbytes for s in steps), default=0))


def _moving(
    blocks: ChunkBlocks, steps: Sequence[BaseSegment], kept: Sequence[int]
) -> tuple[ChunkBlocks, tuple[BaseSegment, ...]]:
    """Reduce ``blocks`` and ``steps`` to the blocks ``kept``, the only ones that ever move."""
    number = {block: new for new, block in enumerate(kept)}

    def left(members: Sequence[int]) -> tuple[int, ...]:
        return tuple(number[block] for block in members if block in number)

    moving = ChunkBlocks(
        tuple(blocks.first_group[block] for block in kept),
        tuple(blocks.num_groups[block] for block in kept),
        tuple(number.get(block, -1) for block in blocks.of_param),
        tuple(map(left, blocks.of_grad)),
    )
    return moving, tuple(replace(step, blocks=left(step.blocks)) for step in steps)


def whole_graph_nbytes(liveness: Liveness, cuts: Cuts) -> int:
    peak = 0
    for which, costs in enumerate(liveness.costs):
        starts = sorted({0, *(() if cuts is None else cuts[which])}) if costs.live else []
        peak = max(peak, *(live + work for live, work in segment_costs(costs, starts)), 0)
    return peak


def chunk_nbytes(layout: Layout) -> int:
    return layout.chunk_numel * DTYPE_NBYTES[commonest_dtype(layout.params)]


def with_homes(layout: Layout, home: Home) -> Layout:
    """``layout`` with its payloads and triples at ``home``; unused parameters always stay on the host."""
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
    groups = {layout.group_of(c).index for c in residence_order(layout, liveness)[:num]}
    chunks = (replace(c, os_home=Home.DEVICE) if layout.group_of(c.index).index in groups else c for c in layout.chunks)
    return replace(layout, chunks=tuple(chunks))


def with_residents(
    layout: Layout, demand: Demand, liveness: Liveness, target: Target, options: PlanOptions, num: int
) -> tuple[Layout, Demand]:
    """``layout`` and its demand with ``num`` triples on the device, their payloads too if wished."""
    layout = with_resident_triples(layout, liveness, num)
    if not options.keeps_payloads or layout.world_size > 1:
        return layout, demand
    kept = _with_resident_payloads(layout, demand)
    remaining = demand_of(kept, liveness, options.cuts)
    fits = remaining.min_ranges <= most_ranges(kept, remaining, target, options)
    return (kept, remaining) if fits else (layout, demand)


def _with_resident_payloads(layout: Layout, demand: Demand) -> Layout:
    """``layout`` with the payloads of resident triples on the device, if no larger tensor spans them."""
    widths = zip(demand.blocks.first_group, demand.blocks.num_groups, strict=True)
    movable = {first for first, num in widths if num == 1}
    grad_chunks = layout.grad_chunks()
    resident = [c.index for c in layout.chunks if c.os_home is Home.DEVICE]
    whole = {c for c in resident if {c, grad_chunks.get(c, c)} <= movable}
    whole |= {grad_chunks[c] for c in whole if c in grad_chunks}
    chunks = (replace(c, home=Home.DEVICE) if c.index in whole else c for c in layout.chunks)
    return replace(layout, chunks=tuple(chunks))


def sizes_of(layout: Layout, demand: Demand, liveness: Liveness, cuts: Cuts) -> Sizes:
    range_nbytes = chunk_nbytes(layout) * layout.world_size
    num_ranges = sum(demand.blocks.num_groups)
    os_nbytes = layout.os_nbytes()
    owned = layout.owned()
    unused_nbytes = sum(c.nbytes for c in owned if c.list is ChunkList.UNUSED)
    static_nbytes = sum(c.nbytes for c in owned if c.home is Home.DEVICE)
    return Sizes(
        range_nbytes=range_nbytes,
        num_ranges=num_ranges,
        resident_nbytes=num_ranges * range_nbytes + static_nbytes + os_nbytes + whole_graph_nbytes(liveness, cuts),
        evicted_nbytes=demand.peak_nbytes + demand.min_ranges * range_nbytes + static_nbytes,
        resident_host_nbytes=unused_nbytes,
        evicted_host_nbytes=sum(c.nbytes for c in owned) - static_nbytes + os_nbytes,
        triples_nbytes=triples_nbytes(layout, liveness),
    )


def resident_triples(sizes: Sizes, target: Target, options: PlanOptions) -> int | None:
    """How many triples stay on the device: as wished, or more to save host memory; None: never enough."""
    missing_nbytes = sizes.evicted_host_nbytes - target.host_budget_nbytes
    count = max(_wished(sizes, options), bisect_left(sizes.triples_nbytes, missing_nbytes))
    return count if count < len(sizes.triples_nbytes) else None


def most_within(sizes_nbytes: Sequence[int], margin_nbytes: int) -> int:
    """How many triples fit into ``margin_nbytes``, where the first k take ``sizes_nbytes[k]`` bytes."""
    return max(0, bisect_right(sizes_nbytes, margin_nbytes) - 1)


def _wished(sizes: Sizes, options: PlanOptions) -> int:
    return min(options.num_resident_triples, len(sizes.triples_nbytes) - 1)


def choose_home(sizes: Sizes, target: Target, options: PlanOptions) -> Home | None:
    """The home that ``options`` wish for or that moves least among those that fit; None where none fits."""
    slots = sizes.num_ranges * target.world_size
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


def most_ranges(layout: Layout, demand: Demand, target: Target, options: PlanOptions) -> int:
    """Slot ranges of the largest arena beside non-model bytes and what stays on the device."""
    static_nbytes = sum(layout.os_nbytes_of(c) for c in layout.owned() if c.os_home is Home.DEVICE)
    static_nbytes += sum(c.nbytes for c in layout.owned() if c.home is Home.DEVICE)
    margin_nbytes = target.device_budget_nbytes - demand.peak_nbytes - static_nbytes
    num_ranges = margin_nbytes // (chunk_nbytes(layout) * layout.world_size)
    return num_ranges if options.max_slots is None else min(num_ranges, options.max_slots // target.world_size)


def available_ranges(layout: Layout, demand: Demand, target: Target, options: PlanOptions) -> int:
    """As ``most_ranges``, but no more than all blocks at once would take."""
    return min(most_ranges(layout, demand, target, options), sum(demand.blocks.num_groups))


def needed_nbytes(sizes: Sizes, target: Target, options: PlanOptions) -> tuple[int, int]:
    """``(device, host)`` budgets with which the mapping works.

    Host memory misses where the device has room for the segments and the wishes, or the host none for the payloads:
    the least beside the device's, with as many triples there as fit. Else device memory: the least beside the host's.
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
        saved = _saved_text(schedule.saved_values(), max(demand.steps, key=lambda s: s.nonmodel_nbytes, default=None))
        text = _device_text(target, missing_nbytes)
    else:
        missing_nbytes = host_nbytes - target.host_budget_nbytes
        moment, params, saved = "host", tuple(range(len(schedule.params))), ""
        reason = "host memory must hold every payload and optimizer state that has no place on the device"
        text = f"{target.hw} gives {target.host_budget_nbytes} bytes of host memory, {missing_nbytes} too few"
    names = tuple(schedule.params[p].name for p in params)
    needs = (device_nbytes, host_nbytes)
    return _error(target, options, text, moment, names, reason, chunk_numel, missing_nbytes, needs, saved)


def too_small(plan: Plan, target: Target, options: PlanOptions) -> BudgetError:
    """The error for the plan that takes least device memory, and still more than ``target`` has."""
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
        _saved_text(plan.saved, worst),
    )


def _device_text(target: Target, missing_nbytes: int) -> str:
    return f"{target.hw} gives {target.device_budget_nbytes} bytes of device memory, {missing_nbytes} too few"


def _saved_text(values: Sequence[SavedValue], segment: BaseSegment | Segment | None) -> str:
    """The user's lines whose saved activations are largest while ``segment`` runs; empty where none are."""
    if segment is None:
        return ""
    largest = largest_saved(values, segment.graph, segment.first_op, segment.end_op)
    listed = ", ".join(f"{nbytes} bytes at {line}" for line, _, nbytes in largest)
    return f"; the largest values that backward reads are {listed}" if listed else ""


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
    saved: str,
) -> BudgetError:
    device_nbytes, host_nbytes = target.device_memory_nbytes(needs[0]), target.host_memory_nbytes(needs[1])
    more = (device_nbytes - needs[0], host_nbytes - needs[1])
    reserved, kept = (f" ({nbytes} of them reserved)" if nbytes else "" for nbytes in more)
    message = (
        f"{target.model} cannot be trained: {text}. At {moment}: {reason} ({_listed(names)}), in chunks of "
        f"{chunk_numel} elements{saved}. It works with {device_nbytes} bytes of device memory{reserved} and "
        f"{host_nbytes} bytes of host memory{kept}; or use a smaller batch, shorter sequences"
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
    widths = demand.blocks.num_groups

    def need(index: int) -> int:
        step = demand.steps[index]
        return step.nonmodel_nbytes + sum(widths[b] for b in step.blocks) * sizes.range_nbytes

    if not demand.steps:
        return "fwd.0", (), "all parameters must be resident"
    worst = max(range(len(demand.steps)), key=need)
    step = demand.steps[worst]
    number = worst - next(i for i, s in enumerate(demand.steps) if s.graph == step.graph)
    moment = f"{SEGMENT_PREFIX[step.graph]}.{number}"
    if options.os_home == "device":
        params = tuple(p for p, block in enumerate(demand.blocks.of_param) if block >= 0)
        return moment, params, f"all payloads and optimizer states, and {step.nonmodel_nbytes} bytes of activations"
    landings = zip(demand.blocks.of_param, demand.blocks.of_grad, strict=True)
    params = tuple(p for p, (block, of_grad) in enumerate(landings) if not {block, *of_grad}.isdisjoint(step.blocks))
    states = f", optimizer states that stay on the device {triples_nbytes}" if triples_nbytes else ""
    reason = (
        f"the arena takes {demand.min_ranges * sizes.range_nbytes} bytes{states} and activations up to "
        f"{demand.peak_nbytes} bytes; resident together must be the chunks with"
    )
    return moment, params, reason


def _listed(names: Sequence[str], limit: int = 6) -> str:
    shown = ", ".join(names[:limit])
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")
