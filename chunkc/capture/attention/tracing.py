"""Attention traced as the kernel that a GPU takes for it, on fake tensors of the CPU.

On CPU tensors `scaled_dot_product_attention` becomes another operator than on a GPU: with dropout, matrices of queries
x keys that backward reads. In a graph that is planned for a GPU every call is replaced by `attend`, which calls the
GPU's operator. Nothing runs: on fake tensors that operator is its shape function and its rule for backward.

What surrounds the operator is what PyTorch does there (aten/src/ATen/native/transformers/attention.cpp,
``scaled_dot_product_attention``): boolean masks become additive ones, the efficient kernel's are padded, and flash
attention's heads are padded to a multiple of eight.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch.fx import GraphModule

from chunkc.capture.attention.kernels import AttentionCall, AttentionKernel, Capability, KernelSupport, choose_kernel

aten = torch.ops.aten
_FLASH_ALIGNMENT = 8
_MASK_ALIGNMENT = 8


def trace_for_gpu(module: GraphModule, gpu: Capability) -> None:
    """Replace attention in a Dynamo graph, in place, also in checkpointed regions, by that of ``gpu``."""
    for part in module.modules():
        if isinstance(part, GraphModule):
            for node in part.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention):
                node.target = attend
                node.update_kwarg("gpu", gpu)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    gpu: Capability,
) -> torch.Tensor:
    """Return what `scaled_dot_product_attention` returns, by the operator that it is on ``gpu``.

    Args:
        query: (batch, heads, queries, e), and ``key`` (batch, heads, keys, e), ``value`` (batch, heads, keys, v).

    Raises:
        CaptureError: when no kernel that is switched on can compute it.
    """
    call = AttentionCall(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    kernel = choose_kernel(call, gpu, KernelSupport.current())
    if kernel is AttentionKernel.FLASH:
        return _flash(call, scale)
    mask = _additive(attn_mask, query.dtype)
    if kernel is AttentionKernel.CUDNN:
        result = aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, call.needs_grad, dropout_p, is_causal, False, scale=scale
        )
    elif kernel is AttentionKernel.EFFICIENT:
        mask = None if mask is None else _aligned(mask).expand(*query.shape[:3], key.shape[-2])
        result = aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, call.needs_grad, dropout_p, is_causal, scale=scale
        )
    else:
        result = aten._scaled_dot_product_attention_math(
            query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )
    return _first(result)


def _flash(call: AttentionCall, scale: float | None) -> torch.Tensor:
    width = call.query.shape[-1]
    padded = (_padded(t, -t.shape[-1] % _FLASH_ALIGNMENT) for t in (call.query, call.key, call.value))
    scale = 1 / math.sqrt(width) if scale is None else scale
    result = aten._scaled_dot_product_flash_attention(*padded, call.dropout, call.is_causal, False, scale=scale)
    attended = _first(result)
    return attended if attended.shape[-1] == width else attended[..., :width]


def _first(result: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return result[0]


def _additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Return a mask of numbers to add, in ``dtype`` where it was one of what takes part."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.where(mask.logical_not(), -math.inf, torch.zeros((), dtype=dtype, device=mask.device))


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask whose rows begin at multiples of eight elements, padded where they do not."""
    size = mask.shape[-1]
    if mask.stride(-1) == 1 and all(stride % _MASK_ALIGNMENT == 0 for stride in mask.stride()[:-1]):
        return mask
    return _padded(mask, _MASK_ALIGNMENT - size % _MASK_ALIGNMENT)[..., :size]


def _padded(tensor: torch.Tensor, num_elements: int) -> torch.Tensor:
    return F.pad(tensor, (0, num_elements)) if num_elements else tensor
