"""Division of a user's model over ranks along ``tp``, by the parallel plan of its architecture.

`chunkc.scenarios.models.parallel` has the plans. A model that computes on DTensors already stays as it is: its user has
divided it. Weights are whole on every rank until then, and each gets its parts of those of the first rank along ``tp``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from chunkc._torch_compat.collectives import is_dtensor
from chunkc._torch_compat.distributed import DeviceMesh
from chunkc.distributed.mesh import TP, RankMesh
from chunkc.errors import ChunkcError
from chunkc.scenarios.slicing import sliced

logger = logging.getLogger("chunkc")


@contextmanager
def divided(model: nn.Module, mesh: DeviceMesh | str | None, ranks: RankMesh, device_type: str) -> Iterator[None]:
    """Divide a transformers model over the ranks along ``tp``, or let it see slices of all along ``cp``.

    For good, unless the block raises. Other models, divided ones, and ranks without ``tp`` and ``cp`` are left as they
    are. All ranks of the job call it.

    Raises:
        ChunkcError: for an architecture without a plan, sizes that the ranks do not divide, and GPUs; for one
            whose attention over slices is not known.
    """
    with sliced(model, ranks), _divided(model, mesh, ranks, device_type):
        yield


@contextmanager
def _divided(model: nn.Module, mesh: DeviceMesh | str | None, ranks: RankMesh, device_type: str) -> Iterator[None]:
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if ranks.num_tensor == 1 or kind is None or any(map(is_dtensor, model.parameters())):
        yield
        return
    from chunkc.scenarios.models.parallel import parallelise

    name = type(model).__name__
    if device_type != "cpu":
        raise ChunkcError(
            f"mesh {ranks}: models are divided along tp on emulated devices alone so far, and {name} is to train on "
            f"{device_type}; use dp_shard there"
        )
    with _unchanged_on_error(model):
        parallelise(model, name, _line(mesh, ranks))
        logger.info("%s is divided over the %d ranks along tp by the plan of its architecture", name, ranks.num_tensor)
        yield


def _line(mesh: DeviceMesh | str | None, ranks: RankMesh) -> Any:
    """The ranks along ``tp`` of this one."""
    if isinstance(mesh, DeviceMesh):
        return mesh[TP]
    from torch.distributed.device_mesh import init_device_mesh

    names, sizes = zip(*ranks.dims, strict=True)
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)[TP]


@contextmanager
def _unchanged_on_error(model: nn.Module) -> Iterator[None]:
    """Give modules back what they held, hooks and classes too, where the block raises."""
    before = [(module, type(module), vars(module).copy()) for module in model.modules()]
    tables = [
        (held, held.copy()) for *_, attributes in before for held in attributes.values() if isinstance(held, dict)
    ]
    try:
        yield
    except BaseException:
        for module, cls, attributes in before:
            module.__class__ = cls
            vars(module).clear()
            vars(module).update(attributes)
        for held, values in tables:
            held.clear()
            held.update(values)
        raise
