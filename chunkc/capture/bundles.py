"""Operators of a graph as indivisible bundles of FX nodes.

A bundle is what a segment boundary may never cut through: one computing node, the views and casts of parameters that
only it reads (``sink_cone`` put them in front of it) and the ``getitem`` nodes that unpack its results. A collective is
in one bundle with the wait for its result.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, GraphModule, Node

from chunkc._torch_compat.collectives import is_collective, is_wait
from chunkc._torch_compat.core import pytree
from chunkc.capture.partition import param_cone, sink_cone


@dataclass(frozen=True, slots=True)
class Bundle:
    """``nodes`` in execution order, of which ``main`` computes; ``reads`` are parameter placeholders."""

    nodes: tuple[Node, ...]
    main: Node
    reads: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """One graph in the form that lowering needs: views and casts of parameters before their consumers.

    ``bundles`` are its operators, as in the schedule; ``params`` and ``gradients`` are parameter indexes by the names
    of placeholders and, for backward, of the nodes that make gradients.
    """

    module: GraphModule
    bundles: tuple[Bundle, ...]
    params: Mapping[str, int]
    gradients: Mapping[str, int]

    @staticmethod
    def of(module: GraphModule, params: Mapping[str, int], gradients: Mapping[str, int]) -> CapturedGraph:
        """Bundle a graph, which is changed in place (``sink_cone``); ``params`` may name more than its own."""
        present = [n for n in module.graph.find_nodes(op="placeholder") if n.name in params]
        sink_cone(module.graph, present)
        bundles = bundle_operators(module.graph, present)
        module.recompile()
        return CapturedGraph(module, bundles, {n.name: params[n.name] for n in present}, gradients)

    def param_inputs(self) -> list[Node]:
        return [n for n in self.module.graph.find_nodes(op="placeholder") if n.name in self.params]

    def other_inputs(self) -> list[Node]:
        """The other placeholders, and constants."""
        graph = self.module.graph
        nodes = (*graph.find_nodes(op="placeholder"), *graph.find_nodes(op="get_attr"))
        return [n for n in nodes if n.name not in self.params]

    def outputs(self) -> list[Any]:
        """All outputs: nodes, and values that are none."""
        return list(pytree.tree_leaves(self.module.graph.find_nodes(op="output")[0].args[0]))


def bundle_operators(graph: Graph, params: Collection[Node]) -> tuple[Bundle, ...]:
    """Return the operators of ``graph``, sunk by `sink_cone`; unpacking nodes move to their source."""
    params, cone = set(params), param_cone(graph, params)
    bundles: list[Bundle] = []
    chain: list[Node] = []
    for node in list(graph.nodes):
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        if node in cone:
            chain.append(node)
            continue
        if node.target is operator.getitem or _is_part_of_collective(node):
            continue
        unpacked = _unpacking(node)
        for position, item in enumerate(unpacked):
            (unpacked[position - 1] if position else node).append(item)
        reads = {a for n in (*chain, node) for a in n.all_input_nodes if a in params}
        bundles.append(Bundle((*chain, node, *unpacked), node, tuple(sorted(reads, key=lambda p: p.name))))
        chain = []
    return tuple(bundles)


def _unpacking(node: Node) -> list[Node]:
    items: list[Node] = []
    for user in node.users:
        if user.target is operator.getitem or _is_part_of_collective(user):
            items += [user, *_unpacking(user)]
    return items


def _is_part_of_collective(node: Node) -> bool:
    """Whether ``node`` waits for a collective of its own graph."""
    source = node.args[0] if node.args else None
    return is_wait(node) and isinstance(source, Node) and is_collective(source)
