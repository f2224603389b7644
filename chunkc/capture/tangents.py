"""Tangents that the loss does not reach, and the gradients that depend on the others.

Autograd leaves the gradient of an output undefined where the loss does not depend on it, and parameters behind such
outputs alone get none. AOTAutograd asks for zeros instead, and makes gradients of zeros:

    hidden ─┬─ first head ── output 0 ── loss       tangent 0 defined     gradients of trunk and first head
            └─ second head ─ output 1               tangent 1 undefined   gradients of the second head: not asked for

So undefined tangents are kept undefined up to the backward graph (`keeps_undefined`), and the joint graph says which
gradients depend on which (`find_reached`). A gradient that depends on no tangent is always asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.fx import GraphModule

from chunkc._torch_compat.core import is_compiled_node, keep_undefined, pytree


@dataclass(frozen=True, slots=True)
class Tangent:
    """One tangent, at ``position`` among inputs of the backward graph; ``stride`` in elements.

    ``reached``: positions, among the outputs of that graph, of the gradients that depend on it.
    """

    position: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    reached: frozenset[int]

    def zeros(self) -> torch.Tensor:
        """Make the zeros that the graph takes in place of the tangent where it is undefined."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device).zero_()


@dataclass(frozen=True, slots=True)
class Tangents:
    """All tangents of a captured graph; ``params``: for every output of backward its parameter, or None.

    ``left_out``: positions of those that the graph does not read, whatever is given there
    (`chunkc.capture.zero_tangents`).
    """

    tangents: tuple[Tangent, ...] = ()
    params: tuple[int | None, ...] = ()
    left_out: tuple[int, ...] = ()

    def has_unread(self, args: Sequence[Any]) -> bool:
        """Whether ``args`` hold a tangent that the graph does not read."""
        return any(args[position] is not None for position in self.left_out)

    def fill(self, args: list[Any]) -> frozenset[int]:
        """Put zeros for undefined tangents in ``args``; positions of outputs that depend on others, or none."""
        defined, undefined = set[int](), set[int]()
        for tangent in self.tangents:
            if args[tangent.position] is None:
                args[tangent.position] = tangent.zeros()
                undefined |= tangent.reached
            else:
                defined |= tangent.reached
        return frozenset(range(len(self.params))) - (undefined - defined)

    def params_of(self, positions: Iterable[int]) -> frozenset[int]:
        return frozenset(p for i in positions if (p := self.params[i]) is not None)


def find_reached(joint: GraphModule, num_forward_outputs: int) -> dict[str, frozenset[int]]:
    """Positions of the gradients that depend on each tangent of a joint graph, by placeholder name."""
    tangents = [n for n in joint.graph.find_nodes(op="placeholder") if n.name.startswith("tangents")]
    masks = {node: 1 << number for number, node in enumerate(tangents)}
    for node in joint.graph.nodes:
        for source in node.all_input_nodes:
            masks[node] = masks.get(node, 0) | masks.get(source, 0)
    output = joint.graph.find_nodes(op="output")[0]
    gradients = list(pytree.tree_leaves(output.args[0]))[num_forward_outputs:]
    reaching = [masks.get(gradient, 0) for gradient in gradients]
    return {t.name: frozenset(i for i, mask in enumerate(reaching) if mask & masks[t]) for t in tangents}


def tangents_of(backward: GraphModule, reached: Mapping[str, frozenset[int]], params: Sequence[int | None]) -> Tangents:
    """The tangents of a backward graph cut from the joint graph of ``reached``; ``params`` of `Tangents`."""
    tangents, left_out = [], []
    for position, node in enumerate(backward.graph.find_nodes(op="placeholder")):
        value = node.meta.get("val")
        if node.name in reached and isinstance(value, torch.Tensor):
            shape, stride = tuple(map(int, value.shape)), tuple(map(int, value.stride()))
            tangents.append(Tangent(position, shape, stride, value.dtype, value.device, reached[node.name]))
        elif node.name in reached:
            left_out.append(position)
    return Tangents(tuple(tangents), tuple(params), tuple(left_out))


def keeps_undefined(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """``compiled``, AOTAutograd's callable, with a backward that takes None for undefined tangents."""

    def run(*args: Any) -> Any:
        given = set(_nodes(args))
        outputs = compiled(*args)
        node = _compiled_node((*pytree.tree_leaves(outputs), *args), given)
        if node is not None:
            keep_undefined(node)
        return outputs

    return run


def _nodes(values: Iterable[Any]) -> list[Node]:
    return [v.grad_fn for v in values if isinstance(v, torch.Tensor) and v.grad_fn is not None]


def _compiled_node(values: Iterable[Any], given: Collection[Node]) -> Node | None:
    """Find the node of a compiled graph behind ``values``; None where autograd reaches but ``given`` ones."""
    todo = deque(_nodes(values))
    seen = set(given)
    while todo:
        node = todo.popleft()
        if node in seen:
            continue
        if is_compiled_node(node):
            return node
        seen.add(node)
        todo.extend(n for n, _ in node.next_functions if n is not None)
    return None
