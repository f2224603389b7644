"""Pass ``chunk_size``: elements per chunk, by packing and pricing candidates.

Candidates come from the model alone (fractions of its size, sizes of layers and of large tensors), never from the
budget, so that the least budgets named in a ``BudgetError`` really work. Each is packed, without a look-back for gaps
and with one where that makes fewer chunks, and its residency planned. Of those that pack well, the least bytes moved by
all ranks together win (all must choose alike), then the least waste, then the fewest chunks. Where states are to be
streamed, sizes with which two can be under way at once come first. Where none fits, those are tried that leave no room
in the fullest group of a candidate: a percent of all model data may be what is missing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from chunkc.errors import BudgetError
from chunkc.ir.layout import ALIGNMENT_NBYTES, Layout
from chunkc.ir.schedule import DTYPE_NBYTES, Schedule, commonest_dtype
from chunkc.ir.state_spec import ADAM_STATES, StateSpec
from chunkc.ir.tiers import SLOWER_TIERS, Tier
from chunkc.passes.chunk_mapping import aligned_chunk_numel, blocks_of, pack
from chunkc.passes.residency import moved_nbytes, plan_intervals, used_ranges
from chunkc.passes.support.arena import buffers_of, lay_out
from chunkc.passes.support.budget import (
    Sizes,
    available_ranges,
    choose_home,
    chunk_nbytes,
    demand_of,
    least_budgets,
    most_ranges,
    needs_of,
    refuse,
    resident_states,
    sizes_of,
    with_residents,
)
from chunkc.passes.support.draft import BlockNeeds, Demand, Draft, Liveness, PackedLayout, Packing, decided
from chunkc.passes.support.resident_states import streamed_chunks
from chunkc.passes.support.updates import step_nbytes

DIVISORS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96)
LAYER_MULTIPLES = (1, 2, 3, 4)
LAYER_FRACTIONS = (4, 3, 2)
TENSOR_FRACTIONS = (2, 1)  # over several ranks, where a slot range holds a chunk of each of them
LOOKBACK = 2
"""Chunks before the latest whose gaps may be filled: enough to pack the papers' models as well as there."""
SLACK = 65 / 64  # beside its share of matrices a group holds small tensors, which else need groups of their own
MIN_UTILISATION = 0.97
"""Share of the chunks' elements that parameters must use, where some size that fits does so well."""
MAX_CHUNKS = 512
NUM_LARGEST = 3
GRANULE_NUMEL = 256


@dataclass(frozen=True, slots=True)
class Candidate:
    """One packed chunk size with its needs and its price, None where it does not fit."""

    chunk_numel: int
    layout: Layout
    demand: Demand
    sizes: Sizes
    moved_nbytes: int | None
    lookback: int = 0
    num_missing_buffers: int = 0

    @property
    def waste_nbytes(self) -> int:
        """Bytes of used chunks that hold no parameter."""
        held = sum(i.numel * DTYPE_NBYTES[_dtype_in(self.layout, p)] for p, i in enumerate(self.layout.params))
        return sum(c.nbytes for c in self.layout.chunks if c.used_numel and c.partner is None) - held


def _dtype_in(layout: Layout, param: int) -> str:
    placement = layout.placements[param]
    return layout.chunks[placement.chunk].dtype if placement.num_chunks else layout.params[param].dtype


