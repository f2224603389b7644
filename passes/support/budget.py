"""Does a mapping fit, what would fit, and the message when nothing does.

Two ways to stand on the device. *Resident*: all payloads, all optimizer states and the non-model bytes of whole graphs.
*Evicted*: an arena that holds what single operators need, beside the peak of non-model bytes of the base segments;
everything has a home on the host, except for states that the caller wants on the device or that host memory does
not hold. The smallest arena is known exactly: budgets that a ``BudgetError`` names work, one byte less does not.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from chunkc.errors import BudgetError
from chunkc.ir.layout import ChunkList, Layout
from chunkc.ir.plan import Plan, Segment
from chunkc.ir.schedule import DTYPE_NBYTES, SEGMENT_PREFIX, SavedValue, Schedule, commonest_dtype, largest_saved
from chunkc.ir.tiers import SLOWER_TIERS, Tier
from chunkc.passes.chunk_mapping import blocks_of
from chunkc.passes.segments import Cuts, base_segments, block_needs, segment_costs
from chunkc.passes.support.belady import min_ranges
from chunkc.passes.support.draft import (
    BaseSegment,
    BlockNeeds,
    ChunkBlocks,
    Demand,
    Liveness,
    Packing,
    PlanOptions,
    Target,
)
from chunkc.passes.support.resident_states import residence_order, states_nbytes


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes that one mapping takes of each tier, resident and evicted.

    ``num_ranges``: slot ranges that would hold every block at once. ``evicted``: all homes on the host, the least of
    the device. ``states_nbytes``: what the states of the first k chunks (none to all) move when they stay
    on the device.
    """

    range_nbytes: int
    num_ranges: int
    resident: Mapping[Tier, int]
    evicted: Mapping[Tier, int]
    states_nbytes: tuple[int, ...]

    def evicted_but(self, num_states: int) -> dict[Tier, int]:
        """As ``evicted``, where the states of so many chunks stay on the device."""
        moved = {Tier.DEVICE: self.states_nbytes[num_states], Tier.HOST: -self.states_nbytes[num_states]}
        return {tier: nbytes + moved[tier] for tier, nbytes in self.evicted.items()}


def demand_of(layout: Layout, liveness: Liveness, cuts: Cuts, packing: Packing | None = None) -> Demand:
    """Chunk blocks, base segments and the least arena of ``layout``.

    ``packing``: of ``layout`` without homes, where it is known.
    """
    blocks = blocks_of(layout) if packing is None else packing.packed.blocks
    needs = needs_of(layout, liveness, blocks) if packing is None else packing.needs
    steps = base_segments(liveness, needs, cuts)
    resident = [layout.chunks[first * layout.world_size].is_resident for first in blocks.first_group]
    if layout.world_size == 1 and any(resident):
        blocks, steps = _moving(blocks, steps, [block for block, stays in enumerate(resident) if not stays])
    least = min_ranges([s.blocks for s in steps], blocks.num_groups, isolate_wide=layout.world_size > 1)
    if any(layout.chunks[first * layout.world_size].list is ChunkList.GRAD for first in blocks.first_group):
        least = max(least, 2)  # an update on the device has gradients beside the payload
    return Demand(blocks, steps, least, max((s.nonmodel_nbytes for s in steps), default=0))


def needs_of(layout: Layout, liveness: Liveness, blocks: ChunkBlocks) -> BlockNeeds:
    """The chunk blocks that operators need, of the ``blocks`` of ``layout``."""
    keeps_open = layout.world_size > 1 and not liveness.has_grad_chunks
    return block_needs(liveness, blocks, keeps_open)


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


def with_homes(layout: Layout, home: Tier) -> Layout:
    """``layout`` with its payloads and states at ``home``; unused parameters always stay on the host."""
    chunks = []
    for chunk in layout.chunks:
        own = Tier.HOST if chunk.list is ChunkList.UNUSED else home
        os_home = home if chunk.list is ChunkList.TRAINED else None
        is_there = chunk.home is own and chunk.os_home is os_home
        chunks.append(chunk if is_there else replace(chunk, home=own, os_home=os_home))
    return replace(layout, chunks=tuple(chunks))


def with_resident_states(layout: Layout, liveness: Liveness, num: int) -> Layout:
    groups = {layout.group_of(c).index for c in residence_order(layout, liveness)[:num]}
    chunks = (replace(c, os_home=Tier.DEVICE) if layout.group_of(c.index).index in groups else c for c in layout.chunks)
    return replace(layout, chunks=tuple(chunks))


