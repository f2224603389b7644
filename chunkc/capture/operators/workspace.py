"""Bytes that an operator's kernel may allocate while it runs, beyond its inputs and outputs.

The plan states this allowance per segment, to hold a measured peak against. PyTorch's CPU kernels were measured one by
one with malloc's own count (torch 2.13, 2 and 8 threads); what CUDA's take was read in their sources, not measured.

    operator                     what its kernel allocates on the CPU
    matrix product, fp32         nothing: MKL packs operands into buffers of its own, which no reading counts
    matrix product, 16 bits      packed copies of the operands and an fp32 result: at most all operands and the result
    convolution                  oneDNN's blocked copies of the weight and of the larger of input and output, with
                                 channels padded to its block of 16
    its backward                 blocked copies of gradient and input (strided: of both input-shaped tensors) and of the
                                 weight, and fp32 weight gradients of several threads, at most as much as is read; in 16
                                 bits copies of everything at once
    flash attention of CPUs      per-thread score blocks, fp32 copies of queries and values in 16 bits
    norms, softmax               contiguous copies of operands that are not
    everything                   64 KiB (convolution 256 KiB) for thread-local and allocator bytes

    operator                     what its kernel allocates on a GPU
    matrix product               nothing: cuBLAS has one workspace for each handle and stream (32 MiB from sm_90 on, 8.1
                                 MiB before), which stays and which a budget leaves out (`MemoryLedger.base_nbytes`)
    convolution                  channels-last copies of all operands and results, which cuDNN's fastest kernels take;
                                 backward also sums weight gradients in fp32
    attention                    `capture.attention.workspace`
    sorts                        CUB's second copy of keys and values
    norms, softmax               contiguous copies of operands that are not
    everything                   64 KiB for sums that several blocks of threads share
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from chunkc._torch_compat.core import pytree
from chunkc._torch_compat.partitioning import operator_of, result_of
from chunkc.capture.attention.workspace import gpu_attention_nbytes

aten = torch.ops.aten
BASE_NBYTES = 64 << 10
_CONVOLUTION_BASE_NBYTES = 256 << 10
_CHANNEL_BLOCK = 16
_NUM_THREADS = 8  # that sum weight gradients of a convolution apart
_SORTS = frozenset({aten.sort, aten.topk, aten.argsort, aten.msort})
_PACKING = frozenset({aten.mm, aten.addmm, aten.bmm, aten.baddbmm})
_CONTIGUOUS = frozenset(
    {
        aten.native_layer_norm,
        aten.native_layer_norm_backward,
        aten.native_group_norm,
        aten.native_group_norm_backward,
        aten._softmax,
        aten._softmax_backward_data,
        aten._log_softmax,
        aten._log_softmax_backward_data,
    }
)


def workspace_nbytes(node: Node, device_type: str | None = None) -> int:
    """Allowance in bytes for the operator of ``node``, which may run with a random state.

    ``device_type``: whose kernel runs it, ``cpu`` or ``cuda``; None for that of its tensors.
    """
    target, args, _ = operator_of(node)
    arguments = [n.meta.get("val") for n in args if isinstance(n, Node)]
    arguments += [n.meta.get("val") for n in node.all_input_nodes if n not in node.args]
    packet = getattr(target, "overloadpacket", None)
    inputs, outputs = _tensors(arguments), _tensors(pytree.tree_leaves(result_of(node)))
    return kernel_workspace_nbytes(packet, inputs, outputs, device_type or device_type_of([*inputs, *outputs]))


def kernel_workspace_nbytes(
    packet: Any, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], device_type: str
) -> int:
    """Allowance in bytes for one call of an operator ``packet`` (``torch.ops.aten.mm``; None for others).

    ``device_type``: whose kernel runs it, ``cpu`` or ``cuda``.
    """
    tensors = [*inputs, *outputs]
    nbytes = gpu_attention_nbytes(packet, inputs)
    if nbytes is not None:
        return BASE_NBYTES + nbytes
    if packet is not None and "attention" in str(packet):
        return BASE_NBYTES + 2 * max((_nbytes(t) for t in tensors), default=0)
    if packet in _CONTIGUOUS:
        return BASE_NBYTES + sum(_nbytes(t) for t in tensors if not t.is_contiguous())
    if device_type == "cuda":
        return BASE_NBYTES + _cuda_nbytes(packet, inputs, outputs)
    if packet is aten.convolution:
        return _CONVOLUTION_BASE_NBYTES + _convolution_nbytes(inputs[0], inputs[1], outputs[0])
    if packet is aten.convolution_backward:
        return _CONVOLUTION_BASE_NBYTES + _convolution_backward_nbytes(*inputs[:3])
    if packet in _PACKING:
        return BASE_NBYTES + (sum(_nbytes(t) for t in tensors) if _is_narrow(tensors) else 0)
    return BASE_NBYTES


def device_type_of(tensors: Sequence[torch.Tensor]) -> str:
    """The kind of device that ``tensors`` are on: ``cuda`` if any is on a GPU."""
    return "cuda" if any(t.device.type == "cuda" for t in tensors) else "cpu"


def _cuda_nbytes(packet: Any, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> int:
    if packet is aten.convolution:
        return sum(_nbytes(t) for t in (*inputs[:2], *outputs))
    if packet is aten.convolution_backward:
        return sum(_nbytes(t) for t in (*inputs[:3], *outputs)) + 4 * inputs[2].numel()
    if packet in _SORTS:
        return sum(_nbytes(t) for t in outputs)
    return 0


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    return [v for v in values if isinstance(v, torch.Tensor)]


def _convolution_nbytes(value: torch.Tensor, weight: torch.Tensor, output: torch.Tensor) -> int:
    return _nbytes(weight) + max(_blocked_nbytes(value), _blocked_nbytes(output))


def _convolution_backward_nbytes(gradient: torch.Tensor, value: torch.Tensor, weight: torch.Tensor) -> int:
    outer, inner, weights = _blocked_nbytes(gradient), _blocked_nbytes(value), _nbytes(weight)
    sums = min(_NUM_THREADS * weight.numel() * 4, outer + inner)
    if _is_narrow([value]):
        return 2 * inner + outer + 2 * weights + sums
    return max(2 * inner, inner + outer) + weights + sums


def _blocked_nbytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor (batch, channels, ...) whose channels are padded to whole blocks."""
    channels = tensor.shape[1]
    return _nbytes(tensor) // max(channels, 1) * math.ceil(channels / _CHANNEL_BLOCK) * _CHANNEL_BLOCK


def _is_narrow(tensors: Sequence[torch.Tensor]) -> bool:
    return any(t.dtype in (torch.bfloat16, torch.float16) for t in tensors)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
