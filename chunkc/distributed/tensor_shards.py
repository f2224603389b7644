"""Parameters divided by DTensor: the part that a rank trains, and the tensor that it is a part of.

A model that ``torch.distributed.tensor.parallel.parallelize_module`` has prepared computes on DTensors. Each stands for
a whole tensor, of which a rank has its part (``Shard``) or a copy (``Replicate``). Chunks hold what a rank has; the
model's operators, state dicts and loaded values have the whole:

    chunks ─ local part ─ `TensorShard.view`, in forward ─ DTensor ─ the model's operators and their collectives
                        └ `TensorShard.whole`, in a state dict
    loaded value ─ `TensorShard.part` ─ chunks

A matrix whose columns are several blocks, such as queries, keys and values, is divided block by block. The DTensor that
operators see then has its columns in the order of ranks, as Megatron-LM keeps them, and all others in that of blocks:

    state dicts, checkpoints, loaded values    Q0 Q1  K0 K1  V0 V1
    the model's operators                      Q0 K0 V0  Q1 K1 V1

Import this module only where a model has DTensors: torch's takes a while.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from chunkc._torch_compat.distributed import DeviceMesh
from chunkc.distributed.mesh import RankMesh
from chunkc.errors import ChunkcError

_NUM_BLOCKS: Final = "chunkc_num_blocks"
"""The attribute of a module whose parameters are divided block by block. Those may be replaced, as by ``Module.to``."""


def divide_by_blocks(module: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Placement], num_blocks: int) -> None:
    """Give ``module`` DTensors as parameters, of each of whose blocks every rank has its part.

    Args:
        module: whose parameters have ``num_blocks`` equal blocks along the dimension that is divided.
        mesh: of one dimension.
        placements: of the parameters, by name.
    """
    for name, param in list(module.named_parameters(recurse=False)):
        whole, placement = param.detach(), placements[name]
        if num_blocks > 1 and isinstance(placement, Shard):
            whole = _regrouped(whole, placement.dim, num_blocks, mesh.size())
        tensor = distribute_tensor(whole, mesh, [placement])
        module.register_parameter(name, nn.Parameter(tensor, requires_grad=param.requires_grad))
    setattr(module, _NUM_BLOCKS, num_blocks)


def _regrouped(whole: torch.Tensor, dim: int, outer: int, inner: int) -> torch.Tensor:
    """``outer`` groups of ``inner`` parts along ``dim``, as ``inner`` groups of ``outer`` parts."""
    groups = whole.view(*whole.shape[:dim], outer, inner, -1, *whole.shape[dim + 1 :])
    return groups.transpose(dim, dim + 1).reshape(whole.shape)


@dataclass(frozen=True, slots=True, eq=False)
class TensorShard:
    """Where this rank's part of a tensor of ``shape`` and ``stride`` lies along dimensions of ``mesh``.

    ``num_blocks``: of which a rank has a part each; 1 where its part is in one piece.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    num_blocks: int = 1

    @staticmethod
    def of(tensor: torch.Tensor, module: nn.Module) -> TensorShard:
        """The place of the part of a DTensor that ``module`` holds; TypeError for another tensor."""
        if not isinstance(tensor, DTensor):
            raise TypeError(f"not a DTensor: {type(tensor).__name__}")
        placements = tuple(tensor.placements)
        num_blocks = getattr(module, _NUM_BLOCKS, 1) if any(isinstance(p, Shard) for p in placements) else 1
        return TensorShard(tensor.device_mesh, placements, tensor.shape, tuple(tensor.stride()), num_blocks)

    @property
    def is_divided(self) -> bool:
        """Whether ranks have different parts; else each has a copy of the whole."""
        return any(isinstance(placement, Shard) for placement in self.placements)

    @property
    def divided_dim(self) -> int:
        """The dimension that is divided; ValueError where none is."""
        for placement in self.placements:
            if isinstance(placement, Shard):
                return placement.dim
        raise ValueError(f"ranks have copies: {self.placements}")

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where this rank's part begins in the DTensor that operators see."""
        offsets, places = [0] * len(self.shape), self.mesh.get_coordinate() or ()
        for placement, place, size in zip(self.placements, places, self.mesh.shape, strict=True):
            if isinstance(placement, Shard):
                offsets[placement.dim] += place * (self.shape[placement.dim] // size)
        return tuple(offsets)

    def check(self, name: str, mesh: RankMesh) -> None:
        """Refuse, by ChunkcError, what the ranks along ``tp`` do not have in equal parts or as copies."""
        line = next((line for line in mesh.tensor_lines if self.mesh.get_rank() in line), ())
        if self.mesh.mesh.tolist() != list(line):
            raise ChunkcError(
                f"parameter {name} is a DTensor over ranks {self.mesh.mesh.tolist()}, but the ranks along tp are here "
                f"{list(line)} (mesh: {mesh or 'one rank'}). Parallelise the model over mesh['tp'] and hand the whole "
                "mesh to chunkc.compile or chunkc.plan, which divide model data over the others: leave fully_shard away"
            )
        kinds = {type(placement) for placement in self.placements}
        if kinds - {Shard, Replicate}:
            found = ", ".join(map(str, self.placements))
            raise ChunkcError(f"parameter {name} has placements {found}; supported are Shard and Replicate")
        for placement in self.placements:
            if isinstance(placement, Shard) and self.shape[placement.dim] % (len(line) * self.num_blocks):
                raise ChunkcError(
                    f"parameter {name} of shape {tuple(self.shape)} does not divide evenly into {len(line)} parts "
                    f"along dimension {placement.dim}: pad it, or leave it out of the parallel plan"
                )

    def view(self, local: torch.Tensor) -> DTensor:
        """The DTensor of the parts ``local``; gradients come back in the placement of the parameter.

        The ranks' gradients of a copy add up where they come from different elements (``Partial``, as of a norm under
        sequence parallelism): by an all-reduce, in backward.
        """
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )

    def whole(self, value: torch.Tensor) -> DTensor:
        """The DTensor of the parts ``value`` in the order of blocks; collective where there are several."""
        if self.num_blocks == 1:
            return self.view(value.detach())
        return distribute_tensor(self.gathered(value), self.mesh, self.placements, src_data_rank=None)

    def gathered(self, local: torch.Tensor) -> torch.Tensor:
        """The whole tensor of all ranks' parts ``local``; collective among those of the mesh."""
        if not self.is_divided:
            return local
        whole = self.view(local.detach()).full_tensor()
        if self.num_blocks == 1:
            return whole
        return _regrouped(whole, self.divided_dim, self.mesh.size(), self.num_blocks)

    def is_exchanged(self, value: torch.Tensor) -> bool:
        """Whether `part` exchanges between ranks to find this rank's part of ``value``."""
        if value.shape != self.shape or not isinstance(value, DTensor):
            return False
        return self.num_blocks > 1 or value.device_mesh != self.mesh or tuple(value.placements) != self.placements

    def part(self, value: torch.Tensor) -> torch.Tensor:
        """This rank's part of ``value``, a DTensor in any placement or a whole tensor that all ranks have.

        Tensors of another shape are returned as they are. Collective where `is_exchanged`.
        """
        if value.shape != self.shape:
            return value
        value = value.detach()
        if isinstance(value, DTensor):
            if any(isinstance(placement, Partial) for placement in value.placements):
                raise ChunkcError("a DTensor of sums that are still to be added up cannot be loaded")
            if not self.is_exchanged(value):
                return value.to_local()
            value = value.full_tensor()
        if not self.is_divided:
            return value
        if self.num_blocks > 1:
            value = _regrouped(value, self.divided_dim, self.num_blocks, self.mesh.size())
        return distribute_tensor(value, self.mesh, self.placements, src_data_rank=None).to_local()