def with_residents(
    layout: Layout, demand: Demand, liveness: Liveness, target: Target, options: PlanOptions, num: int
) -> tuple[Layout, Demand]:
    """``layout`` and its demand with ``num`` chunks' states on the device, their payloads too if wished."""
    layout = with_resident_states(layout, liveness, num)
    if not options.keeps_payloads or layout.world_size > 1:
        return layout, demand
    kept = _with_resident_payloads(layout, demand)
    remaining = demand_of(kept, liveness, options.cuts)
    fits = remaining.min_ranges <= most_ranges(kept, remaining, target, options)
    return (kept, remaining) if fits else (layout, demand)


def _with_resident_payloads(layout: Layout, demand: Demand) -> Layout:
    """``layout`` with the payloads of resident states on the device, if no larger tensor spans them."""
    widths = zip(demand.blocks.first_group, demand.blocks.num_groups, strict=True)
    movable = {first for first, num in widths if num == 1}
    grad_chunks = layout.grad_chunks()
    resident = [c.index for c in layout.chunks if c.has_resident_os]
    whole = {c for c in resident if {c, grad_chunks.get(c, c)} <= movable}
    whole |= {grad_chunks[c] for c in whole if c in grad_chunks}
    chunks = (replace(c, home=Tier.DEVICE) if c.index in whole else c for c in layout.chunks)
    return replace(layout, chunks=tuple(chunks))


def sizes_of(layout: Layout, demand: Demand, liveness: Liveness, cuts: Cuts) -> Sizes:
    range_nbytes = chunk_nbytes(layout) * layout.world_size
    num_ranges = sum(demand.blocks.num_groups)
    os_nbytes = layout.os_nbytes()
    static_nbytes, whole_nbytes = layout.payload_nbytes(Tier.DEVICE), whole_graph_nbytes(liveness, cuts)
    return Sizes(
        range_nbytes=range_nbytes,
        num_ranges=num_ranges,
        resident={
            Tier.DEVICE: num_ranges * range_nbytes + static_nbytes + os_nbytes + whole_nbytes,
            Tier.HOST: sum(c.nbytes for c in layout.owned() if c.list is ChunkList.UNUSED),
        },
        evicted={
            Tier.DEVICE: demand.peak_nbytes + demand.min_ranges * range_nbytes + static_nbytes,
            Tier.HOST: layout.payload_nbytes() - static_nbytes + os_nbytes,
        },
        states_nbytes=states_nbytes(layout, liveness),
    )


def resident_states(sizes: Sizes, target: Target, options: PlanOptions) -> int | None:
    """Chunks whose states stay on the device: as wished, or more to save host memory; None: never enough."""
    missing_nbytes = sizes.evicted[Tier.HOST] - target.budget_nbytes(Tier.HOST)
    count = max(_wished(sizes, options), bisect_left(sizes.states_nbytes, missing_nbytes))
    return count if count < len(sizes.states_nbytes) else None


def most_within(sizes_nbytes: Sequence[int], margin_nbytes: int) -> int:
    """Chunks whose states fit into ``margin_nbytes``, where the first k take ``sizes_nbytes[k]`` bytes."""
    return max(0, bisect_right(sizes_nbytes, margin_nbytes) - 1)


def _wished(sizes: Sizes, options: PlanOptions) -> int:
    return min(options.num_resident_states, len(sizes.states_nbytes) - 1)


def choose_home(sizes: Sizes, target: Target, options: PlanOptions) -> Tier | None:
    """The home that ``options`` wish for or that moves least among those that fit; None where none fits."""
    slots = sizes.num_ranges * target.world_size
    unlimited = options.max_slots is None or options.max_slots >= slots
    if options.os_home != "host" and unlimited and target.short_tier(sizes.resident) is None:
        return Tier.DEVICE
    num_states = None if options.os_home == "device" else resident_states(sizes, target, options)
    if num_states is None or target.short_tier(sizes.evicted_but(num_states)) is not None:
        return None
    return Tier.HOST


