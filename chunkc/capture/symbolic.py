"""Graphs captured for any sizes, and their copies for the sizes of one call.

Where Dynamo meets a second size it makes one graph for all: sizes are inputs of the graph, and tensors have symbolic
shapes. A plan needs numbers, so each combination of sizes gets a copy of both graphs, without another capture:

    graphs over s0, captured once ─┬─ s0 = 17: copy, schedule, plan
                                   └─ s0 = 12: copy, schedule, plan

A copy has the nodes of the original by name. What is computed of sizes alone is a number in it, and values are fake
tensors of that size, which share storages as the originals do. Sizes stay inputs of a copy, which reads none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from chunkc._torch_compat.core import pytree
from chunkc._torch_compat.partitioning import saves_random_state
from chunkc._torch_compat.symbolic import (
    SYMBOLIC,
    Symbol,
    evaluated,
    fake_like,
    hint_of,
    is_assertion,
    meta_storage,
    size_symbol,
    symbols_of,
)
from chunkc.errors import CaptureError

Sizes = tuple[int, ...]
"""Values of the inputs of a graph that are sizes, in their order."""


def size_inputs(module: GraphModule) -> dict[int, Symbol]:
    """Symbols of the inputs of ``module`` that are sizes, by position."""
    placeholders = module.graph.find_nodes(op="placeholder")
    symbols = {position: size_symbol(node.meta.get("val")) for position, node in enumerate(placeholders)}
    return {position: symbol for position, symbol in symbols.items() if symbol is not None}


def state_sizes(module: GraphModule) -> dict[Symbol, int]:
    """Sizes of the random states that ``module`` saves: symbols to torch, though they never change."""
    users = [user for node in module.graph.nodes if saves_random_state(node) for user in node.users]
    sizes = [size for user in users if user.args[1] == 0 for size in user.meta["val"].shape]
    return {symbol: hint_of(size) for size in sizes if (symbol := size_symbol(size)) is not None}


def save_sizes(forward: GraphModule, backward: GraphModule) -> None:
    """Hand every size that forward takes to backward too, in place: the same sizes tell both apart."""
    saved = set(size_inputs(backward).values())
    sizes = size_inputs(forward)
    placeholders = forward.graph.find_nodes(op="placeholder")
    missing = [placeholders[position] for position, symbol in sizes.items() if symbol not in saved]
    if not missing:
        return
    output = forward.graph.find_nodes(op="output")[0]
    output.args = ((*output.args[0], *missing),)
    first_tensor = next(n for n in backward.graph.nodes if not isinstance(n.meta.get("val"), SYMBOLIC))
    with backward.graph.inserting_before(first_tensor):
        for node in missing:
            backward.graph.placeholder(node.name).meta = dict(node.meta)
    forward.recompile()
    backward.recompile()


class Specialisation:
    """Copies of graphs at ``sizes``, over one set of storages."""

    def __init__(self, sizes: Mapping[Symbol, int]) -> None:
        self._sizes = sizes
        self._storages: dict[int, torch.UntypedStorage] = {}

    def copy(self, module: GraphModule) -> GraphModule:
        """Copy ``module``; CaptureError where a tensor has a size that no input tells."""
        graph, copies = Graph(), dict[Node, Any]()
        for node in module.graph.nodes:
            if is_assertion(node):
                continue
            value = pytree.tree_map(self._value, node.meta.get("val"))
            is_number = isinstance(node.meta.get("val"), SYMBOLIC) and not isinstance(value, SYMBOLIC)
            if not is_number or node.op == "placeholder":
                args, kwargs = (map_aggregate(a, lambda arg: self._arg(arg, copies)) for a in (node.args, node.kwargs))
                made = graph.create_node(node.op, node.target, args, kwargs, node.name)
                made.meta = {**node.meta, "val": value} if "val" in node.meta else dict(node.meta)
            copies[node] = value if is_number else made
        return GraphModule(module, graph)

    def _arg(self, arg: Any, copies: Mapping[Node, Any]) -> Any:
        return copies[arg] if isinstance(arg, Node) else self._value(arg)

    def _value(self, value: Any) -> Any:
        """``value`` with numbers for sizes; a number that only data tell stays as it is."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, SYMBOLIC) and all(symbol in self._sizes for symbol in symbols_of(value)):
            return evaluated(value, self._sizes)
        return value

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        symbols = symbols_of(tensor)
        if tensor.layout is not torch.strided and not symbols:
            return tensor
        unknown = sorted(str(symbol) for symbol in symbols if symbol not in self._sizes)
        if unknown or tensor.layout is not torch.strided:
            raise CaptureError(
                f"a {tensor.layout} tensor of shape {tuple(tensor.shape)} changes from call to call in a way that is "
                "not captured: call the model with inputs of one shape, or pad them"
            )
        storage = tensor.untyped_storage()
        nbytes: Any = storage.nbytes()
        if not symbols and not isinstance(nbytes, torch.SymInt):
            return tensor
        if storage._cdata not in self._storages:
            is_new = isinstance(nbytes, torch.SymInt)
            self._storages[storage._cdata] = meta_storage(self._value(nbytes)) if is_new else storage
        shape, stride = ([self._value(n) for n in numbers] for numbers in (tensor.shape, tensor.stride()))
        offset = self._value(tensor.storage_offset())
        return fake_like(tensor, self._storages[storage._cdata], offset, shape, stride)
