"""Floating-point operations of one operator, by torch's own formulas, attention included.

torch counts matrix products, convolutions and attention. That is counted here, of CPU tensors too, which torch leaves
out: two products in forward, five in backward. Of causal attention only the pairs that are not masked count; kernels
skip the rest. An operator without a matrix product counts nothing: memory bounds it. One that runs with the state of a
random generator counts as it does alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from chunkc._torch_compat.core import OpOverload, pytree
from chunkc._torch_compat.partitioning import operator_of, result_of

_FORWARD_PRODUCTS = 2
_BACKWARD_PRODUCTS = 5


def operator_flops(node: Node) -> int:
    """Operations that ``node`` carries out; a multiplication and an addition are two."""
    from torch.utils.flop_counter import flop_registry  # imports Triton where it is installed

    target, args, kwargs = operator_of(node)
    if isinstance(target, OpOverload) and "scaled_dot_product" in target._schema.name:
        names = [argument.name for argument in target._schema.arguments]
        return _attention_flops({**dict(zip(names, args, strict=False)), **kwargs}, names)
    formula = flop_registry.get(getattr(target, "overloadpacket", None))
    if formula is None:
        return 0
    args, kwargs = pytree.tree_map_only(Node, lambda n: n.meta.get("val"), (args, kwargs))
    kwargs.pop("out_val", None)
    return int(formula(*args, **kwargs, out_val=result_of(node)))


def _attention_flops(given: Mapping[str, Any], names: Sequence[str]) -> int:
    """Count for queries [batch, heads, q, e], keys [batch, heads, k, e] and values [batch, heads, k, v]."""
    query, key, value = (_shape(given[name]) for name in ("query", "key", "value"))
    batch, heads, num_queries, width = query
    num_keys, value_width = key[-2], value[-1]
    pairs = _causal_pairs(num_queries, num_keys) if given.get("is_causal", False) else num_queries * num_keys
    is_backward = any(name.startswith("grad_out") for name in names)
    if is_backward:  # scores, and the gradients of queries and keys; the gradients of weights and values
        return 2 * batch * heads * pairs * ((_BACKWARD_PRODUCTS - 2) * width + 2 * value_width)
    return _FORWARD_PRODUCTS * batch * heads * pairs * (width + value_width)


def _causal_pairs(num_queries: int, num_keys: int) -> int:
    """Pairs of a query and a key that is not behind it, counted from the first of both."""
    square = min(num_queries, num_keys)
    return square * (square + 1) // 2 + (num_queries - square) * num_keys


def _shape(value: Any) -> tuple[int, ...]:
    tensor = value.meta["val"] if isinstance(value, Node) else value
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"attention takes tensors, found {tensor!r}")
    return tuple(int(size) for size in tensor.shape)
