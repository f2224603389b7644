"""Partitioning the joint graph so that no alias or cast of a parameter's payload survives a segment.

A saved view or low-precision copy of a parameter would be a dangling view, or a second copy of the model, once payloads
move. So the *cone* of a parameter, chains of views and casts from its placeholder, is recomputed, and every consumer
gets its own copy of the chain in front of it (`sink_cone`). Only raw placeholders are saved: the executor's slots.

What is computed of packed bits alone, weights of a frozen base in 4 bits, is made again in backward as well (QLoRA,
Dettmers et al., 2023, section 3): saved, it would be the model in full precision.

Other activations are the partitioner's choice, but for layers that are computed again, by the model's own checkpoints
or by ours: what one of them reads of others is saved (`save_borders`).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from chunkc._torch_compat.core import OpOverload
from chunkc._torch_compat.partitioning import (
    decides_recomputation,
    draws,
    merge_equal,
    min_cut_partition,
    recomputed_region,
    set_region,
    tag_must_recompute,
    tag_must_save,
    uncompiled,
)
from chunkc.capture.random_states import drop_idle_states
from chunkc.capture.symbolic import save_sizes
from chunkc.errors import CaptureError

aten = torch.ops.aten
_LAYER = re.compile(r"(?:[^.]*\.)*?\d+(?=\.|$)")
_CASTS = frozenset({aten._to_copy, torch.ops.prims.convert_element_type})
_PRODUCTS = frozenset({aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution})
_UNDECLARED_VIEWS = frozenset(
    {aten._unsafe_view, aten.unsafe_split, aten.unsafe_split_with_sizes, aten.unsafe_chunk, aten._reshape_alias}
)
"""Operators whose results share memory with their input although their schemas do not say so."""


def extends_cone(node: Node, cone: Collection[Node]) -> bool:
    """Whether ``node`` is a view or a cast of something in ``cone``, or one of several such views."""
    if node.op != "call_function" or not node.args or node.args[0] not in cone:
        return False
    return node.target is operator.getitem or _is_cast(node.target) or _is_view(node.target)


def is_view(node: Node) -> bool:
    """Whether ``node`` is a view of its first input, or one of several views: nothing is computed."""
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, Node) and is_view(source)
    return _is_view(node.target) and not _is_cast(node.target)


def _is_cast(target: object) -> bool:
    return isinstance(target, OpOverload) and target.overloadpacket in _CASTS


def _is_view(target: object) -> bool:
    return isinstance(target, OpOverload) and _returns_views(target)


@cache
def _returns_views(target: OpOverload) -> bool:
    if target.overloadpacket in _UNDECLARED_VIEWS:
        return True
    return any(r.alias_info is not None and not r.alias_info.is_write for r in target._schema.returns)


def param_cone(graph: Graph, params: Collection[Node]) -> set[Node]:
    """All views and casts of ``params``, the placeholders themselves included."""
    cone = set(params)
    for node in graph.nodes:
        if extends_cone(node, cone):
            cone.add(node)
    return cone


def unpacked(graph: Graph, params: Collection[Node]) -> list[Node]:
    """List what is computed of packed parameters, those of an integer dtype, and of placeholders alone."""
    near = {n for n in graph.find_nodes(op="placeholder") if not n.name.startswith("tangents")}
    found = dict.fromkeys(p for p in params if not _is_floating(p))
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if extends_cone(node, near):
            near.add(node)
        if (
            node.op != "call_function"
            or found.keys().isdisjoint(inputs)
            or _is_product(node.target)
            or _is_random(node)
        ):
            continue
        if all(n in found or n in near for n in inputs):
            found[node] = None
    return [node for node in found if node.op == "call_function"]


def _is_floating(node: Node) -> bool:
    return bool(node.meta["val"].dtype.is_floating_point)


def _is_random(node: Node) -> bool:
    return draws(node.target, node.args, node.kwargs)


def _is_product(target: object) -> bool:
    return isinstance(target, OpOverload) and target.overloadpacket in _PRODUCTS


def partition(
    joint: GraphModule,
    inputs: Sequence[Any],
    params: Collection[Node],
    keep: float = 1.0,
    *,
    changing: Collection[str] = (),
    is_merged: bool = False,
    **options: Any,
) -> tuple[GraphModule, GraphModule]:
    """Return forward and backward graphs of ``joint``, whose placeholders ``params`` are parameters.

    A share ``keep`` of the layers keeps the activations that the partitioner chooses (`recompute_layers`);
    ``changing``: inputs by name that may hold something else when backward begins; ``is_merged``: `merge_equal` was
    called. CaptureError when the partitioner saved a view or a cast of a parameter all the same.
    """
    names = {p.name for p in params}
    if not is_merged:
        merge_equal(joint)
        params = [n for n in joint.graph.find_nodes(op="placeholder") if n.name in names]
    cone = param_cone(joint.graph, params).union(unpacked(joint.graph, params))
    for node in cone - set(params):
        tag_must_recompute(node)
    recompute_layers(joint.graph, cone, keep, changing)
    save_borders(joint.graph, cone)
    forward, backward = min_cut_partition(joint, inputs, **options)
    hoist_saved_views(forward.graph)
    save_sizes(forward, backward)
    drop_idle_states(forward, backward)
    check_outputs(forward, names)
    return forward, backward


def hoist_saved_views(forward: Graph) -> None:
    """Put views that forward only hands out right behind what they show, in place.

    The partitioner saves views which backward alone takes, such as transposes for gradients of weights, at the end of
    forward; there they would be the last use of all large activations.
    """
    late: dict[Node, None] = {}
    for node in reversed(forward.nodes):
        if node.op == "call_function" and is_view(node) and all(u.op == "output" or u in late for u in node.users):
            late[node] = None
    order = {node: position for position, node in enumerate(forward.nodes)}
    for node in reversed(late):
        latest = max(node.all_input_nodes, key=order.__getitem__)
        if latest.op == "call_function":
            latest.append(node)
            order[node] = order[latest]


def copied(module: GraphModule) -> GraphModule:
    """Return a copy of ``module`` for another partition; both share constants and fake tensors."""
    graph = Graph()
    outputs = graph.graph_copy(module.graph, {})
    graph.output(outputs).meta = dict(module.graph.find_nodes(op="output")[0].meta)
    return uncompiled(module, graph)


def recomputable_layers(graph: Graph, params: Collection[Node]) -> list[str]:
    """Return the layers of forward that are ours to recompute.

    The model itself says of none of their operators whether it is kept. A layer is the outermost module whose path ends
    in a number. ``params`` are placeholders of parameters.
    """
    return _undecided(_forward_layers(graph, param_cone(graph, params)))


def _undecided(layer_of: Mapping[Node, str]) -> list[str]:
    decided = {layer for node, layer in layer_of.items() if decides_recomputation(node)}
    return [layer for layer in dict.fromkeys(layer_of.values()) if layer and layer not in decided]


def recompute_layers(graph: Graph, cone: Collection[Node], keep: float, changing: Collection[str] = ()) -> None:
    """Have backward compute the inside of layers again: of a layer only what others read is saved.

    So does activation checkpointing (Chen et al., "Training deep nets with sublinear memory cost", 2016), by which the
    model may recompute other layers. A share ``keep`` of the `recomputable_layers`, the last ones, keep their
    activations: those live shortest, and are gone when backward computes the first layers again. ``cone``, of what is
    made of parameters alone, is never saved; results that read inputs in ``changing`` are, since a second computation
    would read what forward has left there.
    """
    layer_of = _forward_layers(graph, cone)
    layers = _undecided(layer_of)
    again = set(layers[: len(layers) - num_kept(keep, len(layers))])
    if not again:
        return
    number: dict[str | int, int] = {}
    for node, layer in layer_of.items():
        if layer in again:
            tag_must_recompute(node, number.setdefault(layer, len(number)))
        elif (region := recomputed_region(node)) is not None:
            set_region(node, number.setdefault(region, len(number)))
    for node, layer in layer_of.items():
        if layer in again and any(layer_of[user] != layer for user in node.users if user in layer_of):
            save_result(node, cone)
    for node in _readers(graph, changing):
        if layer_of.get(node) in again:
            save_result(node, cone)


def num_kept(keep: float, num_layers: int) -> int:
    """Of ``num_layers`` layers, how many keep their activations with an activation budget ``keep``."""
    return round(keep * num_layers)


def _readers(graph: Graph, names: Collection[str]) -> list[Node]:
    """Return the operators that read placeholders ``names``, or views of them, and are no views."""
    memory = {n for n in graph.find_nodes(op="placeholder") if n.name in names}
    readers = []
    for node in graph.nodes if memory else ():
        if node.op == "call_function" and not memory.isdisjoint(node.all_input_nodes):
            memory.add(node) if is_view(node) else readers.append(node)
    return readers


def _forward_layers(graph: Graph, cone: Collection[Node]) -> dict[Node, str]:
    """Return the layer of every operator of forward, which depends on no tangent; empty outside of layers."""
    late = {n for n in graph.find_nodes(op="placeholder") if n.name.startswith("tangents")}
    layer_of: dict[Node, str] = {}
    for node in graph.nodes:
        if any(n in late for n in node.all_input_nodes):
            late.add(node)
        elif node.op == "call_function" and node not in cone:
            layer_of[node] = outermost_layer(module_path(node))
    return layer_of


def outermost_layer(path: str) -> str:
    """Return the path of the outermost numbered module that ``path`` is in; may be empty."""
    match = _LAYER.match(path)
    return match[0] if match else ""


def save_borders(graph: Graph, cone: Collection[Node]) -> None:
    """Save what a region that is computed again reads of results of another one, also indirectly.

    Otherwise regions may be computed again one from the other when backward begins. ``cone`` is never saved.
    """
    downstream: set[Node] = set()
    for node in graph.nodes:
        if node.op != "call_function" or node in cone:
            continue
        own = recomputed_region(node)
        if own is not None or not downstream.isdisjoint(node.all_input_nodes):
            downstream.add(node)
            readers = [r for user in node.users if (r := recomputed_region(user)) is not None]
            if any(own is None or own < reader for reader in readers):
                save_result(node, cone)


def save_result(node: Node, cone: Collection[Node]) -> None:
    """Save ``node`` at the operator that makes its memory.

    The partitioner ignores such a request for a view, and for one of several results of an operator: all of these are
    saved that backward needs.
    """
    made = node
    while is_view(made) or made.target is operator.getitem:
        made = made.all_input_nodes[0]
    if made.op == "call_function" and made not in cone:
        for result in _with_results(made):
            tag_must_save(result)


def _with_results(node: Node) -> list[Node]:
    nodes = [node]
    for made in nodes:
        nodes += [user for user in made.users if user.target is operator.getitem and user.args[0] is made]
    return nodes


def module_path(node: Node) -> str:
    """Return the path of the module that computed ``node``, or what it is the gradient of; may be empty."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    return re.sub(r"^L\['\w+'\]\.?", "", str(path))


