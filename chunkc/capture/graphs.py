"""A captured iteration: both FX graphs, their parameter inputs, and the schedule made from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from chunkc._torch_compat.core import pytree
from chunkc._torch_compat.partitioning import draws, operator_of
from chunkc._torch_compat.symbolic import hint_of
from chunkc.capture.bundles import Bundle, CapturedGraph
from chunkc.capture.liveness import LiveBytes, Timeline, storages
from chunkc.capture.operators.traffic import Traffic, operator_traffic
from chunkc.capture.operators.workspace import workspace_nbytes
from chunkc.capture.partition import module_path, param_cone
from chunkc.capture.saved_values import find_saved, source_line
from chunkc.capture.symbolic import Sizes, Specialisation, size_inputs, state_sizes
from chunkc.capture.tangents import Tangents, tangents_of
from chunkc.errors import CaptureError
from chunkc.ir.plan import StageRecord
from chunkc.ir.schedule import GraphKind, GraphSchedule, Operator, ParamInfo, Schedule


@dataclass(frozen=True, slots=True)
class Captured:
    """Both graphs of one iteration and their schedule. The backward graph of an evaluation is empty.

    Attributes:
        held_at_start_nbytes: bytes of inputs and buffers alive before forward, which a meter from there does not see.
        user_outputs: names of the forward's outputs that are not merely saved for backward.
        stages: the parts of capture, and how long each took.
        concurrent_nbytes: alive all the while, for other graphs of the same call; the schedule counts them too.
        scales: whether the schedule counts copies of the tangents, multiplied by a loss scale.
        symbolic: what it is a copy of, at ``sizes``; None where it was captured for its sizes alone.
        general: makes the iteration whose backward takes all tangents; None where this one does.
        live_estimates: live bytes of operators that are fused, and of operators one by one, in this order; of both
            graphs; empty where operators are not fused.
    """

    forward: CapturedGraph
    backward: CapturedGraph
    schedule: Schedule
    held_at_start_nbytes: int
    user_outputs: tuple[str, ...] = ()
    tangents: Tangents | None = None
    stages: tuple[StageRecord, ...] = ()
    concurrent_nbytes: int = 0
    scales: bool = False
    symbolic: SymbolicIteration | None = None
    sizes: Sizes = ()
    general: Callable[[], Captured] | None = None
    live_estimates: tuple[tuple[LiveBytes, ...], ...] = ()

    @property
    def estimates(self) -> tuple[Schedule, ...]:
        """The schedule by each estimate of its live bytes, of which `lowest_peak` is the one taken."""
        return tuple(_with_estimate(self.schedule, live) for live in self.live_estimates) or (self.schedule,)

    @property
    def graphs(self) -> dict[GraphKind, CapturedGraph]:
        return {"forward": self.forward, "backward": self.backward}

    @property
    def draws(self) -> bool:
        """Whether the graphs draw random numbers."""
        nodes = (node for graph in self.graphs.values() for node in graph.module.graph.nodes)
        return any(draws(*operator_of(node)) for node in nodes)

    @property
    def draws_by_seed(self) -> bool:
        """Whether the graphs draw random numbers by seeds of Inductor's, which operators ignore one by one."""
        nodes = (node for graph in self.graphs.values() for node in graph.module.graph.nodes)
        return any("inductor_" in str(node.target) for node in nodes)

    def one_by_one(self) -> Captured:
        """The same, where operators run one by one though a compiler was to fuse them."""
        outputs = [n for n in self.forward.outputs() if isinstance(n, Node) and n.name in self.user_outputs]
        live = Timeline(self.forward, self.backward, outputs).live_bytes()
        general = None if self.general is None else partial(_one_by_one, self.general)
        return replace(self, schedule=_with_estimate(self.schedule, live), general=general, live_estimates=())

    def with_all_tangents(self) -> Captured:
        """The iteration whose backward takes all tangents, at the same sizes."""
        return self if self.general is None else replace(self.general(), symbolic=self.symbolic, sizes=self.sizes)

    def is_within(self, other: Captured) -> bool:
        """Whether ``other`` is the same graph at no smaller sizes; as a rule it takes no fewer bytes."""
        if self.symbolic is None or self.symbolic is not other.symbolic or self.sizes == other.sizes:
            return False
        return all(size <= largest for size, largest in zip(self.sizes, other.sizes, strict=True))


def _one_by_one(make: Callable[[], Captured]) -> Captured:
    return make().one_by_one()


