"""Parts in place of DTensors: what a module holds under tensor parallelism, and what forward reads.

    before     module._parameters["weight"]   a DTensor
    after      module._parameters["weight"]   this rank's part, an ordinary parameter, which can be managed
               module.weight                  the DTensor over it, made when it is read

So compiled graphs take plain tensors, and what DTensor does is traced inside of them, collectives included. The class
of the module becomes a subclass with a property for each such parameter, as torch's parametrizations do it, and
SimpleFSDP for the same reason (Zhang et al., "SimpleFSDP: Simpler Fully Sharded Data Parallel with torch.compile",
2024).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from chunkc._torch_compat.collectives import is_dtensor
from chunkc.distributed.agreement import Kind
from chunkc.distributed.mesh import RankMesh
from chunkc.distributed.process_group import Ranks
from chunkc.errors import ChunkcError

if TYPE_CHECKING:
    from chunkc.distributed.tensor_shards import TensorShard


class TensorViews:
    """The DTensors of one model: ``shards`` by the DTensor; see the module docstring."""

    def __init__(self, model: nn.Module, shards: Mapping[nn.Parameter, TensorShard]) -> None:
        self._model, self._shards = model, shards
        self._places = [
            (module, name, param)
            for module in model.modules()
            for name, param in module._parameters.items()
            if param is not None and param in shards
        ]

    @property
    def is_any(self) -> bool:
        return bool(self._places)

    @contextmanager
    def installed(self, ranks: Ranks) -> Iterator[dict[nn.Parameter, TensorShard]]:
        """Give modules parts, for good unless the block raises; ``shards`` by part.

        What is no DTensor must be the same on all ranks that compute together: the job's first rank gives it to them.
        """
        replaced = list[tuple[nn.Module, type[nn.Module]]]()
        try:
            shards = self._install(replaced)
            _share(self._model, shards, ranks)
            yield shards
        except BaseException:
            self._remove(replaced)
            raise

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Give modules parts within the block. Ranks exchange nothing, so there may be none."""
        replaced = list[tuple[nn.Module, type[nn.Module]]]()
        try:
            self._install(replaced)
            yield
        finally:
            self._remove(replaced)

    def _install(self, replaced: list[tuple[nn.Module, type[nn.Module]]]) -> dict[nn.Parameter, TensorShard]:
        """Give modules parts, and note in ``replaced`` the classes that they had; the shards by part."""
        parts = {tensor: part_of(tensor) for tensor in dict.fromkeys(tensor for _, _, tensor in self._places)}
        for module, name, tensor in self._places:
            module._parameters[name] = parts[tensor]
        for module in self._modules():
            own = {name: self._shards[tensor] for holder, name, tensor in self._places if holder is module}
            cls = type(module)
            _replace_class(module, own)
            replaced.append((module, cls))
        return {part: self._shards[tensor] for tensor, part in parts.items()}

    def _remove(self, replaced: Sequence[tuple[nn.Module, type[nn.Module]]]) -> None:
        for module, name, tensor in self._places:
            module._parameters[name] = tensor
        for module, cls in replaced:
            module.__class__ = cls

    def _modules(self) -> list[nn.Module]:
        return list(dict.fromkeys(module for module, _, _ in self._places))


def views_of(model: nn.Module, mesh: RankMesh) -> TensorViews:
    """The DTensors of a model for ranks of ``mesh``; ChunkcError for those that it cannot be trained with."""
    names = {param: name for name, param in model.named_parameters() if is_dtensor(param)}
    if not names:
        if mesh.num_tensor > 1:
            raise ChunkcError(
                f"the mesh has tp={mesh.num_tensor}, but no parameter of {type(model).__name__} is a DTensor: "
                "parallelise it first (torch.distributed.tensor.parallel.parallelize_module over mesh['tp']; without "
                "a job, over a fake process group). chunkc.compile does that for models of transformers"
            )
        return TensorViews(model, {})
    from chunkc.distributed.tensor_shards import TensorShard

    held = ((param, module) for module in model.modules() for param in module.parameters(recurse=False))
    shards = {param: TensorShard.of(param, module) for param, module in held if param in names}
    for param, shard in shards.items():
        shard.check(names[param], mesh)
    recurrent = [m for m in model.modules() if isinstance(m, nn.RNNBase) and any(map(is_dtensor, m.parameters()))]
    buffers = [name for name, buffer in model.named_buffers() if is_dtensor(buffer)]
    if buffers:
        raise ChunkcError(f"buffers that are DTensors are not supported: {', '.join(buffers[:5])}")
    if recurrent:
        raise ChunkcError(f"{type(recurrent[0]).__name__} keeps its weights in a list, which cannot hold DTensors")
    return TensorViews(model, shards)


def part_of(tensor: Any) -> nn.Parameter:
    with torch.no_grad():
        return nn.Parameter(tensor.to_local().detach(), requires_grad=tensor.requires_grad)


def _share(model: nn.Module, shards: Mapping[nn.Parameter, TensorShard], ranks: Ranks) -> None:
    """Give all ranks what the job's first one has of the parameters that are no DTensors.

    Raises:
        RankError: when some have values of a parameter that others have on the meta device.
    """
    if ranks.tensor_size == 1:
        return
    copied = {name: param for name, param in model.named_parameters() if param not in shards}
    ranks.agree(Kind.COMPILE, lambda: [f"{n} has {'no ' if p.is_meta else ''}values" for n, p in copied.items()])
    for param in copied.values():
        if not param.is_meta:
            value = param.detach().contiguous()
            ranks.broadcast_in_job(value)
            with torch.no_grad():
                param.copy_(value)
    ranks.uncounted = _uncounted(model, shards, ranks.tensor_rank)


def _uncounted(model: nn.Module, shards: Mapping[nn.Parameter, TensorShard], tensor_rank: int) -> frozenset[int]:
    """Parameters, by index, that the first of the ranks along ``tp`` has just the same as this one."""
    divided = {param for param, shard in shards.items() if shard.is_divided}
    return frozenset(i for i, param in enumerate(model.parameters()) if tensor_rank > 0 and param not in divided)


def _replace_class(module: nn.Module, shards: Mapping[str, TensorShard]) -> None:
    """Read the parameters of ``module`` in ``shards`` as DTensors, or raise ChunkcError."""
    try:
        module.__class__ = _viewing(type(module), shards)
    except TypeError as error:
        raise ChunkcError(
            f"the parameters {', '.join(shards)} of a {type(module).__name__} are DTensors, but its class cannot be "
            f"given properties for them: {error}"
        ) from error


def _viewing(cls: type[nn.Module], shards: Mapping[str, TensorShard]) -> type[nn.Module]:
    """A subclass of ``cls``, of the same name, whose parameters in ``shards`` are read as DTensors."""
    views: dict[str, Any] = {name: _property(name, shard) for name, shard in shards.items()}
    views |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), views)


def _property(name: str, shard: TensorShard) -> property:
    def view(self: nn.Module) -> Any:
        param = self._parameters[name]
        return None if param is None else shard.view(param)

    return property(view)
