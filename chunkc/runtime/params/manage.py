"""Turn the parameters of a module into managed ones, all of them or none."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from chunkc._torch_compat.core import swap_tensors
from chunkc.errors import ChunkcError
from chunkc.ir.schedule import ParamInfo
from chunkc.runtime.params.managed_tensor import ManagedTensor, ValueStore
from chunkc.runtime.params.shell import Shell


def manage(
    param: torch.nn.Parameter, info: ParamInfo, index: int, runtime: ValueStore, device: torch.device
) -> torch.nn.Parameter:
    """Turn ``param`` into a managed parameter on ``device``; the object stays the same, its payload goes.

    Returns a parameter that now holds the payload; swapping it with ``param`` undoes everything. Raises RuntimeError
    (``torch.utils.swap_tensors``) when something else holds on to the parameter's insides.
    """
    shell = Shell.of(info, device, requires_grad=param.requires_grad)
    managed = torch.nn.Parameter(ManagedTensor(shell, "param", index, runtime), requires_grad=param.requires_grad)
    managed.__dict__.update(param.__dict__)
    swap_tensors(param, managed)
    return managed


def manage_all(
    params: Sequence[torch.nn.Parameter], infos: Sequence[ParamInfo], runtime: ValueStore, device: torch.device
) -> None:
    """Make all parameters managed, or none; raises `ChunkcError` that names the first that cannot."""
    done: list[tuple[torch.nn.Parameter, torch.nn.Parameter]] = []
    for index, (param, info) in enumerate(zip(params, infos, strict=True)):
        try:
            done.append((param, manage(param, info, index, runtime, device)))
        except RuntimeError as error:
            for swapped, original in done:
                swap_tensors(swapped, original)
            raise ChunkcError(
                f"parameter {info.name} cannot be managed because something holds on to it: an autograd graph of an "
                "earlier forward, a weak reference, or another torch.compile. Call chunkc.compile before the model is "
                f"used ({error})"
            ) from error
