"""Backward graphs without the tangents of outputs that a loss leaves alone.

A forward that returns a scalar beside other outputs, a loss beside logits say, is nearly always trained by the scalar
alone. AOTAutograd's backward takes a tangent for each output all the same, zeros as large as the logits:

    tangent of the loss   ─ gradient of the logits ─┐
    tangent of the logits ─ slice, cast ─ (zeros) ──┴─ add ─ gradient of the hidden values

Such a backward is cut down to what the scalars reach: what is linear in the zeros alone is zero, and a sum with zeros
is its other term. Inputs stay as they are, so that both backwards serve one forward. Where a tangent that was left out
is given after all, `Captured.general` is the iteration with all of them.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from chunkc._torch_compat.core import OpOverload
from chunkc._torch_compat.partitioning import draws, operator_of
from chunkc.capture.partition import copied, is_view

aten, prims = torch.ops.aten, torch.ops.prims
_SUMS = frozenset({aten.add, aten.sub})
_LINEAR = frozenset(
    {
        *(aten._to_copy, prims.convert_element_type, aten.clone, aten.contiguous, aten.neg, aten.sum, aten.mean),
        *(aten.mul, aten.mm, aten.bmm, aten.slice_backward, aten.select_backward, aten.constant_pad_nd),
    }
)
"""Operators whose result is zero where one of their tensors is."""


def find_unused(backward: GraphModule, reached: Mapping[str, frozenset[int]]) -> list[str]:
    """List the tangents beside scalars, without which every gradient still has another one.

    ``reached``: `find_reached` of the joint graph. Empty where no output is a scalar.
    """
    dims = {
        node.name: node.meta["val"].dim()
        for node in backward.graph.find_nodes(op="placeholder")
        if node.name in reached and isinstance(node.meta.get("val"), torch.Tensor)
    }
    of_scalars = frozenset[int]().union(*(reached[name] for name, dim in dims.items() if dim == 0))
    return [name for name, dim in dims.items() if dim and reached[name] <= of_scalars]


def without_tangents(backward: GraphModule, reached: Mapping[str, frozenset[int]]) -> GraphModule | None:
    """Return a copy of ``backward`` without its tangents beside scalars, whose inputs then hold no value.

    None where there are no such tangents, or what reads them is not known to be linear.
    """
    unused = find_unused(backward, reached)
    if not unused:
        return None
    copy = copied(backward)
    zeros = {node for node in copy.graph.find_nodes(op="placeholder") if node.name in unused}
    for node in zeros:
        node.meta = {key: value for key, value in node.meta.items() if key != "val"}
    for node in list(copy.graph.nodes):
        if zeros.isdisjoint(node.all_input_nodes):
            continue
        term = _term_left(node, zeros)
        if term is not None:
            node.replace_all_uses_with(_laid_out_like(node, term))
        elif _is_zero(node, zeros):
            zeros.add(node)
        else:
            return None
    _erase(copy.graph, zeros)
    return copy


def _erase(graph: Graph, zeros: set[Node]) -> None:
    """Erase what is zero, the sums with it, and what nothing reads any more but for these."""
    read_by_erased = set[Node]()
    for node in reversed(list(graph.nodes)):
        reads_zeros = node in zeros or not zeros.isdisjoint(node.all_input_nodes)
        is_left = node in read_by_erased and not draws(*operator_of(node)) and not node.is_impure()
        if node.op == "call_function" and not node.users and (reads_zeros or is_left):
            read_by_erased.update(node.all_input_nodes)
            graph.erase_node(node)


def _packet(node: Node) -> Any:
    return node.target.overloadpacket if isinstance(node.target, OpOverload) else node.target


def _term_left(node: Node, zeros: set[Node]) -> Node | None:
    """The other term of a sum with zeros, where it has the sum's shape and dtype, or can have its strides."""
    if _packet(node) not in _SUMS or len(node.args) != 2:
        return None
    terms = [term for term in node.args if not (isinstance(term, Node) and term in zeros)]
    scale = node.kwargs.get("alpha", 1)
    is_scaled = scale != 1 or (_packet(node) is aten.sub and node.args[0] in zeros)
    if len(terms) != 1 or not isinstance(terms[0], Node) or is_scaled:
        return None
    value, total = terms[0].meta.get("val"), node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not isinstance(total, torch.Tensor):
        return None
    is_copied = value.stride() == total.stride() or total.is_contiguous()
    return terms[0] if value.shape == total.shape and value.dtype is total.dtype and is_copied else None


def _laid_out_like(total: Node, term: Node) -> Node:
    """Return ``term``, or a copy with the strides of ``total``, since what reads that may count on them."""
    if term.meta["val"].stride() == total.meta["val"].stride():
        return term
    with total.graph.inserting_before(total):
        copy = total.graph.call_function(aten.clone.default, (term,), {"memory_format": torch.contiguous_format})
    copy.meta = dict(total.meta)
    return copy


def _is_zero(node: Node, zeros: set[Node]) -> bool:
    packet = _packet(node)
    if packet in _SUMS:
        return len(node.args) == 2 and all(isinstance(term, Node) and term in zeros for term in node.args)
    if node.target is operator.getitem or is_view(node):
        return node.args[0] in zeros
    if packet is aten.constant_pad_nd and (node.args[2] if len(node.args) > 2 else 0) != 0:
        return False
    return packet in _LINEAR
