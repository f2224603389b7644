"""Parameters divided by DTensor: the part that a rank trains, and the tensor that it is a part of.

A model that ``torch.distributed.tensor.parallel.parallelize_module`` has prepared computes on DTensors. Each stands for
a whole tensor, of which a rank has its part (``Shard``) or a copy (``Replicate``). Chunks hold what a rank has; the
model's operators, state dicts and loaded values have the whole:

    chunks ─ local part ─ `TensorShard.view`, in forward ─ DTensor ─ the model's operators and their collectives
                        └ `TensorShard.whole`, in a state dict
    loaded value ─ `TensorShard.part` ─ chunks

Import this module only where a model has DTensors: torch's takes a while.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from chunkc._torch_compat.distributed import DeviceMesh
from chunkc.distributed.mesh import RankMesh
from chunkc.errors import ChunkcError


@dataclass(frozen=True, slots=True, eq=False)
class TensorShard:
    """Where this rank's part of a tensor of ``shape`` and ``stride`` lies along dimensions of ``mesh``."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorShard:
        """The place of a DTensor's part; TypeError for another tensor."""
        if not isinstance(tensor, DTensor):
            raise TypeError(f"not a DTensor: {type(tensor).__name__}")
        return TensorShard(tensor.device_mesh, tuple(tensor.placements), tensor.shape, tuple(tensor.stride()))

    @property
    def is_divided(self) -> bool:
        """Whether ranks have different parts; else each has a copy of the whole."""
        return any(isinstance(placement, Shard) for placement in self.placements)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where this rank's part begins in the whole tensor."""
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
            if isinstance(placement, Shard) and self.shape[placement.dim] % len(line):
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
        """`view` of a value that nothing is to be differentiated by."""
        return self.view(value.detach())

    def gathered(self, local: torch.Tensor) -> torch.Tensor:
        """The whole tensor of all ranks' parts ``local``; collective among those of the mesh."""
        return self.whole(local).full_tensor() if self.is_divided else local

    def part(self, value: torch.Tensor) -> torch.Tensor:
        """This rank's part of ``value``, a DTensor in any placement or a whole tensor that all ranks have.

        Tensors of another shape are returned as they are.
        """
        if value.shape != self.shape:
            return value
        if not isinstance(value, DTensor):
            if not self.is_divided:
                return value
            value = distribute_tensor(value, self.mesh, self.placements, src_data_rank=None)
        elif value.device_mesh != self.mesh or tuple(value.placements) != self.placements:
            if any(isinstance(placement, Partial) for placement in value.placements):
                raise ChunkcError("a DTensor of sums that are still to be added up cannot be loaded")
            value = distribute_tensor(value.full_tensor(), self.mesh, self.placements, src_data_rank=None)
        return value.to_local()
