"""torch.distributed as chunkc uses it: a mesh of own groups, six collectives.

``all_gather_into_tensor`` and ``reduce_scatter_tensor`` are deprecated from torch 2.13 on, and their new names missing
before. The methods of a process group behind both are the same in 2.11, 2.13 and 2.15.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as DeviceMesh
from torch.distributed.distributed_c10d import Store as Store

from chunkc._torch_compat import rendezvous

Group = dist.ProcessGroup


def is_in_job() -> bool:
    return dist.is_available() and dist.is_initialized()


def join(backend: str) -> None:
    """Join the job that the environment (torchrun's) names, with torch's usual timeout."""
    store, rank, world_size = rendezvous.meet(dist.default_pg_timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)


def job_rank() -> int:
    return dist.get_rank()


def job_size() -> int:
    return dist.get_world_size()


def job_timeout() -> timedelta:
    """Return the timeout that ``init_process_group`` was given, or its default."""
    group = _world()
    timeout: timedelta = group._get_backend(_device_of(group)).options._timeout
    return timeout


def job_store() -> Any:
    return dist.distributed_c10d._get_default_store()


def new_group(backend: str, timeout: timedelta, device: torch.device, sets: Sequence[Sequence[int]]) -> Group:
    """The group of this rank's set; all ranks make the groups of all ``sets``, in order and at once."""
    options: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    groups = [dist.new_group(list(ranks), backend=backend, timeout=timeout, **options) for ranks in sets]
    own = [group for group in groups if isinstance(group, Group)]
    if len(own) != 1:
        raise RuntimeError(f"torch.distributed made {len(own)} groups of rank {job_rank()} for backend {backend!r}")
    return own[0]


def new_mesh(
    backend: str,
    timeout: timedelta,
    device: torch.device,
    shape: Mapping[str, int],
    stages: Sequence[Sequence[int]] = (),
) -> DeviceMesh:
    """Lay the ranks of this one's stage out by ``shape``, with new groups along each dimension.

    Every rank of the job calls this at the same time. ``shape``: sizes of named dimensions. ``stages``: their ranks;
    none: all ranks are one stage. Ranks that follow each other differ along the last dimension. ``init_device_mesh``
    takes neither a timeout nor the device that NCCL binds, and shares the job's own group.
    """
    grids = [torch.tensor(list(ranks), device="cpu").view(*shape.values()) for ranks in stages or [range(job_size())]]
    groups = []
    for dim, size in enumerate(shape.values()):
        lines = [line for grid in grids for line in grid.movedim(dim, -1).reshape(-1, size).tolist()]
        groups.append(new_group(backend, timeout, device, lines))
    own = next(grid for grid in grids if job_rank() in grid)
    return DeviceMesh.from_group(groups, device.type, own, mesh_dim_names=tuple(shape))


def end_group(group: Group) -> None:
    """This process uses ``group`` no more: once nobody holds it, those who wait for this rank there fail."""
    if is_in_job():
        dist.destroy_process_group(group)


def all_gather(group: Group, whole: torch.Tensor, own: torch.Tensor) -> None:
    """Fill ``whole`` with the ``own`` of all ranks; ``own`` may be this rank's part of it."""
    _finish(group._allgather_base(whole, own))


def reduce_scatter(group: Group, own: torch.Tensor, whole: torch.Tensor, *, mean: bool) -> None:
    """Into ``own`` the sum or mean over all ranks of this rank's part of ``whole``; it may be that part."""
    options = dist.ReduceScatterOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM)
    _finish(group._reduce_scatter_base(own, whole, options))


def reduce(group: Group, tensor: torch.Tensor, *, mean: bool) -> None:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM)
    _finish(group.allreduce([tensor], options))


def all_to_all(group: Group, received: torch.Tensor, sent: torch.Tensor) -> None:
    """Send row ``r`` of ``sent`` to rank ``r``, receive row ``r`` of ``received`` from it, contiguous."""
    _finish(group.alltoall_base(received.view(-1), sent.view(-1), [], []))


def broadcast(group: Group, tensor: torch.Tensor, source: int) -> None:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = source, 0
    _finish(group.broadcast([tensor], options))


def is_exchange_error(error: BaseException) -> bool:
    """Whether a backend raised ``error``: gloo raises RuntimeErrors that name its files."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def _finish(work: Any) -> None:
    """Wait for ``work`` on the host; on a GPU the current stream waits instead."""
    if work is not None:
        work.wait()


def _world() -> Group:
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("torch.distributed is not initialised")
    return group


def _device_of(group: Group) -> torch.device:
    devices = [str(d) for d in group._device_types]
    return torch.device("cpu" if any(d.startswith("cpu") for d in devices) else devices[0])
