"""Return the tensor that several outputs are views of, so that AOTAutograd takes a Dynamo graph.

    hidden ─┬─ view ── output 0      AOTAutograd makes views again from that tensor outside of the graph, but not beside
            └─ view ── output 1      tensor subclasses, which managed parameters are, unless that tensor is an output.

So the tensor becomes one more output, which nobody sees. The user gets views of one tensor, as in plain PyTorch: a
write to one shows in the other, and their gradients add up.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from chunkc._torch_compat.core import StorageKey, dynamo_value, storage_key


def return_bases(module: GraphModule) -> int:
    """Add tensors that two or more outputs are views of to a Dynamo graph's outputs; return how many.
    Parts of ``chunk``, ``split`` and ``unbind`` are fit for AOTAutograd by themselves."""
    output = module.graph.find_nodes(op="output")[0]
    outputs: tuple[Any, ...] = tuple(output.args[0])
    sharing = defaultdict[StorageKey, list[Node]](list)
    for node in dict.fromkeys(n for n in outputs if isinstance(n, Node)):
        key = storage_key(dynamo_value(node))
        if key is not None:
            sharing[key].append(node)
    bases = [_base_of(module, key) for key, nodes in sharing.items() if len(nodes) > 1 and any(map(_is_view, nodes))]
    added = [base for base in bases if base is not None and base not in outputs]
    if added:
        output.args = ((*outputs, *added),)
        module.recompile()
    return len(added)


def without_last(compiled: Callable[..., Sequence[Any]], count: int) -> Callable[..., Sequence[Any]]:
    """``compiled`` without the last ``count`` of its outputs."""

    def run(*args: Any) -> Sequence[Any]:
        outputs = compiled(*args)
        return outputs[: len(outputs) - count]

    return run if count else compiled


def _is_view(node: Node) -> bool:
    """Whether autograd follows a view that one operator made alone."""
    value = dynamo_value(node)
    source = node.args[0] if node.target is operator.getitem else None
    is_part = isinstance(source, Node) and isinstance(dynamo_value(source), (tuple, list))
    return value.requires_grad and value._base is not None and not is_part


def _base_of(module: GraphModule, key: StorageKey) -> Node | None:
    """Find the node that first had the memory of ``key``, unless that is an input."""
    for node in module.graph.nodes:
        value = dynamo_value(node)
        if isinstance(value, torch.Tensor) and storage_key(value) == key:
            return node if node.op != "placeholder" and value._base is None else None
    return None
