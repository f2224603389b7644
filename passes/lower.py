"""Lowering: cut a captured graph into the plan's segments, each a graph module of its own.

A segment takes a flat list of values and returns a flat list. Its graph knows neither the names of the model's layers
nor its position, so that equal segments have equal code and compile once. The executor moves the values that enter and
leave by the lists that stand around it.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from chunkc._torch_compat.core import pytree
from chunkc.errors import CaptureError
from chunkc.ir.plan import Segment
from chunkc.ir.values import GraphValues, SegmentValues


@dataclass(frozen=True, slots=True)
class LoweredSegment(SegmentValues):
    """One segment, ready to be compiled.

    Attributes:
        name: the plan's name for it, for example ``fwd.3``.
        module: takes one positional argument per entry of ``inputs`` and returns a tuple, one value per ``outputs``.
        examples: fake tensors (or constants) for ``inputs``.
        key: equal for segments with equal code and inputs.
    """

    name: str
    module: GraphModule
    examples: tuple[Any, ...]
    key: str


@dataclass(frozen=True, slots=True)
class LoweredGraph(GraphValues):
    """A whole graph in segments."""

    segments: tuple[LoweredSegment, ...]

    def code(self) -> str:
        """The segments as readable programs, one below the other."""
        return "\n".join(f"# {s.name}\n{s.module.code.strip()}\n" for s in self.segments)


def lower(
    module: GraphModule,
    operators: Sequence[Sequence[Node]],
    segments: Sequence[Segment],
    params: Mapping[str, int],
) -> LoweredGraph:
    """Cut ``module``, a captured graph, at the boundaries of ``segments``.

    ``operators``: its nodes, bundled by operator index. ``params``: parameter index by placeholder name.
    """
    result = pytree.tree_leaves(module.graph.find_nodes(op="output")[0].args[0], is_leaf=lambda x: x is None)
    needed_at_end = {n.name for n in result if isinstance(n, Node)}
    nodes = [[n for op in operators[s.first_op : s.end_op] for n in op] for s in segments]
    last_use = _last_uses(nodes)
    lowered = tuple(
        _segment(module, segment.name, position, nodes[position], last_use, needed_at_end, params)
        for position, segment in enumerate(segments)
    )
    return LoweredGraph(
        inputs=tuple(n.name for n in module.graph.find_nodes(op="placeholder")),
        segments=lowered,
        result=tuple(_entry(module, n) for n in result),
        last_use=last_use,
    )


def _entry(module: GraphModule, output: Any) -> str | tuple[Any]:
    """One output of a graph: the name of a value, or a constant by itself, as a tuple of one."""
    if not isinstance(output, Node):
        return (output,)
    return (attrgetter(str(output.target))(module),) if output.op == "get_attr" else output.name


def _last_uses(segments: Sequence[Sequence[Node]]) -> dict[str, int]:
    last: dict[str, int] = {}
    for position, nodes in enumerate(segments):
        for node in nodes:
            for source in node.all_input_nodes:
                last[source.name] = position
    return last


def _segment(
    module: GraphModule,
    name: str,
    position: int,
    nodes: Sequence[Node],
    last_use: Mapping[str, int],
    needed_at_end: set[str],
    params: Mapping[str, int],
) -> LoweredSegment:
    inside = set(nodes)
    sources = [a for n in nodes for a in n.all_input_nodes if a not in inside]
    inputs = [n for n in dict.fromkeys(sources) if n.op != "get_attr"]
    outputs = [n for n in nodes if n.name in needed_at_end or last_use.get(n.name, -1) > position]
    _check_outputs(name, outputs, _storages(module.graph.find_nodes(op="placeholder"), params))
    graph = _copy(module, nodes, inputs, outputs)
    sub = GraphModule(_attributes(module, graph), graph, class_name="Segment")
    examples = tuple(n.meta.get("val") for n in inputs)
    dies = tuple(
        i
        for i, n in enumerate(inputs)
        if n.name not in params and last_use[n.name] == position and n.name not in needed_at_end
    )
    return LoweredSegment(
        name=name,
        module=sub,
        inputs=tuple(n.name for n in inputs),
        params=tuple((i, params[n.name]) for i, n in enumerate(inputs) if n.name in params),
        outputs=tuple(n.name for n in outputs),
        dies=dies,
        examples=examples,
        key=_key(sub, examples),
    )


def _storages(placeholders: Sequence[Node], params: Mapping[str, int]) -> dict[int, str]:
    """Names of parameter placeholders by the identity of their memory."""
    values = [(n.name, n.meta.get("val")) for n in placeholders if n.name in params]
    return {v.untyped_storage()._cdata: name for name, v in values if isinstance(v, torch.Tensor)}


def _check_outputs(name: str, outputs: Sequence[Node], payloads: Mapping[int, str]) -> None:
    """No value that leaves a segment may share memory with a payload, whose slot is reused."""
    for node in outputs:
        for value in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata in payloads:
                raise CaptureError(
                    f"{node.name} ({node.target}) leaves segment {name} as a view of a parameter "
                    f"({payloads[value.untyped_storage()._cdata]}), which moves between devices; use a clone of the "
                    "view in the model"
                )


def _copy(module: GraphModule, nodes: Sequence[Node], inputs: Sequence[Node], outputs: Sequence[Node]) -> Graph:
    """A graph of ``nodes`` alone, with names that say nothing about the model."""
    graph = Graph()
    made: dict[Node, Node] = {}
    for position, node in enumerate(inputs):
        made[node] = graph.placeholder(f"in{position}")
        made[node].meta["val"] = node.meta.get("val")
    for node in nodes:
        for source in node.all_input_nodes:
            if source.op == "get_attr" and source not in made:
                made[source] = graph.get_attr(str(source.target))
                made[source].meta["val"] = source.meta.get("val")
        copied = graph.create_node(
            node.op, node.target, *torch.fx.node.map_arg((node.args, dict(node.kwargs)), made.__getitem__)
        )
        copied.meta["val"] = node.meta.get("val")
        made[node] = copied
    graph.output(tuple(made[n] for n in outputs))
    return graph


def _attributes(module: GraphModule, graph: Graph) -> dict[str, Any]:
    targets = {str(n.target) for n in graph.nodes if n.op in ("get_attr", "call_module")}
    return {target: operator.attrgetter(target)(module) for target in targets}


def _key(module: GraphModule, examples: Sequence[Any]) -> str:
    values = [_describe(n.meta.get("val")) for n in module.graph.nodes]
    attributes = [f"{name}@{id(value)}" for name, value in sorted(module.named_children())]
    constants = [f"{name}@{id(value)}" for name, value in sorted(module.named_buffers())]
    text = "\n".join((module.code, *values, *map(_describe, examples), *attributes, *constants))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _describe(value: Any) -> str:
    leaves = pytree.tree_leaves(value)
    return ";".join(
        f"{t.dtype}{tuple(t.shape)}{t.stride()}" if isinstance(t, torch.Tensor) else repr(t) for t in leaves
    )