def most_ranges(layout: Layout, demand: Demand, target: Target, options: PlanOptions) -> int:
    """Slot ranges of the largest arena beside non-model bytes and what stays on the device."""
    margin_nbytes = target.budget_nbytes(Tier.DEVICE) - demand.peak_nbytes - layout.nbytes_in(Tier.DEVICE)
    num_ranges = margin_nbytes // (chunk_nbytes(layout) * layout.world_size)
    return num_ranges if options.max_slots is None else min(num_ranges, options.max_slots // target.world_size)


def available_ranges(layout: Layout, demand: Demand, target: Target, options: PlanOptions) -> int:
    """As ``most_ranges``, but no more than all blocks at once would take."""
    return min(most_ranges(layout, demand, target, options), sum(demand.blocks.num_groups))


def least_budgets(sizes: Sizes, target: Target, options: PlanOptions) -> Mapping[Tier, int]:
    """Budgets with which the mapping works.

    Host memory misses where the device has room for the segments and the wishes, or the host none for the payloads:
    the least beside the device's, with as many states there as fit. Else device memory: the least beside the host's.
    """
    if options.os_home == "device":
        return sizes.resident
    num_states, wished = resident_states(sizes, target, options), _wished(sizes, options)
    margin_nbytes = target.budget_nbytes(Tier.DEVICE) - sizes.evicted[Tier.DEVICE]
    if num_states is None or sizes.states_nbytes[wished] <= margin_nbytes < sizes.states_nbytes[num_states]:
        num_states = max(wished, most_within(sizes.states_nbytes, margin_nbytes))
    return sizes.evicted_but(num_states)


def refuse(
    schedule: Schedule, target: Target, options: PlanOptions, demand: Demand, sizes: Sizes, chunk_numel: int
) -> BudgetError:
    """The error for a mapping that does not fit, for the fastest tier that is too small, else the slowest."""
    needs = least_budgets(sizes, target, options)
    tier = target.short_tier(needs) or SLOWER_TIERS[-1]
    if tier.is_fastest:
        moment, params, reason = _device_moment(demand, sizes, options, sizes.evicted[Tier.HOST] - needs[Tier.HOST])
        saved = _saved_text(schedule.saved_values(), max(demand.steps, key=lambda s: s.nonmodel_nbytes, default=None))
    else:
        moment, params, saved = str(tier), tuple(range(len(schedule.params))), ""
        reason = f"{tier} memory must hold every payload and optimizer state that has no place on the {Tier.DEVICE}"
    names = tuple(schedule.params[p].name for p in params)
    return _error(target, options, tier, moment, names, reason, chunk_numel, needs, saved)


def too_small(plan: Plan, target: Target, options: PlanOptions) -> BudgetError:
    """The error for the plan that takes least device memory, and still more than ``target`` has."""
    memory, layout = plan.memory, plan.layout
    worst = plan.segment(memory.nonmodel_segment)
    resident = options.os_home == "device"
    params = range(len(layout.params)) if resident else sorted({*worst.reads, *worst.lands})
    return _error(
        target,
        options,
        Tier.DEVICE,
        worst.name,
        tuple(layout.params[p].name for p in params),
        f"the arena takes {memory.arena_nbytes} bytes and activations, as compiled, up to {memory.nonmodel_nbytes} "
        "bytes; resident together must be the chunks with",
        layout.chunk_numel,
        memory.needs,
        _saved_text(plan.saved, worst),
    )


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
    tier: Tier,
    moment: str,
    names: tuple[str, ...],
    reason: str,
    chunk_numel: int,
    needs: Mapping[Tier, int],
    saved: str,
) -> BudgetError:
    budget_nbytes, enough = target.budget_nbytes(tier), target.memory_nbytes(needs)
    missing_nbytes = needs[tier] - budget_nbytes
    memories = " and ".join(
        f"{nbytes} bytes of {of} memory" + (f" ({nbytes - needs[of]} of them reserved)" if nbytes > needs[of] else "")
        for of, nbytes in enough.items()
    )
    message = (
        f"{target.model} cannot be trained: {target.hw} gives {budget_nbytes} bytes of {tier} memory, {missing_nbytes} "
        f"too few. At {moment}: {reason} ({_listed(names)}), in chunks of {chunk_numel} elements{saved}. It works with "
        f"{memories}; or use a smaller batch, shorter sequences"
        + (", or optimizer states on the host" if options.os_home == "device" else "")
        + (", or another chunk_size" if options.chunk_numel is not None else "")
        + "."
    )
    return BudgetError(
        message,
        moment=moment,
        tensors=names,
        missing_nbytes=missing_nbytes,
        min_device_nbytes=enough[Tier.DEVICE],
        min_host_nbytes=enough[Tier.HOST],
    )


def _device_moment(
    demand: Demand, sizes: Sizes, options: PlanOptions, states_nbytes: int
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
    states = f", optimizer states that stay on the device {states_nbytes}" if states_nbytes else ""
    reason = (
        f"the arena takes {demand.min_ranges * sizes.range_nbytes} bytes{states} and activations up to "
        f"{demand.peak_nbytes} bytes; resident together must be the chunks with"
    )
    return moment, params, reason


def _listed(names: Sequence[str], limit: int = 6) -> str:
    shown = ", ".join(names[:limit])
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")