@dataclass(frozen=True, slots=True, eq=False)
class SymbolicIteration:
    """Both graphs of one iteration, captured for any sizes.

    ``build`` builds, in place, the iteration of copies; ``forward_sizes`` and ``backward_sizes`` are positions, among
    the inputs of each graph, of the same sizes.
    """

    forward: GraphModule
    backward: GraphModule | None
    build: Callable[[GraphModule, GraphModule | None], Captured]
    forward_sizes: tuple[int, ...]
    backward_sizes: tuple[int, ...]

    @staticmethod
    def of(
        forward: GraphModule, backward: GraphModule | None, build: Callable[[GraphModule, GraphModule | None], Captured]
    ) -> SymbolicIteration | None:
        """The iteration of two graphs with the same sizes among their inputs; None where they have none."""
        sizes = size_inputs(forward)
        if not sizes:
            return None
        again = {} if backward is None else {symbol: i for i, symbol in size_inputs(backward).items()}
        backward_sizes = tuple(again[symbol] for symbol in sizes.values()) if again else ()
        return SymbolicIteration(forward, backward, build, tuple(sizes), backward_sizes)

    def sizes(self) -> Sizes:
        """The sizes of the call that was captured."""
        inputs = self.forward.graph.find_nodes(op="placeholder")
        return tuple(hint_of(inputs[position].meta["val"]) for position in self.forward_sizes)

    def at(self, sizes: Sizes) -> Captured:
        """The iteration at ``sizes``, of copies of the graphs."""
        inputs = zip(size_inputs(self.forward).values(), sizes, strict=True)
        specialisation = Specialisation({**state_sizes(self.forward), **dict(inputs)})
        backward = None if self.backward is None else specialisation.copy(self.backward)
        return replace(self.build(specialisation.copy(self.forward), backward), symbolic=self, sizes=sizes)


def batch_size(inputs: Iterable[Any]) -> tuple[int, int]:
    """``num_samples`` and ``num_tokens`` of a `Schedule`, from what the caller handed in."""
    tensors = [t for t in inputs if isinstance(t, torch.Tensor) and t.dim()]
    largest = max(tensors, key=lambda t: t.numel(), default=None)
    whole = [t for t in tensors if t.dim() > 1 and t.dtype in (torch.int32, torch.int64)]
    num_tokens = max((t.numel() for t in whole), default=0)
    return (0 if largest is None else int(largest.shape[0])), num_tokens


def build(
    forward: GraphModule,
    backward: GraphModule | None,
    names: Mapping[str, int],
    input_params: Sequence[int | None],
    infos: Sequence[ParamInfo],
    num_user_outputs: int | None,
    reached: Mapping[str, frozenset[int]] | None,
    handed_in: Collection[int],
    *,
    fuses: bool,
    device_type: str | None = None,
) -> Captured:
    """Build the captured iteration of partitioned graphs, in place; an evaluation has no ``backward``.

    ``names`` are parameter indexes by placeholder name, in both graphs; ``input_params`` those of the joint graph's
    inputs but tangents, or None; ``num_user_outputs`` of forward are not merely saved (None: all); ``reached`` is
    `find_reached` of the joint graph, None for an evaluation; ``handed_in`` are positions of inputs of the caller's;
    ``device_type`` as of `workspace_nbytes`.
    """
    inputs = forward.graph.find_nodes(op="placeholder")
    num_samples, num_tokens = batch_size(n.meta.get("val") for i, n in enumerate(inputs) if i in handed_in)
    fwd = CapturedGraph.of(forward, names, {})
    backward = backward or _empty_graph()
    num_outputs = len(backward.graph.find_nodes(op="output")[0].args[0])
    gradients = [*input_params, *([None] * num_outputs)][:num_outputs]
    separate_gradients(backward, gradients)
    pairs = zip(backward.graph.find_nodes(op="output")[0].args[0], gradients, strict=True)
    made = {node.name: param for node, param in pairs if param is not None and isinstance(node, Node)}
    bwd = CapturedGraph.of(backward, names, made)
    user = [n for n in fwd.outputs()[:num_user_outputs] if isinstance(n, Node)]
    timeline = Timeline(fwd, bwd, user)
    live, live_estimates = tuple(timeline.live_bytes()), tuple[tuple[LiveBytes, ...], ...]()
    if fuses:
        fused = Timeline(fwd, bwd, user, fuses=True, device_type=device_type or "cpu").live_bytes()
        live_estimates = (tuple(fused), live)
    split = len(fwd.bundles)
    computed = {n.name for b in bwd.bundles for n in b.nodes}
    dropped = [infos[param].name for name, param in made.items() if name not in computed]
    if dropped:
        raise CaptureError(f"the gradient of {dropped[0]} has no operator that makes it; please report the model")
    made_forward = _operators(fwd, live[:split], fuses, device_type)
    schedule = Schedule(
        params=tuple(infos),
        forward=GraphSchedule("forward", _with_saved(made_forward, fwd, bwd, user)),
        backward=GraphSchedule("backward", _operators(bwd, live[split:], fuses, device_type)),
        held_nbytes=timeline.held_nbytes,
        num_samples=num_samples,
        num_tokens=num_tokens,
    )
    at_start_nbytes = sum(dict(storages(fwd.other_inputs())).values())
    tangents = None if reached is None else tangents_of(backward, reached, gradients)
    outputs = tuple(n.name for n in user)
    captured = Captured(fwd, bwd, schedule, at_start_nbytes, outputs, tangents, live_estimates=live_estimates)
    return replace(captured, schedule=lowest_peak(captured.estimates))


