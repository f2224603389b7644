"""Styles of tensor parallelism that torch has not, for layers of transformers models.

    style           weight      bias        input of a rank   output of a rank   exchanged
    Conv1DColumns   Shard(1)    Shard(0)    whole             its columns        gradients of the input, in backward
    Conv1DRows      Shard(0)    whole       its columns       whole              the output, in forward
    HeadNorm        whole       whole       its heads         its heads          gradients of the weight, in backward

``Conv1D`` is the linear layer of GPT-2, whose weight is [inputs, outputs]: torch's ``ColwiseParallel`` and
``RowwiseParallel`` know ``nn.Linear``, whose weight is [outputs, inputs]. They do the same, after Shoeybi et al.,
"Megatron-LM" (2019), section 3. A norm of heads (Qwen3, Gemma 3) has one weight for all heads, and each rank those of
its own.

Import this module only where a model has such layers: torch's takes a while.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ParallelStyle

from chunkc.distributed.tensor_shards import divide_by_blocks


class Conv1DColumns(ParallelStyle):
    """Ranks have equal parts of the outputs: see the module docstring.

    ``num_blocks``: of the outputs, such as queries, keys and values, of each of which every rank has its part.
    """

    def __init__(self, num_blocks: int = 1) -> None:
        super().__init__()
        self._num_blocks = num_blocks

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _check(module)
        placements = {"weight": Shard(1), "bias": Shard(0), "inputs": Replicate(), "outputs": Shard(-1)}
        return _divided(module, device_mesh, **placements, num_blocks=self._num_blocks)


class Conv1DRows(ParallelStyle):
    """Ranks have equal parts of the inputs: see the module docstring."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _check(module)
        return _divided(module, device_mesh, weight=Shard(0), bias=Replicate(), inputs=Shard(-1), outputs=Replicate())


class HeadNorm(ParallelStyle):
    """Ranks have equal parts of the heads: see the module docstring.

    The last dimension alone is normalised, and gradients of the weight add up over all others. So dimension 1 stands
    for that of the heads, wherever it is.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return _divided(module, device_mesh, weight=Replicate(), bias=Replicate(), inputs=Shard(1), outputs=Shard(1))


def _check(module: nn.Module) -> None:
    """Refuse another layer in place of GPT-2's, as torch's styles do."""
    from transformers.pytorch_utils import Conv1D

    if type(module) is not Conv1D:
        raise NotImplementedError(f"{type(module).__name__} in place of Conv1D")


def _divided(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    weight: Placement,
    bias: Placement,
    inputs: Placement,
    outputs: Placement,
    num_blocks: int = 1,
) -> nn.Module:
    """Give ``module`` DTensors as parameters, between tensors placed as ``inputs`` and ``outputs`` say."""
    placements = {"weight": weight, "bias": bias}

    def divide(_: str, part: nn.Module, mesh: DeviceMesh) -> None:
        divide_by_blocks(part, mesh, placements, num_blocks)

    def take(_: nn.Module, args: tuple[torch.Tensor, ...], mesh: DeviceMesh) -> tuple[DTensor]:
        return (DTensor.from_local(args[0], mesh, [inputs], run_check=False),)

    def give(_: nn.Module, output: Any, mesh: DeviceMesh) -> torch.Tensor:
        local: torch.Tensor = output.redistribute(placements=[outputs]).to_local()
        return local

    distribute: Any = distribute_module  # whose annotation has hooks that return nothing
    changed: nn.Module = distribute(module, mesh, divide, take, give)
    return changed
