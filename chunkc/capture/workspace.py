"""How many bytes an operator's kernel may allocate while it runs, beyond its inputs and outputs.

The plan states this allowance per segment, so that a measured peak can be held against it. The rules follow what the
CPU kernels of PyTorch do (packed or reordered copies for matrix products and convolutions, per-thread accumulators for
attention, index sorting for embeddings); CUDA kernels need less for the same operators.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from chunkc._torch_compat import pytree

aten = torch.ops.aten
_BASE_NBYTES = 64 << 10
_PACKING = frozenset({aten.mm, aten.addmm, aten.bmm, aten.baddbmm})
_REORDERING = frozenset({aten.convolution, aten.convolution_backward})


def workspace_nbytes(node: Node) -> int:
    """Allowance in bytes for one operator."""
    packet = getattr(node.target, "overloadpacket", None)
    inputs = [n.meta.get("val") for n in node.all_input_nodes]
    outputs = pytree.tree_leaves(node.meta.get("val"))
    tensors = [t for t in (*inputs, *outputs) if isinstance(t, torch.Tensor)]
    if packet in _REORDERING:
        return _BASE_NBYTES + sum(_nbytes(t) for t in tensors)
    if packet in _PACKING:
        return _BASE_NBYTES + (sum(_nbytes(t) for t in tensors) if _is_narrow(tensors) else 0)
    if packet is not None and "attention" in str(packet):
        return _BASE_NBYTES + 2 * max((_nbytes(t) for t in tensors), default=0)
    return _BASE_NBYTES


def _is_narrow(tensors: list[torch.Tensor]) -> bool:
    return any(t.dtype in (torch.bfloat16, torch.float16) for t in tensors)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
