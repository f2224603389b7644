"""A captured iteration: both FX graphs, their parameter inputs, and the schedule made from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from chunkc._torch_compat.core import pytree
from chunkc.capture.bundles import Bundle, bundle_operators
from chunkc.capture.liveness import GraphValues, LiveBytes, Timeline, storages
from chunkc.capture.partition import module_path, param_cone, sink_cone
from chunkc.capture.tangents import Tangents
from chunkc.capture.traffic import Traffic, operator_traffic
from chunkc.capture.workspace import workspace_nbytes
from chunkc.errors import CaptureError
from chunkc.ir.plan import StageRecord
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
class BatchSizes:
    """The size of one call: ``num_samples`` and ``num_tokens`` as in `Schedule`."""

    num_samples: int = 0
    num_tokens: int = 0

    @staticmethod
    def of(inputs: Sequence[Any]) -> BatchSizes:
        """From what the caller handed in."""
        tensors = [t for t in inputs if isinstance(t, torch.Tensor) and t.dim()]
        largest = max(tensors, key=lambda t: t.numel(), default=None)
        whole = [t for t in tensors if t.dim() > 1 and t.dtype in (torch.int32, torch.int64)]
        num_tokens = max((t.numel() for t in whole), default=0)
        return BatchSizes(0 if largest is None else int(largest.shape[0]), num_tokens)


@dataclass(frozen=True, slots=True)
class Captured:
    """Both graphs of one iteration and their schedule. The backward graph of an evaluation is empty.

    ``held_at_start_nbytes`` are bytes of the inputs and buffers that are alive before forward begins: a meter that
    starts there does not see them. ``stages`` say what capture did, and how long each part took.
    ``user_outputs`` names the forward's outputs that are not merely saved for backward. ``beside_nbytes`` are alive all
    the while, for other graphs of the same call; the schedule counts them too. ``tangents`` say which gradients depend
    on which output. ``scales``: whether the schedule counts copies of the tangents, multiplied by a loss scale.
    """

    forward: CapturedGraph
    backward: CapturedGraph
    schedule: Schedule
    held_at_start_nbytes: int
    stages: tuple[StageRecord, ...] = ()
    user_outputs: tuple[str, ...] = ()
    beside_nbytes: int = 0
    tangents: Tangents = Tangents()  # noqa: RUF009 - frozen
    scales: bool = False


def build(
    forward: GraphModule,
    backward: GraphModule,
    forward_params: Mapping[str, int],
    gradients: Sequence[int | None],
    num_user_outputs: int,
    infos: Sequence[ParamInfo],
    *,
    fuses: bool = False,
    sizes: BatchSizes = BatchSizes(),
) -> Captured:
    """The captured iteration of partitioned graphs.

    Args:
        forward, backward: the graphs; they are changed in place (``sink_cone``).
        forward_params: parameter index by forward placeholder name (backward uses the same names).
        gradients: for every output of backward, the parameter whose gradient it is, or None.
        num_user_outputs: how many of forward's outputs are not merely saved for backward.
        infos: all parameters of the model.
        fuses: whether neighbouring operators without a matrix product will be one kernel.
        sizes: of the inputs.
    """
    fwd = _graph(forward, forward_params, {})
    separate_gradients(backward, gradients)
    made = _gradient_nodes(backward, gradients)
    bwd = _graph(backward, forward_params, made)
    outputs = [n for n in _outputs(forward) if isinstance(n, Node)]
    user = [n for n in _outputs(forward)[:num_user_outputs] if isinstance(n, Node)]
    saved = list(dict.fromkeys(n for n in outputs if n not in user))
    values = GraphValues(fwd.bundles, _other_inputs(fwd), user, saved)
    back = GraphValues(bwd.bundles, _other_inputs(bwd), (), ())
    timeline = Timeline(values, back, {key for key, _ in storages(_param_inputs(fwd, bwd))})
    live = timeline.live_bytes()
    split = len(fwd.bundles)
    computed = {n.name for b in bwd.bundles for n in b.nodes}
    dropped = [infos[param].name for name, param in made.items() if name not in computed]
    if dropped:
        raise CaptureError(f"the gradient of {dropped[0]} has no operator that makes it; please report the model")
    schedule = Schedule(
        params=tuple(infos),
        forward=GraphSchedule("forward", _operators(fwd, live[:split], fuses)),
        backward=GraphSchedule("backward", _operators(bwd, live[split:], fuses)),
        held_nbytes=timeline.held_nbytes,
        num_samples=sizes.num_samples,
        num_tokens=sizes.num_tokens,
    )
    at_start = sum(dict(storages(values.inputs)).values())
    return Captured(fwd, bwd, schedule, at_start, user_outputs=tuple(n.name for n in user))


def build_evaluation(
    forward: GraphModule,
    params: Mapping[str, int],
    infos: Sequence[ParamInfo],
    *,
    fuses: bool = False,
    sizes: BatchSizes = BatchSizes(),
) -> Captured:
    """The captured forward of a call without gradients, beside a backward graph of nothing.

    Args:
        forward: the graph; changed in place.
        params: parameter index by placeholder name.
        infos: all parameters of the model.
        fuses, sizes: as for ``build``.
    """
    nothing = Graph()
    nothing.output(())
    backward = GraphModule({}, nothing, class_name="Nothing")
    return build(forward, backward, params, (), len(_outputs(forward)), infos, fuses=fuses, sizes=sizes)


def _graph(module: GraphModule, params: Mapping[str, int], gradients: Mapping[str, int]) -> CapturedGraph:
    present = [n for n in module.graph.find_nodes(op="placeholder") if n.name in params]
    sink_cone(module.graph, present)
    bundles = bundle_operators(module.graph, present)
    module.recompile()
    return CapturedGraph(module, bundles, {n.name: params[n.name] for n in present}, gradients)


def _outputs(module: GraphModule) -> list[Any]:
    return list(pytree.tree_leaves(module.graph.find_nodes(op="output")[0].args[0]))


def separate_gradients(backward: GraphModule, gradients: Sequence[int | None]) -> None:
    """Give every gradient of a parameter a node of its own, that computes and that nothing else needs.

    Autograd may hand out a tangent itself, or one tensor as the gradient of several inputs. Each such output becomes a
    clone, so that a gradient can land in its chunk and leave, whatever the others do.
    """
    output = backward.graph.find_nodes(op="output")[0]
    entries = list(output.args[0])
    uses = Counter(n for n in entries if isinstance(n, Node))
    placeholders = backward.graph.find_nodes(op="placeholder")
    payloads_and_views = param_cone(backward.graph, placeholders)
    for position, (node, param) in enumerate(zip(entries, gradients, strict=True)):
        if param is None or not isinstance(node, Node):
            continue
        if uses[node] > 1 or node in payloads_and_views:
            with backward.graph.inserting_before(output):
                entries[position] = backward.graph.call_function(torch.ops.aten.clone.default, (node,))
            entries[position].meta = {**node.meta, "val": node.meta["val"].clone()}
    output.args = (type(output.args[0])(entries),)


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


def _operators(graph: CapturedGraph, live: Sequence[LiveBytes], fuses: bool) -> tuple[Operator, ...]:
    traffic = operator_traffic(graph.bundles, fuses)
    return tuple(_operator(graph, *facts) for facts in zip(graph.bundles, live, traffic, strict=True))


def _operator(graph: CapturedGraph, bundle: Bundle, live: LiveBytes, traffic: Traffic) -> Operator:
    node = bundle.main
    return Operator(
        name=node.name,
        target=str(node.target),
        reads=tuple(sorted({graph.params[p.name] for p in bundle.reads})),
        grads=tuple(graph.gradients[n.name] for n in bundle.nodes if n.name in graph.gradients),
        flops=traffic.flops,
        nbytes=traffic.nbytes,
        live_nbytes=live.during_nbytes,
        live_after_nbytes=live.after_nbytes,
        workspace_nbytes=workspace_nbytes(node),
        layer=module_path(node),
        dtype=_dtype(node),
        num_kernels=traffic.num_kernels,
        tangents_nbytes=live.tangents_nbytes,
    )


def _dtype(node: Node) -> str:
    """Of the first floating-point operand of ``node``, else of its result."""
    for found in (*node.all_input_nodes, node):
        for value in pytree.tree_leaves(found.meta.get("val")):
            if isinstance(value, torch.Tensor) and value.dtype.is_floating_point:
                return str(value.dtype).removeprefix("torch.")
    return ""