def candidates(schedule: Schedule, liveness: Liveness, world_size: int) -> tuple[int, ...]:
    """Chunk sizes worth a try, ascending, multiples of 256: sizes of groups divided among the ranks."""
    used = [schedule.params[p] for p in liveness.use_order]
    total = sum(i.numel for i in used)
    wanted = [total / divisor for divisor in DIVISORS]
    largest = sorted({i.numel for i in used}, reverse=True)[:NUM_LARGEST]
    fractions = TENSOR_FRACTIONS if world_size > 1 else (1,)
    wanted += [*largest, *(n / d * SLACK for n in largest for d in fractions)]
    layers: dict[str, int] = {}
    for info in used:
        layer = re.match(r"(?:.*?\.)?\d+(?=\.)", info.name)
        if layer:
            layers[layer[0]] = layers.get(layer[0], 0) + info.nbytes // DTYPE_NBYTES[info.dtype]
    common = sorted(set(layers.values()), key=lambda n: (-list(layers.values()).count(n), n))[:2]
    wanted += [n * m for n in common for m in LAYER_MULTIPLES] + [
        n / d * SLACK for n in common for d in LAYER_FRACTIONS
    ]
    floor = max(GRANULE_NUMEL, total // (MAX_CHUNKS * world_size))
    granules = {-(-max(int(n / world_size), floor) // GRANULE_NUMEL) for n in wanted}
    return tuple(sorted(g * GRANULE_NUMEL for g in granules))


def tight_numel(layout: Layout) -> int:
    """Elements of a chunk without what no group uses, but for groups that a larger tensor spans."""
    spanned = {
        chunk // layout.world_size
        for placement in layout.placements
        for chunk in placement.chunks
        if placement.chunks[0] // layout.world_size != placement.chunks[-1] // layout.world_size
    }
    used_nbytes = [0] * len(layout.groups)
    for chunk in layout.chunks:
        group = chunk.index // layout.world_size
        if group not in spanned:
            used_nbytes[group] += chunk.used_nbytes
    element_nbytes = chunk_nbytes(layout) // layout.chunk_numel
    return -(-max(used_nbytes, default=0) // (layout.world_size * element_nbytes)) or layout.chunk_numel


def evaluate(draft: Draft, numel: int, *, packs_well: bool | None = None) -> list[Candidate]:
    """Pack chunks of ``numel`` elements, with a look-back too where that makes fewer; price what fits.

    ``packs_well``: whether only packings with `MIN_UTILISATION` are wanted, or only others; None: all.
    """
    packings = _packings(draft, numel)
    if packs_well is not None:
        packings = tuple(p for p in packings if (p.packed.layout.utilisation() >= MIN_UTILISATION) is packs_well)
    return [_priced(packing, draft, numel) for packing in packings]


def _packings(draft: Draft, numel: int) -> tuple[Packing, ...]:
    """Packings of ``numel`` elements; they depend on neither budgets nor activations."""
    schedule, liveness = draft.schedule, decided(draft.liveness, "liveness")
    target, spec = draft.target, draft.options.state_spec
    key = (numel, target.world_size, target.rank, spec)

    def packed() -> tuple[PackedLayout, ...]:
        layouts = packings(schedule, liveness, numel, target.world_size, target.rank, spec)
        return tuple(PackedLayout(lookback, layout, blocks_of(layout)) for lookback, layout in layouts)

    uses = (liveness.use_order, liveness.trained, liveness.has_grad_chunks)
    facts = (schedule.params, schedule.also_trained, *uses)
    layouts = draft.packings.layouts.of(key, facts, packed)

    def needed() -> tuple[BlockNeeds, ...]:
        return tuple(needs_of(found.layout, liveness, found.blocks) for found in layouts)

    needs = draft.packings.needs.of(key, (*facts, liveness.landing_op, liveness.needs), needed)
    return tuple(map(Packing, layouts, needs))


def packings(
    schedule: Schedule,
    liveness: Liveness,
    numel: int,
    world_size: int = 1,
    rank: int = 0,
    state_spec: StateSpec = ADAM_STATES,
) -> list[tuple[int, Layout]]:
    """The layout without a look-back, and the one with a look-back where it has fewer chunks."""
    plain, filled = (
        pack(schedule, liveness, numel, world_size, rank, lookback, state_spec) for lookback in (0, LOOKBACK)
    )
    if len(filled.chunks) < len(plain.chunks):
        return [(0, plain), (LOOKBACK, filled)]
    return [(0, plain)]


def _priced(packing: Packing, draft: Draft, numel: int) -> Candidate:
    layout, liveness = packing.packed.layout, decided(draft.liveness, "liveness")
    target, options = draft.target, draft.options
    demand = demand_of(layout, liveness, options.cuts, packing)
    sizes = sizes_of(layout, demand, liveness, options.cuts)
    home = choose_home(sizes, target, options)
    candidate = Candidate(numel, layout, demand, sizes, None, packing.packed.lookback)
    if home is None or home.is_fastest:
        return candidate if home is None else replace(candidate, moved_nbytes=0)
    num_states, share = resident_states(sizes, target, options), options.streamed_share
    homes = layout
    if num_states:
        homes, demand = with_residents(layout, demand, liveness, target, options, num_states)
    num_ranges = available_ranges(homes, demand, target, options)
    if num_ranges < demand.min_ranges:
        return candidate
    intervals = plan_intervals(homes, demand, num_ranges)
    moved = moved_nbytes(homes, demand, intervals, all_ranks=True)
    if not num_states and not share:
        return replace(candidate, moved_nbytes=moved)
    used = used_ranges(demand, intervals)
    whole = lay_out(homes, liveness, used, most_ranges(homes, demand, target, options), share)
    missing = min(2, len(streamed_chunks(whole, liveness, share))) - len(buffers_of(whole))
    moved += step_nbytes(whole, liveness, share)
    return replace(candidate, moved_nbytes=moved, num_missing_buffers=max(0, missing))


def search(draft: Draft) -> list[Candidate]:
    """The candidates that fit, the best first; one where the user gave the size.

    Raises:
        BudgetError: when none fits; it names budgets with which the best of them does.
        ValueError: when ``max_slots`` is less than every candidate needs.
    """
    liveness, options = decided(draft.liveness, "liveness"), draft.options
    schedule, target = draft.schedule, draft.target
    wanted = (
        candidates(schedule, liveness, target.world_size) if options.chunk_numel is None else (options.chunk_numel,)
    )
    dtype = commonest_dtype(schedule.params)
    aligned = (aligned_chunk_numel(numel, dtype, options.state_spec) for numel in wanted)
    numels = tuple(dict.fromkeys(aligned))
    tried = [c for numel in numels for c in evaluate(draft, numel, packs_well=True)]
    if not _fits(tried):
        tried += [c for numel in numels for c in evaluate(draft, numel, packs_well=False)]
    if options.chunk_numel is None and not _fits(tried):
        tight = (aligned_chunk_numel(tight_numel(c.layout), dtype, options.state_spec) for c in tried)
        others = dict.fromkeys(numel for numel in tight if numel not in numels)
        tried += [c for numel in others for c in evaluate(draft, numel)]
    fitting = [((c.num_missing_buffers, c.moved_nbytes), c) for c in tried if c.moved_nbytes is not None]
    if not fitting:
        raise _none_fits(draft, tried)
    fitting = [pair for pair in fitting if pair[1].layout.utilisation() >= MIN_UTILISATION] or fitting
    fitting.sort(key=lambda pair: (pair[0], pair[1].waste_nbytes, len(pair[1].layout.chunks)))
    return [c for _, c in fitting]


def _fits(tried: Sequence[Candidate]) -> bool:
    return any(c.moved_nbytes is not None for c in tried)


def _none_fits(draft: Draft, tried: list[Candidate]) -> BudgetError | ValueError:
    target, options = draft.target, draft.options
    if any(choose_home(c.sizes, target, options) is not None for c in tried):
        least = min(c.demand.min_ranges for c in tried) * target.world_size
        return ValueError(f"max_slots={options.max_slots} is too few: an operator needs {least} slots at once")

    def order(c: Candidate) -> tuple[list[bool], list[int]]:
        """Those for which a slower tier is too small come first, then those that need least of it."""
        needs = least_budgets(c.sizes, target, options)
        tier = target.short_tier(needs) or SLOWER_TIERS[-1]
        return [needs[t] > target.budget_nbytes(t) for t in Tier], [needs[tier], *needs.values()]

    best = min(tried, key=order)
    return refuse(draft.schedule, target, options, best.demand, best.sizes, best.chunk_numel)


@dataclass(frozen=True, slots=True)
class ChunkSizePass:
    """Decides ``chunk_numel``; other sizes that fit are kept for a choice by time (``search.py``)."""

    name: str = "chunk_size"
    requires: frozenset[str] = frozenset({"liveness"})
    provides: frozenset[str] = frozenset({"chunk_numel"})
    conflicts: frozenset[str] = frozenset({"mapping"})

    def __call__(self, draft: Draft) -> Draft:
        if draft.fixed_layout is not None:
            return replace(draft, chunk_numel=draft.fixed_layout.chunk_numel, note="kept: one layout per model")
        fitting = search(draft)
        best = fitting[0]
        why = "given" if draft.options.chunk_numel is not None else "searched"
        note = f"{best.chunk_numel} elements ({why}), {best.moved_nbytes} bytes moved"
        note += f", gaps filled {best.lookback} chunks back" if best.lookback else ""
        wanted = draft.options.chunk_numel
        if wanted is not None and wanted != best.chunk_numel:
            block_numel = draft.options.state_spec.block_numel
            blocks = "" if block_numel == 1 else f" and hold blocks of {block_numel} elements"
            note += f"; rounded up from {wanted}, chunks start at multiples of {ALIGNMENT_NBYTES} bytes{blocks}"
        sizes = tuple(dict.fromkeys(c.chunk_numel for c in fitting))
        return replace(draft, chunk_numel=best.chunk_numel, lookback=best.lookback, fitting_numels=sizes, note=note)
