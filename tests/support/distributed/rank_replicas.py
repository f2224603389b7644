"""Digests and groups of each rank where several nodes have all of the model data, though reads show the first."""

import hashlib
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from rank_scaling import Scaled, train_scaled
from scripted_loops import Seen, side_on_rank

from chunkc._torch_compat.distributed import DeviceMesh, end_group, new_mesh
from chunkc.compiler.compiled_model import compiled_of
from chunkc.distributed.data_group import DataGroup
from chunkc.distributed.job import make_ranks
from chunkc.distributed.mesh import RankMesh
from chunkc.distributed.process_group import DP_REPLICATE, DP_SHARD
from chunkc.runtime.devices.host_slab import map_private

TWO_NODES = "2x2xemulated-640k-64m"
NODE: dict[str, Any] = {"shard": "node"}


def own_digest(model: Any) -> str:
    runtime, found = compiled_of(model).runtime, hashlib.sha256()
    reader = runtime.parameters.snapshot(1 << 30)
    places = runtime.layout.placements
    for index in sorted(range(len(runtime.params)), key=lambda i: (places[i].chunk, places[i].offset)):
        if runtime.infos[index].numel and runtime.parameters.is_trained(index):
            flats = [flat for position in range(3) for flat in reader.read(index, position)]
            found.update(b"".join(flat.view(torch.uint8).numpy().tobytes() for flat in flats))
    runtime.parameters.end_snapshot(reader)
    return found.hexdigest()


def scripts_on_nodes(
    scripts: Sequence[str], hw: str = TWO_NODES, accumulate: int = 1, cuts_off: int | None = None
) -> tuple[list[Seen], list[str]]:
    """`scripts_on_ranks` divided within nodes, and digests; from script ``cuts_off`` on means stay within nodes."""
    side = side_on_rank(hw, accumulate=accumulate, **NODE)
    ranks: Any = compiled_of(side.model).runtime.ranks
    found, digests = [], []
    for number, script in enumerate(scripts):
        if number == cuts_off:
            del ranks._data_groups[DP_REPLICATE]
        found += side.run_each([script])
        digests.append(own_digest(side.model))
    return found, digests


def train_scaled_on_nodes() -> Scaled:
    return train_scaled(TWO_NODES, **NODE)


def compile_apart() -> None:
    """One rank would divide model data in another way than the others."""
    shard = "all" if torch.distributed.get_rank() == 3 else "node"
    side_on_rank(TWO_NODES, shard=shard)


def mesh_of_all() -> DeviceMesh:
    shape = {DP_SHARD: torch.distributed.get_world_size()}
    return new_mesh("gloo", timedelta(seconds=60), torch.device("cpu"), shape)


def data_groups(num_sharing: int) -> list[tuple[tuple[int, int], dict[str, tuple[list[int], timedelta]]]]:
    """This rank's coordinates in two models, both closed then, with ranks and timeout of its groups."""
    before, mesh = num_groups(), RankMesh.of_data(torch.distributed.get_world_size(), num_sharing)
    models: list[Any] = [make_ranks(torch.device("cpu"), mesh, map_private, adds_in_float32=False) for _ in range(2)]
    found = [((ranks.replica, ranks.shard_rank), described_groups(ranks)) for ranks in models]
    assert num_groups() == before + sum(1 + len(groups) for _, groups in found)
    held = [weakref.ref(data._group) for ranks in models for data in ranks._data_groups.values()]
    for ranks in models:
        ranks.close()
    assert num_groups() == before and not any(group() for group in held)
    return found


def described_groups(ranks: Any) -> dict[str, tuple[list[int], timedelta]]:
    groups = {dim: data._group for dim, data in ranks._data_groups.items()}
    return {
        dim: (
            torch.distributed.get_process_group_ranks(group),
            group._get_backend(torch.device("cpu")).options._timeout,
        )
        for dim, group in groups.items()
    }


def num_groups() -> int:
    return len(torch.distributed.distributed_c10d._world.pg_map)


def mean_of_own(numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    rank = torch.distributed.get_rank()
    own = torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)
    group = DataGroup(mesh_of_all(), map_private, is_direct=True, adds_in_float32=False)
    mean = own.clone()
    group.mean(mean)
    group.close()
    return own, mean


def reduced(numel: int, dtype: torch.dtype, adds_in_float32: bool, mean: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Random contributions of this rank, and its own reduced, by the collectives of a backend for other devices."""
    rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    before = torch.randn(num_ranks * numel, generator=torch.Generator().manual_seed(rank)).to(dtype)
    mesh = mesh_of_all()
    group = DataGroup(mesh, map_private, is_direct=False, adds_in_float32=adds_in_float32)
    group.warm_up(torch.device("cpu"))
    whole = before.clone()
    group.reduce(whole[rank * numel : (rank + 1) * numel], whole, mean=mean)
    group.close()
    end_group(mesh.get_group())  # such a group is left to the end of the job
    return before, whole
