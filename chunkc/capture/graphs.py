"""A captured iteration: both FX graphs, which of their inputs are parameters, and the schedule made from them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node
from torch.utils.flop_counter import flop_registry

from chunkc._torch_compat import pytree
from chunkc.capture.bundles import Bundle, bundle_operators
from chunkc.capture.liveness import GraphValues, LiveBytes, Timeline, storages
from chunkc.capture.partition import sink_cone
from chunkc.capture.workspace import workspace_nbytes
from chunkc.ir.schedule import GraphSchedule, Operator, ParamInfo, Schedule


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """One graph in the form the executor's lowering needs.

    Attributes:
        module: the graph; views and casts of parameters stand directly in front of their consumers.
        bundles: its operators; positions are the operator indexes of the schedule.
        params: parameter index by the name of the placeholder that stands for it.
        gradients: for backward, parameter index by the name of the node that makes its gradient.
    """

    module: GraphModule
    bundles: tuple[Bundle, ...]
    params: Mapping[str, int]
    gradients: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Captured:
    """Both graphs of one iteration and their schedule.

    ``held_at_start_nbytes`` are bytes of the inputs and buffers that are alive before forward begins: a meter that
    starts there does not see them.
    """

    forward: CapturedGraph
    backward: CapturedGraph
    schedule: Schedule
    held_at_start_nbytes: int


def build(
    forward: GraphModule,
    backward: GraphModule,
    forward_params: Mapping[str, int],
    gradients: Sequence[int | None],
    num_user_outputs: int,
    infos: Sequence[ParamInfo],
) -> Captured:
    """The captured iteration of partitioned graphs.

    Args:
        forward, backward: the graphs; they are changed in place (``sink_cone``).
        forward_params: parameter index by forward placeholder name (backward uses the same names).
        gradients: for every output of backward, the parameter whose gradient it is, or None.
        num_user_outputs: how many of forward's outputs are not merely saved for backward.
        infos: all parameters of the model.
    """
    fwd = _graph(forward, forward_params, {})
    made = _gradient_nodes(backward, gradients)
    bwd = _graph(backward, forward_params, made)
    outputs = [n for n in _outputs(forward) if isinstance(n, Node)]
    user = [n for n in _outputs(forward)[:num_user_outputs] if isinstance(n, Node)]
    values = GraphValues(fwd.bundles, _other_inputs(fwd), user, [n for n in outputs if n not in user])
    back = GraphValues(bwd.bundles, _other_inputs(bwd), (), ())
    timeline = Timeline(values, back, {key for key, _ in storages(_param_inputs(fwd, bwd))})
    live = timeline.live_bytes()
    split = len(fwd.bundles)
    schedule = Schedule(
        params=tuple(infos),
        forward=GraphSchedule("forward", _operators(fwd, live[:split])),
        backward=GraphSchedule("backward", _operators(bwd, live[split:])),
        held_nbytes=timeline.held_nbytes,
    )
    at_start = sum(dict(storages(values.inputs)).values())
    return Captured(fwd, bwd, schedule, at_start)


def _graph(module: GraphModule, params: Mapping[str, int], gradients: Mapping[str, int]) -> CapturedGraph:
    present = [n for n in module.graph.find_nodes(op="placeholder") if n.name in params]
    sink_cone(module.graph, present)
    bundles = bundle_operators(module.graph, present)
    module.recompile()
    return CapturedGraph(module, bundles, {n.name: params[n.name] for n in present}, gradients)


def _outputs(module: GraphModule) -> list[Any]:
    return list(pytree.tree_leaves(module.graph.find_nodes(op="output")[0].args[0]))


def _gradient_nodes(backward: GraphModule, gradients: Sequence[int | None]) -> dict[str, int]:
    found = {}
    for node, param in zip(_outputs(backward), gradients, strict=True):
        if param is not None and isinstance(node, Node):
            found[node.name] = param
    return found


def _param_inputs(*graphs: CapturedGraph) -> list[Node]:
    return [n for g in graphs for n in g.module.graph.find_nodes(op="placeholder") if n.name in g.params]


def _other_inputs(graph: CapturedGraph) -> list[Node]:
    found = graph.module.graph.find_nodes(op="placeholder")
    found += graph.module.graph.find_nodes(op="get_attr")
    return [n for n in found if n.name not in graph.params]


def _operators(graph: CapturedGraph, live: Sequence[LiveBytes]) -> tuple[Operator, ...]:
    return tuple(_operator(graph, b, nbytes) for b, nbytes in zip(graph.bundles, live, strict=True))


def _operator(graph: CapturedGraph, bundle: Bundle, live: LiveBytes) -> Operator:
    node = bundle.main
    moved = dict(storages((node, *node.all_input_nodes)))
    return Operator(
        name=node.name,
        target=str(node.target),
        reads=tuple(sorted({graph.params[p.name] for p in bundle.reads})),
        grads=tuple(graph.gradients[n.name] for n in bundle.nodes if n.name in graph.gradients),
        flops=_flops(node),
        nbytes=sum(moved.values()),
        live_nbytes=live.during_nbytes,
        live_after_nbytes=live.after_nbytes,
        workspace_nbytes=workspace_nbytes(node),
        layer=_layer(node),
    )


def _flops(node: Node) -> int:
    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0
    args, kwargs = pytree.tree_map_only(Node, lambda n: n.meta.get("val"), (node.args, dict(node.kwargs)))
    kwargs.pop("out_val", None)
    return int(formula(*args, **kwargs, out_val=node.meta.get("val")))


def _layer(node: Node) -> str:
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    return re.sub(r"^L\['\w+'\]\.?", "", str(path))