def check_outputs(forward: GraphModule, param_names: Collection[str]) -> None:
    """Check that no output but a placeholder is memory or a cast of a parameter, else CaptureError."""
    placeholders = {n for n in forward.graph.find_nodes(op="placeholder") if n.name in param_names}
    cone = param_cone(forward.graph, placeholders)
    storages = {_storage(p) for p in placeholders}
    for out in forward.graph.find_nodes(op="output")[0].all_input_nodes:
        aliases = _storage(out) in storages and isinstance(out.meta.get("val"), torch.Tensor)
        if out not in placeholders and (aliases or out in cone):
            raise CaptureError(
                f"the forward graph hands out {out.name} ({out.target}), a view or a cast of a parameter, which moves "
                "between devices; return a clone of it instead"
            )


def _storage(node: Node) -> object:
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else node


def sink_cone(graph: Graph, params: Collection[Node]) -> None:
    """Give every consumer of a parameter's view or cast its own copy of the chain in front of it."""
    cone = param_cone(graph, params)
    chains = cone - set(params)
    for node in list(graph.nodes):
        if node in cone or not any(a in chains for a in node.all_input_nodes):
            continue
        copies: dict[Node, Node] = {}

        def duplicate(arg: Node, node: Node = node, copies: dict[Node, Node] = copies) -> Node:
            if arg not in chains:
                return arg
            if arg not in copies:
                with graph.inserting_before(node):
                    copies[arg] = graph.node_copy(arg, duplicate)
            return copies[arg]

        node.args = map_arg(node.args, duplicate)
        node.kwargs = map_arg(node.kwargs, duplicate)
    for node in reversed(list(graph.nodes)):
        if node in chains and not node.users:
            graph.erase_node(node)
