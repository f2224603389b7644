"""The layout: parameters in chunks, homes of chunks off the device, and the arena.

One layout per model, fixed, shared by all its programs. The lists param16, param32 and the optimizer's states share one
mapping: ``c7`` names the payload (param16, or grad16 where it overlays it), ``os7`` the OS of the same chunk: param32
and the optimizer's states. A tensor larger than a chunk spans chunks without a gap, and so do their slots wherever an
operator reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from chunkc.ir.actions import Action, Op
from chunkc.ir.schedule import DTYPE_NBYTES, ParamInfo
from chunkc.ir.state_spec import ADAM_STATES, StateSpec
from chunkc.ir.tiers import Tier

ALIGNMENT_NBYTES = 256


class ChunkList(StrEnum):
    """The common property of the parameters of a chunk.

    TRAINED: backward makes a gradient; there is an OS. FROZEN: read, never updated. UNUSED: no graph reads them
    (kept in fp32, never on the device). GRAD: gradients of the chunk ``partner``, whose parameters are read again.
    """

    TRAINED = "trained"
    FROZEN = "frozen"
    UNUSED = "unused"
    GRAD = "grad"


@dataclass(frozen=True, slots=True)
class Chunk:
    """``numel`` elements of ``dtype``; the first ``used_numel`` hold data, with padding between tensors.

    ``home``, ``os_home``: the tier of payload and OS that no action has moved; in the fastest they have a slot.
    ``has_second_home``: there is room for another payload and OS beside the home; every update writes there, and the
    two homes change places.
    """

    index: int
    list: ChunkList
    dtype: str
    numel: int
    used_numel: int
    home: Tier = Tier.HOST
    os_home: Tier | None = None
    partner: int | None = None
    has_second_home: bool = False

    @property
    def nbytes(self) -> int:
        return self.numel * DTYPE_NBYTES[self.dtype]

    @property
    def used_nbytes(self) -> int:
        """Bytes that a copy of the payload moves."""
        return self.used_numel * DTYPE_NBYTES[self.dtype]

    @property
    def is_resident(self) -> bool:
        return self.home.is_fastest

    @property
    def has_resident_os(self) -> bool:
        return self.os_home is not None and self.os_home.is_fastest

    @property
    def has_os_below(self) -> bool:
        return self.os_home is not None and not self.os_home.is_fastest


@dataclass(frozen=True, slots=True)
class Placement:
    """Place of a parameter: ``offset`` elements into ``chunk``, reaching over ``num_chunks`` chunks."""

    param: int
    chunk: int
    offset: int
    num_chunks: int = 1

    @property
    def chunks(self) -> range:
        return range(self.chunk, self.chunk + self.num_chunks)


@dataclass(frozen=True, slots=True)
class Group:
    """A communication group: consecutive chunks, of which ``first_chunk + r`` is owned by rank ``r``."""

    index: int
    first_chunk: int
    num_chunks: int

    @property
    def chunks(self) -> range:
        return range(self.first_chunk, self.first_chunk + self.num_chunks)


@dataclass(frozen=True, slots=True)
class Slot:
    """A byte range of the device arena."""

    index: int
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclass(frozen=True, slots=True)
class Layout:
    """Mapping, homes and arena of one model.

    Indexes are positions in ``params``, ``chunks`` and ``slots``. ``groups`` cover all chunks in order, ``world_size``
    chunks each. ``chunk_numel`` counts elements of the commonest dtype (other dtypes: the same bytes). The n-th of all
    ranks is rank ``n % world_size`` of replica ``n // world_size``; each replica (one node) has all chunks.
    """

    params: tuple[ParamInfo, ...]
    placements: tuple[Placement, ...]
    chunks: tuple[Chunk, ...]
    groups: tuple[Group, ...]
    chunk_numel: int
    slots: tuple[Slot, ...] = ()
    arena_nbytes: int = 0
    world_size: int = 1
    rank: int = 0
    num_replicas: int = 1
    state_spec: StateSpec = ADAM_STATES

    @property
    def num_ranks(self) -> int:
        return self.world_size * self.num_replicas

    def params_of(self, chunk: int) -> tuple[int, ...]:
        """Indexes of the parameters with bytes in ``chunk``, by offset."""
        members = [p for p in self.placements if chunk in p.chunks]
        return tuple(p.param for p in sorted(members, key=lambda p: (p.chunk, p.offset)))

    def parts_of(self, param: int) -> Iterator[tuple[int, int]]:
        """Chunks that hold ``param``, each with how many of its elements stand there."""
        placement, left = self.placements[param], self.params[param].numel
        offset = placement.offset
        for chunk in placement.chunks:
            part = min(left, self.chunks[chunk].numel - offset)
            yield chunk, part
            left, offset = left - part, 0

    def chunks_of(self, params: tuple[int, ...] | frozenset[int] | set[int]) -> tuple[int, ...]:
        """Indexes of the chunks that hold ``params``, ascending, each once."""
        return tuple(sorted({c for p in params for c in self.placements[p].chunks}))

    def grad_chunks(self) -> dict[int, int]:
        return {c.partner: c.index for c in self.chunks if c.partner is not None}

    def owner(self, chunk: int) -> int:
        """The rank whose home a chunk has: its place in its group."""
        return chunk % self.world_size

    def group_of(self, chunk: int) -> Group:
        return self.groups[chunk // self.world_size]

    def remote_of(self, group: int) -> tuple[int, ...]:
        return tuple(c for c in self.groups[group].chunks if self.owner(c) != self.rank)

    def moved_nbytes(self, action: Action) -> int:
        """Bytes of ``action`` over the host's link (used ones), or from other ranks (whole chunks)."""
        if action.op in (Op.FETCH, Op.EVICT):
            return self.chunks[action.index].used_nbytes
        if action.op in (Op.LOAD, Op.STORE):
            return self.used_os_nbytes_of(self.chunks[action.index])
        if action.op is Op.GATHER:
            return sum(self.chunks[c].nbytes for c in self.remote_of(action.index))
        if action.op is Op.REDUCE:
            nbytes = self.chunks[self.groups[action.index].first_chunk].nbytes
            return (self.world_size - 1) * nbytes + self.mirrored_nbytes(nbytes)
        return 0

    def mirrored_nbytes(self, nbytes: int) -> int:
        """Bytes that each owner of a chunk of ``nbytes`` receives so that all replicas have its mean."""
        return 2 * (self.num_replicas - 1) * nbytes // self.num_replicas

    def owned(self) -> tuple[Chunk, ...]:
        return self.chunks[self.rank :: self.world_size]

    def lines(self) -> list[str]:
        """All that ranks which share groups must have alike, one fact a line."""
        replicas = "" if self.num_replicas == 1 else f" in each of {self.num_replicas} replicas"
        lines = [f"{self.world_size} ranks{replicas}, chunks of {self.chunk_numel} elements, {self.state_spec}"]
        for p in self.placements:
            name = self.params[p.param].name
            lines.append(f"{name} at element {p.offset} of c{p.chunk}, over {p.num_chunks} chunks")
        lines += [f"c{c.index}: {c.list}, {c.numel} elements of {c.dtype}, {c.used_numel} used" for c in self.chunks]
        return lines

    def payload_nbytes(self, tier: Tier | None = None) -> int:
        """Bytes of this rank's payloads and gradient chunks, padding included; at home in ``tier``, or all."""
        return sum(c.nbytes for c in self.owned() if tier in (None, c.home))

    def os_nbytes(self, tier: Tier | None = None) -> int:
        return sum(self.os_nbytes_of(c) for c in self.owned() if c.os_home is not None and tier in (None, c.os_home))

    def nbytes_in(self, tier: Tier) -> int:
        """Bytes of this rank's payloads and optimizer states that are at home in ``tier``."""
        return self.payload_nbytes(tier) + self.os_nbytes(tier) + self.second_home_nbytes(tier)

    def second_home_nbytes(self, tier: Tier) -> int:
        """Bytes of the second homes of this rank's chunks in ``tier``."""
        return sum(self.second_home_nbytes_of(c) for c in self.owned() if c.has_second_home and c.home is tier)

    def os_nbytes_of(self, chunk: Chunk) -> int:
        return self.state_spec.stored_nbytes(chunk.numel)

    def second_home_nbytes_of(self, chunk: Chunk) -> int:
        """Bytes that a second home of ``chunk`` takes or would take."""
        return chunk.nbytes + self.os_nbytes_of(chunk)

    def used_os_nbytes_of(self, chunk: Chunk) -> int:
        return self.state_spec.nbytes_of(chunk.used_numel)

    def model_data_nbytes(self) -> int:
        """Bytes of parameters and optimizer states as elements count, without padding; no gradients."""
        total = 0
        for placement in self.placements:
            info = self.params[placement.param]
            trained = placement.num_chunks > 0 and self.chunks[placement.chunk].list is ChunkList.TRAINED
            total += info.nbytes + (self.state_spec.nbytes_of(info.numel) if trained else 0)
        return total

    def utilisation(self) -> float:
        """Share of chunk elements that hold parameters (PatrickStar section 9.2.2), rank padding not counted."""
        held = sum(self.params[p.param].numel for p in self.placements)
        capacity = sum(c.numel for c in self.chunks if c.list is not ChunkList.GRAD and c.used_numel > 0)
        return held / capacity if capacity else 1.0
