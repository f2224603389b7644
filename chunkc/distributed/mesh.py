"""The mesh of a job's ranks: which of them divide, copy, or compute together what.

Dimensions have torchtitan's names. Of eight ranks under ``dp_replicate=2,dp_shard=2,tp=2``:

    ranks            0 1   2 3   4 5   6 7
    tp               ───   ───   ───   ───      compute one forward of one batch together
    dp_shard         0 and 2, 1 and 3, ...      divide chunks; take batches of their own
    dp_replicate     0 and 4, 1 and 5, ...      have copies of the same chunks; take batches of their own

Ranks along ``cp`` (context parallelism) stand between ``dp_shard`` and ``tp``. They take slices of the same sequences,
and divide chunks as ranks along ``dp_shard`` do: to all but attention a slice is a batch.

The *column* of a rank is the ranks with its place along ``tp``. They train the same parameters, each on its own batch:
the parts that the column's place has of tensors divided along ``tp``, and whole tensors. Columns exchange what the
model's own operators exchange, norms of gradients, and agreements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import torch

from chunkc._torch_compat.collectives import is_dtensor
from chunkc._torch_compat.distributed import DeviceMesh
from chunkc.errors import ChunkcError

AUTO: Final = "auto"
"""In place of a mesh: the fastest one, which `chunkc plan` searches for."""
PP: Final = "pp"
CP: Final = "cp"
DP_REPLICATE: Final = "dp_replicate"
DP_SHARD: Final = "dp_shard"
TP: Final = "tp"
SUPPORTED: Final = (DP_REPLICATE, DP_SHARD, TP)
"""Dimensions of `RankMesh`, those along which neighbours differ last; `CP` counts as ``dp_shard``."""

_ALL: Final = (PP, DP_REPLICATE, DP_SHARD, CP, TP)
_EXAMPLE: Final = 'torch.distributed.init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp_shard", "tp"))'


@dataclass(frozen=True, slots=True)
class RankMesh:
    """The ranks of one stage by their places along `SUPPORTED`, each of one rank or more.

    ``ranks`` in the order of their places; those of a column, and of each line along a dimension, ascend.
    ``num_context``: neighbours of the ``num_sharing`` ranks, which have slices of the same sequences. ``stages``:
    those of all stages of the job, where there are several. ``name`` tells pipelines of one job apart. ``dims``: names
    and sizes of all dimensions of two ranks or more, in the order of the job's ranks; none where `of_data` has it.
    """

    num_replicas: int
    num_sharing: int
    num_tensor: int
    ranks: tuple[int, ...]
    stages: tuple[tuple[int, ...], ...] = ()
    name: str = ""
    dims: tuple[tuple[str, int], ...] = ()
    num_context: int = 1

    def __post_init__(self) -> None:
        if not self.stages:
            object.__setattr__(self, "stages", (self.ranks,))

    @staticmethod
    def of_data(num_ranks: int, num_sharing: int) -> RankMesh:
        """``num_ranks`` that each take a batch, of which every ``num_sharing`` neighbours divide chunks."""
        return RankMesh(num_ranks // num_sharing, num_sharing, 1, tuple(range(num_ranks)))

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def stage_lines(self) -> tuple[tuple[int, ...], ...]:
        """The ranks with the same place in all stages, first stages first."""
        return tuple(zip(*self.stages, strict=True))

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.num_replicas, self.num_sharing, self.num_tensor)

    @property
    def columns(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each place along ``tp``, by replica and then by place along ``dp_shard``."""
        return tuple(self.ranks[place :: self.num_tensor] for place in range(self.num_tensor))

    @property
    def columns_of_stages(self) -> tuple[tuple[int, ...], ...]:
        """The `columns` of all stages, the same for every rank of the job."""
        places = range(self.num_tensor)
        return tuple(stage[place :: self.num_tensor] for stage in self.stages for place in places)

    @property
    def tensor_lines(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that compute one forward together, in their order along ``tp``."""
        starts = range(0, len(self.ranks), self.num_tensor)
        return tuple(self.ranks[start : start + self.num_tensor] for start in starts)

    @property
    def context_lines(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of all stages that have slices of the same sequences, in the order of the slices."""
        step, size = self.num_tensor, self.num_tensor * self.num_context
        return tuple(
            stage[start + place : start + size : step]
            for stage in self.stages
            for start in range(0, len(stage), size)
            for place in range(step)
        )

    def place_of(self, rank: int) -> tuple[int, int]:
        """Position of a rank in its column, and the column's place along ``tp``."""
        return divmod(self.ranks.index(rank), self.num_tensor)

    def __str__(self) -> str:
        num_sharing = self.num_sharing // self.num_context
        numbers = (self.num_stages, self.num_replicas, num_sharing, self.num_context, self.num_tensor)
        sizes = zip(_ALL, numbers, strict=True)
        return ",".join(f"{name}={size}" for name, size in sizes if size > 1)


def rank_mesh(
    mesh: DeviceMesh | str | None, num_ranks: int, default: RankMesh, rank: int = 0, owner: str = "the job"
) -> RankMesh:
    """The ranks of the stage of ``rank`` as ``mesh`` lays ``owner`` out, or ``default`` where it is None.

    A text names sizes of dimensions, as in ``"dp_shard=2,tp=4"``, in any order; ``dp_shard`` may be left out.

    Raises:
        ChunkcError: for dimensions that are not supported, and for a mesh that is not of just these ranks.
    """
    if mesh is None:
        return default
    if isinstance(mesh, str):
        sizes = _sizes_of_text(mesh, num_ranks, owner)
        ranks: Any = range(num_ranks)
        name = f"mesh {mesh}"
    elif isinstance(mesh, DeviceMesh):
        if mesh.mesh_dim_names is None:
            raise ChunkcError(f"the mesh has dimensions without names: make it by {_EXAMPLE}")
        sizes = dict(zip(mesh.mesh_dim_names, mesh.mesh.shape, strict=True))
        ranks = mesh.mesh.flatten().tolist()
        name = str(mesh.get_group(PP).group_name) if PP in sizes else ""
    else:
        raise ChunkcError(f"mesh={mesh!r}: give a DeviceMesh, a text such as 'dp_shard=2,tp=4', or None")
    _check_names(sizes)
    if list(ranks) != list(range(num_ranks)):
        raise ChunkcError(
            f"the mesh {_text(sizes)} has ranks {_some(ranks)}, and {owner} has ranks 0 to {num_ranks - 1}: a mesh has "
            "each of them once, in their order"
        )
    dims = [(name, size) for name, size in sizes.items() if size > 1]
    num_replicas, num_sharing, num_context, num_tensor = (sizes.get(name, 1) for name in _ALL[1:])
    in_order = _transposed(tuple(ranks), dims)
    size = len(in_order) // sizes.get(PP, 1)
    stages = tuple(in_order[start : start + size] for start in range(0, len(in_order), size))
    own = next(stage for stage in stages if rank in stage)
    own_dims = () if {name for name, _ in dims} <= {DP_REPLICATE, DP_SHARD} else tuple(dims)
    name = name if len(stages) > 1 else ""
    divides = (num_replicas, num_sharing * num_context, num_tensor)
    if num_context > 1 and (num_tensor > 1 or len(stages) > 1):
        raise ChunkcError(
            f"the mesh {_text(sizes)} has cp beside tp or pp: so far sequences are divided over ranks along "
            "dp_replicate, dp_shard and cp alone"
        )
    laid_out = RankMesh(*divides, own, stages, name, own_dims, num_context)
    _check_order(laid_out, sizes)
    return laid_out


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part that this rank has of a DTensor; other tensors as they are."""
    if not is_dtensor(tensor):
        return tensor
    part: Any = tensor
    return part.to_local().detach()  # type: ignore[no-any-return]


def _sizes_of_text(text: str, num_ranks: int, owner: str) -> dict[str, int]:
    given: dict[str, int] = {}
    if text == AUTO:
        raise ChunkcError(
            "mesh='auto' is for `chunkc plan --mesh auto`, which names the fastest mesh: give that one here, since the "
            "script must know which ranks take batches of their own"
        )
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if not size.isascii() or not size.isdigit() or int(size) < 1 or name in given:
            raise ChunkcError(f"mesh={text!r}: give each dimension once with its ranks, as in 'dp_shard=2,tp=4'")
        given[name] = int(size)
    _check_names(given)
    if DP_SHARD not in given and num_ranks % prod(given.values()) == 0:
        given[DP_SHARD] = num_ranks // prod(given.values())
    if prod(given.values()) != num_ranks:
        raise ChunkcError(f"mesh={text!r} has {prod(given.values())} ranks, and {owner} has {num_ranks}")
    return {name: given.get(name, 1) for name in _ALL}


def _check_names(sizes: Mapping[str, int]) -> None:
    unknown = [name for name in sizes if name not in _ALL]
    if unknown:
        raise ChunkcError(
            f"the mesh has dimensions {', '.join(map(repr, unknown))}; supported are {', '.join(_ALL)}: stages of a "
            "pipeline, ranks that copy chunks, that divide them, that have slices of sequences (context parallelism), "
            "and that compute one forward together (tensor parallelism)"
        )


def _transposed(ranks: tuple[int, ...], dims: Sequence[tuple[str, int]]) -> tuple[int, ...]:
    """``ranks`` of a mesh of ``dims``, the last of which changes first, in the order of `SUPPORTED`."""
    strides, stride = dict[str, int](), 1
    for name, size in reversed(dims):
        strides[name], stride = stride, stride * size
    offsets = [0]
    for name in _ALL:
        size = dict(dims).get(name, 1)
        offsets = [offset + place * strides.get(name, 0) for offset in offsets for place in range(size)]
    return tuple(ranks[offset] for offset in offsets)


def _check_order(mesh: RankMesh, sizes: Mapping[str, int]) -> None:
    """Refuse replicas whose ranks come between those of others, and one rank for each replica."""
    if any(list(column) != sorted(column) for column in mesh.columns):
        raise ChunkcError(
            f"the mesh {_text(sizes)} has its dimensions in another order than dp_replicate, dp_shard, cp: name them so"
        )
    if mesh.num_replicas > 1 and mesh.num_sharing == 1:
        raise ChunkcError(
            f"the mesh {_text(sizes)} copies chunks that nobody divides; name that dimension dp_shard: ranks that "
            "divide chunks take batches of their own just the same"
        )


def _text(sizes: Mapping[str, int]) -> str:
    return ",".join(f"{name}={size}" for name, size in sizes.items())


def _some(ranks: Sequence[int], most: int = 8) -> str:
    return ", ".join(map(str, ranks[:most])) + (", ..." if len(ranks) > most else "")
