"""A job of ranks that do not exist, over which a model is parallelised to be planned.

torch's backend ``"fake"`` has all groups and meshes of a real one, and its collectives do nothing. torch keeps it among
its own test helpers, whose import registers it. Seen on torch 2.11.0 and 2.13.0.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from chunkc.errors import ChunkcError


@contextmanager
def fake_job(num_ranks: int) -> Iterator[None]:
    """Within the block this process is the first of ``num_ranks``; ChunkcError where it belongs to a job."""
    if dist.is_initialized():
        raise ChunkcError(f"a process of a job cannot stand for the first of {num_ranks} other ranks")
    fake = importlib.import_module("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _forget_meshes()


def _forget_meshes() -> None:
    """Clear what DTensor keeps by mesh: a mesh of the next job may be equal, and its groups are others."""
    debug = importlib.import_module("torch.distributed.tensor.debug")
    debug._clear_sharding_prop_cache()


def first_line(num_ranks: int, name: str) -> DeviceMesh:
    """The first ranks of a job as a mesh of the one dimension ``name``; ChunkcError where there are none."""
    if not dist.is_initialized() or dist.get_world_size() < num_ranks:
        raise ChunkcError(f"{name}={num_ranks} needs a process group of as many ranks, if a fake one")
    return init_device_mesh("cpu", (num_ranks,), mesh_dim_names=(name,))
