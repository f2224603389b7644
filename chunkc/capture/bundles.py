"""Operators of a graph as indivisible bundles of FX nodes.

A bundle is what a segment boundary may never cut through: one computing node, the views and casts of parameters that
only it reads (``sink_cone`` put them in front of it) and the ``getitem`` nodes that unpack its results.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass

from torch.fx import Graph, Node

from chunkc.capture.partition import param_cone


@dataclass(frozen=True, slots=True)
class Bundle:
    """An operator as an indivisible bundle of FX nodes.

    ``nodes`` are in execution order; ``main`` is the one that computes; ``reads`` are parameter placeholders.
    """

    nodes: tuple[Node, ...]
    main: Node
    reads: tuple[Node, ...]


def bundle_operators(graph: Graph, params: Collection[Node]) -> tuple[Bundle, ...]:
    """Return the operators of ``graph`` in execution order.

    Call ``sink_cone`` first. Unpacking nodes move to their source.
    """
    params, cone = set(params), param_cone(graph, params)
    bundles: list[Bundle] = []
    chain: list[Node] = []
    for node in list(graph.nodes):
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        if node in cone:
            chain.append(node)
            continue
        if node.target is operator.getitem:
            continue
        unpacked = _unpacking(node)
        for position, item in enumerate(unpacked):
            (unpacked[position - 1] if position else node).append(item)
        reads = {a for n in (*chain, node) for a in n.all_input_nodes if a in params}
        bundles.append(Bundle((*chain, node, *unpacked), node, tuple(sorted(reads, key=lambda p: p.name))))
        chain = []
    return tuple(bundles)


def _unpacking(node: Node) -> list[Node]:
    found: list[Node] = []
    for user in node.users:
        if user.target is operator.getitem:
            found += [user, *_unpacking(user)]
    return found
