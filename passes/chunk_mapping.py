"""Pass ``chunk_mapping``: parameter -> (chunk, offset), in order of first use.

The order is that of PatrickStar (section 6.1.1). Three kinds of lists: trained parameters per dtype, frozen ones per
dtype, and those that no graph uses (kept in fp32). A group is packed as one room, since its chunks are adjacent on the
device, and a tensor in it may reach over several chunks. Tensors are aligned to 256 bytes; one that does not fit in the
rest of a group opens the next. With a *look-back* it may fill a gap in one of the groups before (first fit among the
latest groups instead of next fit; Johnson, 1974): fewer groups, of tensors less close in use, so the search tries both.
Where states are quantised, tensors are aligned to whole blocks too (`chunkc.ir.state_spec`).

A tensor larger than a group starts a fresh one and spans groups without gaps; what follows it may use the tail of its
last group. Groups that a tensor chains move together, which is why it does not start in the rest of another.

Where gradients do not overlay parameters, every trained chunk has a gradient chunk of the same kind as its partner.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from chunkc.errors import PlanError
from chunkc.ir.layout import ALIGNMENT_NBYTES, Chunk, ChunkList, Group, Layout, Placement
from chunkc.ir.schedule import DTYPE_NBYTES, Schedule, commonest_dtype
from chunkc.ir.state_spec import ADAM_STATES, StateSpec
from chunkc.ir.tiers import Tier
from chunkc.passes.support.draft import ChunkBlocks, Draft, Liveness, decided

UNUSED_DTYPE = "float32"


def aligned_numel(numel: int, dtype: str, block_numel: int = 1) -> int:
    """``numel`` rounded up to a multiple of 256 bytes of ``dtype`` and of ``block_numel``, a power of two."""
    step = max(ALIGNMENT_NBYTES // DTYPE_NBYTES[dtype], block_numel)
    return -(-numel // step) * step


def aligned_chunk_numel(numel: int, dtype: str, spec: StateSpec) -> int:
    """Round up the elements of a chunk of the commonest dtype, so that its bytes are whole blocks in any."""
    return aligned_numel(numel, dtype, spec.block_numel * max(DTYPE_NBYTES.values()) // DTYPE_NBYTES[dtype])


@dataclass(slots=True)
class _Packer:
    """Packs one list: ``used`` elements of each group, of which ``lookback`` latest may be filled.

    Tensors begin at multiples of ``block_numel``.
    """

    numel: int
    dtype: str
    group_size: int
    lookback: int = 0
    block_numel: int = 1
    used: list[int] = field(default_factory=list)

    @property
    def room(self) -> int:
        """Elements of one group."""
        return self.numel * self.group_size

    def place(self, numel: int) -> tuple[int, int, int]:
        """``(chunk, offset, num_chunks)`` of the next tensor, chunks counted within the list."""
        latest = len(self.used) - 1
        for group in range(max(0, latest - self.lookback), latest + 1):
            offset = aligned_numel(self.used[group], self.dtype, self.block_numel)
            if offset + numel <= self.room:
                self.used[group] = offset + numel
                return self._placed(group, offset, numel)
        first = len(self.used)
        self.used += [self.room] * ((numel - 1) // self.room)
        self.used.append(numel - (len(self.used) - first) * self.room)
        return self._placed(first, 0, numel)

    def _placed(self, group: int, offset: int, numel: int) -> tuple[int, int, int]:
        chunk, offset = divmod(group * self.room + offset, self.numel)
        return chunk, offset, -(-(offset + numel) // self.numel)

    @property
    def num_chunks(self) -> int:
        """Chunks so far, whole groups of them."""
        return len(self.used) * self.group_size

    def used_of_chunks(self) -> list[int]:
        """Used elements of each chunk."""
        starts = range(0, self.room, self.numel)
        return [min(max(used - start, 0), self.numel) for used in self.used for start in starts]


def pack(
    schedule: Schedule,
    liveness: Liveness,
    chunk_numel: int,
    world_size: int = 1,
    rank: int = 0,
    lookback: int = 0,
    state_spec: StateSpec = ADAM_STATES,
) -> Layout:
    """Map parameters to chunks of ``chunk_numel`` elements of the commonest dtype.

    Homes are undecided, and there are no slots. A tensor may go into one of the ``lookback`` groups before the latest.
    """
    nbytes = chunk_numel * DTYPE_NBYTES[commonest_dtype(schedule.params)]
    placements: list[Placement | None] = [None] * len(schedule.params)
    chunks: list[Chunk] = []
    lists = _lists(schedule, liveness)
    for (kind, dtype), members in lists.items():
        if kind is ChunkList.UNUSED:
            chunks += _grad_chunks(chunks, liveness)
        packer = _Packer(nbytes // DTYPE_NBYTES[dtype], dtype, world_size, lookback, state_spec.block_numel)
        first = len(chunks)
        for param in members:
            if schedule.params[param].numel:
                chunk, offset, num_chunks = packer.place(schedule.params[param].numel)
                placements[param] = Placement(param, first + chunk, offset, num_chunks)
            else:
                placements[param] = Placement(param, max(0, first + packer.num_chunks - 1), 0, 0)
        os_home = Tier.HOST if kind is ChunkList.TRAINED else None
        chunks += (
            Chunk(index, kind, dtype, packer.numel, used, Tier.HOST, os_home)
            for index, used in enumerate(packer.used_of_chunks(), first)
        )
    if (ChunkList.UNUSED, UNUSED_DTYPE) not in lists:
        chunks += _grad_chunks(chunks, liveness)
    return Layout(
        params=schedule.params,
        placements=tuple(p for p in placements if p is not None),
        chunks=tuple(chunks),
        groups=tuple(Group(i, i * world_size, world_size) for i in range(len(chunks) // world_size)),
        chunk_numel=chunk_numel,
        world_size=world_size,
        rank=rank,
        state_spec=state_spec,
    )


def least_groups(schedule: Schedule, liveness: Liveness, chunk_numel: int, world_size: int = 1) -> int:
    """A lower bound of the groups of used parameters that any packing with such chunks has.

    Tensors longer than a group fill some and leave a rest; the rests are bounded by L2 (Martello and Toth, 1990).
    """
    nbytes = chunk_numel * DTYPE_NBYTES[commonest_dtype(schedule.params)]
    total = 0
    for (kind, dtype), members in _lists(schedule, liveness).items():
        if kind is not ChunkList.UNUSED:
            room = nbytes // DTYPE_NBYTES[dtype] * world_size
            numels = [schedule.params[p].numel for p in members]
            rests = sorted(numel % room for numel in numels if numel % room)
            total += sum(numel // room for numel in numels) + _least_bins(rests, room)
    return total


def _least_bins(numels: Sequence[int], room: int) -> int:
    """Bound L2 of bin packing for ascending ``numels`` of at most ``room``.

    For every k, what is longer than the room less k shares it with nothing of k or more, what is longer than half a
    room shares it with nothing of its kind, and the others from k on fill what these leave at best.
    """
    if not numels:
        return 0
    num_upper_half = len(numels) - bisect_right(numels, room // 2)
    sums = [0, *accumulate(numels)]
    best = num_upper_half
    for first, least in enumerate(numels):
        if 2 * least > room:
            break
        alone = bisect_right(numels, room - least)  # from here on nothing of ``least`` fits beside
        half = min(bisect_right(numels, room // 2), alone)
        left = (alone - half) * room - (sums[alone] - sums[half])
        best = max(best, len(numels) - half + max(0, -((left - (sums[half] - sums[first])) // room)))
    return best


def _grad_chunks(chunks: Sequence[Chunk], liveness: Liveness) -> list[Chunk]:
    """A gradient chunk for each trained one, in their order, behind all chunks that graphs read."""
    trained = [c for c in chunks if c.list is ChunkList.TRAINED] if liveness.has_grad_chunks else []
    return [
        replace(c, index=index, list=ChunkList.GRAD, os_home=None, partner=c.index)
        for index, c in enumerate(trained, len(chunks))
    ]


def _lists(schedule: Schedule, liveness: Liveness) -> dict[tuple[ChunkList, str], list[int]]:
    """Parameters of each list in order of first use, those that only other graphs use last."""
    trained, used = set(liveness.trained).union(schedule.also_trained), set(liveness.use_order)
    elsewhere = [p for p in schedule.also_trained if p not in used]
    unused = [p for p in range(len(schedule.params)) if p not in used.union(elsewhere)]
    lists: dict[tuple[ChunkList, str], list[int]] = {}
    for kind in (ChunkList.TRAINED, ChunkList.FROZEN):
        for param in (*liveness.use_order, *elsewhere):
            if (param in trained) == (kind is ChunkList.TRAINED):
                lists.setdefault((kind, schedule.params[param].dtype), []).append(param)
    if unused:
        lists[ChunkList.UNUSED, UNUSED_DTYPE] = unused
    return lists


def blocks_of(layout: Layout) -> ChunkBlocks:
    """The chunk blocks of ``layout``: its used groups, those that a tensor chains taken together."""
    groups = [g for g in layout.groups if layout.chunks[g.first_chunk].list is not ChunkList.UNUSED]
    leader = list(range(len(groups)))
    for placement in layout.placements:
        if placement.num_chunks > 1 and layout.chunks[placement.chunk].list is not ChunkList.UNUSED:
            first, last = placement.chunks[0] // layout.world_size, placement.chunks[-1] // layout.world_size
            for group in range(first, last + 1):
                leader[group] = leader[first]
    firsts = sorted(set(leader))
    block_of_first = {first: block for block, first in enumerate(firsts)}
    block_of_group = [block_of_first[first] for first in leader]
    of_param = [-1] * len(layout.params)
    for placement in layout.placements:
        if placement.num_chunks and layout.chunks[placement.chunk].list is not ChunkList.UNUSED:
            of_param[placement.param] = block_of_group[placement.chunk // layout.world_size]
    widths = [0] * len(firsts)
    for block in block_of_group:
        widths[block] += 1
    grad_chunks = layout.grad_chunks()
    of_grad = [
        tuple(dict.fromkeys(block_of_group[grad_chunks.get(c, c) // layout.world_size] for c in placement.chunks))
        if of_param[placement.param] >= 0
        else ()
        for placement in layout.placements
    ]
    return ChunkBlocks(tuple(firsts), tuple(widths), tuple(of_param), tuple(of_grad))


def check_matches(layout: Layout, schedule: Schedule, liveness: Liveness) -> None:
    """Check that ``layout``, made for another shape or graph of the model, serves ``schedule`` too.

    It may train less: what no gradient comes for, the step leaves as it is.

    Raises:
        PlanError: naming a parameter whose list differs.
    """
    trained, used = set(liveness.trained), set(liveness.use_order)
    if layout.params != schedule.params:
        raise PlanError("a fixed layout serves only shapes of the model that it was made for; the parameters differ")
    for placement in layout.placements:
        if not placement.num_chunks:
            continue
        kind, name = layout.chunks[placement.chunk].list, schedule.params[placement.param].name
        if (placement.param in trained and kind is not ChunkList.TRAINED) or (
            placement.param in used and kind is ChunkList.UNUSED
        ):
            raise PlanError(
                f"{name!r} stands in a chunk of {kind} parameters, but the graphs of this shape use it otherwise; "
                "give every shape the same trained parameters, or compile the model again for it"
            )


@dataclass(frozen=True, slots=True)
class ChunkMappingPass:
    """Decides ``mapping``."""

    name: str = "chunk_mapping"
    requires: frozenset[str] = frozenset({"liveness", "chunk_numel"})
    provides: frozenset[str] = frozenset({"mapping"})
    conflicts: frozenset[str] = frozenset({"os_home"})

    def __call__(self, draft: Draft) -> Draft:
        liveness, target = decided(draft.liveness, "liveness"), draft.target
        if draft.fixed_layout is not None:
            check_matches(draft.fixed_layout, draft.schedule, liveness)
            return replace(draft, layout=draft.fixed_layout, note="kept: one layout per model")
        numel = decided(draft.chunk_numel, "chunk_numel")
        ranks, spec = (target.world_size, target.rank), draft.options.state_spec
        layout = pack(draft.schedule, liveness, numel, *ranks, draft.lookback, spec)
        layout = replace(layout, num_replicas=target.num_replicas)
        least = least_groups(draft.schedule, liveness, numel, target.world_size)
        note = f"{len(layout.chunks)} chunks, {100 * layout.utilisation():.1f} % of their elements used; "
        note += f"at least {least * target.world_size} are needed"
        return replace(draft, layout=layout, note=note)
