"""The torch.distributed job that this process belongs to: NCCL where there is a GPU, else gloo."""

from __future__ import annotations

import os

import torch

from chunkc._torch_compat import distributed as dist
from chunkc.distributed.agreement import Kind
from chunkc.distributed.gloo import Allocator
from chunkc.distributed.mesh import RankMesh, rank_mesh
from chunkc.distributed.process_group import JobRanks, Ranks
from chunkc.distributed.stages import StageLine, StagePlace
from chunkc.errors import ChunkcError, RankError
from chunkc.hardware import Hardware, present_gpu


def join() -> None:
    """Join the job that torchrun has started, if the script has not; this rank's GPU becomes current.

    Raises HardwareError when there are fewer GPUs than ranks of this machine, RankError when joining fails.
    """
    has_joined = dist.is_in_job()
    if not has_joined and int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    gpu = present_gpu()
    if gpu is not None:
        torch.cuda.set_device(gpu.index)
    if has_joined:
        return
    try:
        dist.join("gloo" if gpu is None else "nccl")
    except (RuntimeError, ValueError) as error:
        raise RankError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} says that this process is one of several, but it cannot join them: "
            f"{error}. Start it by torchrun, or call torch.distributed.init_process_group before chunkc.compile"
        ) from error


def is_first_rank() -> bool:
    """Whether this process is rank 0 of its job, joined or as torchrun says, or alone."""
    return dist.job_rank() == 0 if dist.is_in_job() else os.environ.get("RANK", "0") == "0"


def lay_out(mesh: dist.DeviceMesh | str | None, machine: Hardware, shard: str) -> RankMesh:
    """The job's ranks on ``machine`` by ``mesh``, or, where it is None, as ``shard`` divides model data.

    Raises ChunkcError for a mesh that is not of just these ranks, or that ``shard`` contradicts.
    """
    num_sharing, num_replicas = machine.job_sharding(shard)
    default = RankMesh.of_data(num_sharing * num_replicas, num_sharing)
    _check_shard(mesh, shard)
    return rank_mesh(mesh, len(default.ranks), default, dist.job_rank() if dist.is_in_job() else 0)


def lay_out_ahead(
    mesh: dist.DeviceMesh | str | None,
    machine: Hardware,
    shard: str,
    world_size: int | None,
    stage: StagePlace | None = None,
) -> RankMesh:
    """`lay_out` for ``world_size`` ranks on ``machine``, by default all, whatever job runs here, if any.

    The ranks are those of ``stage``. Raises ChunkcError, also for stages of a pipeline where the model is none of them.
    """
    num_sharing, num_replicas = machine.sharding(shard, world_size)
    default = RankMesh.of_data(num_sharing * num_replicas, num_sharing)
    _check_shard(mesh, shard)
    first = 0 if stage is None else (stage.place - 1) * (len(default.ranks) // stage.num_places)
    laid_out = rank_mesh(mesh, len(default.ranks), default, first, owner=f"the plan for {machine}")
    if stage is not None and stage.num_places != laid_out.num_stages:
        raise ChunkcError(f"{stage}, and the mesh {mesh} has {laid_out.num_stages} stages along pp")
    if laid_out.num_stages > 1 and stage is None:
        raise ChunkcError(
            f"the mesh has {laid_out.num_stages} stages of a pipeline (pp), which chunkc.plan does not divide a model "
            f"into: plan each stage as a model, with world_size={len(laid_out.ranks)}, accumulate= and in_flight=, and "
            "leave pp out of the mesh. The command `chunkc plan` divides the models that it builds"
        )
    return laid_out


def _check_shard(mesh: dist.DeviceMesh | str | None, shard: str) -> None:
    if mesh is not None and shard != "all":
        raise ChunkcError(f"shard={shard!r} beside mesh=: name the dimensions dp_replicate and dp_shard of the mesh")


def make_ranks(device: torch.device, mesh: RankMesh, allocate: Allocator, *, adds_in_float32: bool) -> Ranks:
    """Make the ranks of a model on ``device``: those of this rank's stage of ``mesh``.

    All ranks of the job make theirs at the same time, in the same order of models; RankError when some do not.
    ``allocate``: uint8 host memory of so many bytes. ``adds_in_float32``: NCCL, too, adds up gradients in float32.
    """
    if not dist.is_in_job() or dist.job_size() == 1:
        return Ranks()
    rank, size, store = dist.job_rank(), dist.job_size(), dist.job_store()
    number = int(store.add(f"chunkc/models/{rank}", 1))
    backend = "nccl" if device.type == "cuda" else "gloo"
    of_job = mesh if mesh.num_stages == 1 else RankMesh.of_data(size, size)
    ranks = JobRanks(rank, of_job, dist.job_timeout(), store, number)
    shared = f"model data is divided over {mesh.num_sharing} ranks of {size}, gradients are added up "
    shared += "in float32" if adds_in_float32 else "as the backend does"
    ranks.agree(Kind.COMPILE, lambda: [f"model number {number} of the job", shared, f"mesh {mesh}"])
    found: Ranks = ranks
    if mesh.num_stages > 1:
        line = StageLine(mesh, rank, number, backend, device, store, dist.job_timeout())
        found = _of_stage(mesh, rank, number, ranks, line)
    if isinstance(found, JobRanks):
        found.connect(backend, device, allocate, adds_in_float32=adds_in_float32)
    return found


def _of_stage(mesh: RankMesh, rank: int, number: int, of_job: Ranks, line: StageLine) -> Ranks:
    """The ranks of the stage of ``rank``, one of those ``of_job``."""
    ranks = Ranks()
    if len(mesh.ranks) > 1:
        name = f"{number}/stage {mesh.stages.index(mesh.ranks)}"
        ranks = JobRanks(rank, mesh, dist.job_timeout(), dist.job_store(), name)
    ranks.all_stages, ranks.line = of_job, line
    return ranks