def lowest_peak(estimates: Sequence[Schedule]) -> Schedule:
    """The schedule with the lowest peak of live bytes, of several the last.

    A compiler that fuses may keep values longer than operators one by one do. One estimate is taken for the whole
    iteration, so that equal layers are counted alike.
    """
    return min(reversed(estimates), key=_peak_nbytes)


def _peak_nbytes(schedule: Schedule) -> int:
    return max((op.live_nbytes for graph in schedule.graphs for op in graph.operators), default=0)


def _with_estimate(schedule: Schedule, live: Sequence[LiveBytes]) -> Schedule:
    """``schedule`` with the live bytes of both graphs, one after the other."""
    split = len(schedule.forward.operators)
    forward, backward = (
        replace(graph, operators=tuple(_with_live(*pair) for pair in zip(graph.operators, of_graph, strict=True)))
        for graph, of_graph in ((schedule.forward, live[:split]), (schedule.backward, live[split:]))
    )
    return replace(schedule, forward=forward, backward=backward)


def _empty_graph() -> GraphModule:
    nothing = Graph()
    nothing.output(())
    return GraphModule({}, nothing, class_name="Nothing")


def separate_gradients(backward: GraphModule, gradients: Sequence[int | None]) -> None:
    """Give every gradient of a parameter, by a clone where needed, a node that computes and that nothing
    else needs, so that it can land in its chunk and leave."""
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


def _operators(
    graph: CapturedGraph, live: Sequence[LiveBytes], fuses: bool, device_type: str | None
) -> tuple[Operator, ...]:
    traffic = operator_traffic(graph.bundles, fuses)
    facts = zip(graph.bundles, live, traffic, strict=True)
    return tuple(_operator(graph, *of_one, device_type) for of_one in facts)


def _operator(
    graph: CapturedGraph, bundle: Bundle, live: LiveBytes, traffic: Traffic, device_type: str | None
) -> Operator:
    node = bundle.main
    operator = Operator(
        name=node.name,
        target=_target(node),
        reads=tuple(sorted({graph.params[p.name] for p in bundle.reads})),
        grads=tuple(graph.gradients[n.name] for n in bundle.nodes if n.name in graph.gradients),
        flops=traffic.flops,
        nbytes=traffic.nbytes,
        live_nbytes=0,
        live_after_nbytes=0,
        workspace_nbytes=workspace_nbytes(node, device_type),
        layer=module_path(node),
        dtype=_dtype(node),
        num_kernels=traffic.num_kernels,
    )
    return _with_live(operator, live)


def _with_live(operator: Operator, live: LiveBytes) -> Operator:
    return replace(
        operator,
        live_nbytes=live.during_nbytes,
        live_after_nbytes=live.after_nbytes,
        tangents_nbytes=live.tangents_nbytes,
        crossing_nbytes=live.crossing_nbytes,
    )


def _target(node: Node) -> str:
    """The operator's name, with that of the operator that it runs with a random state."""
    target, inner = node.target, operator_of(node)[0]
    return str(target) if inner is target else f"{target}({inner})"


def _with_saved(
    operators: Sequence[Operator], forward: CapturedGraph, backward: CapturedGraph, user_outputs: Sequence[Node]
) -> tuple[Operator, ...]:
    """The forward's operators with what backward reads of their results."""
    with_saved = list(operators)
    for position, saved in find_saved(forward, backward, user_outputs).items():
        source = source_line(forward.bundles[position].main)
        with_saved[position] = replace(
            operators[position],
            source=source,
            saved_nbytes=saved.nbytes,
            read_by=saved.read_by,
            used_until=saved.used_until,
        )
    return tuple(with_saved)


def _dtype(node: Node) -> str:
    """Of the first floating-point operand of ``node``, else of its result."""
    for operand in (*node.all_input_nodes, node):
        for value in pytree.tree_leaves(operand.meta.get("val")):
            if isinstance(value, torch.Tensor) and value.dtype.is_floating_point:
                return str(value.dtype).removeprefix("torch.")
    return ""
