"""Capture one Dynamo graph by AOTAutograd: an iteration as a whole, before anything of it has run.

    Dynamo's graph ─ joint graph ─ choice of what is kept ─ partition ─┬─ forward ──┬─ `Captured`, and code that calls
                                                                       └─ backward ─┘  the caller's two functions

``partition_fn`` sees the joint graph, so both graphs are known when AOTAutograd asks for the forward to be compiled. It
asks for the backward when that first runs; then the graph must be the one that was captured.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from chunkc._torch_compat.collectives import share_waited
from chunkc._torch_compat.core import (
    FakeTensorMode,
    aot_backend,
    dynamo_example,
    mutated_inputs,
    num_forward_outputs,
    outputs_aliasing_inputs,
    pytree,
    refuses_shared_inputs,
    refuses_shared_outputs,
    storage_address,
)
from chunkc._torch_compat.partitioning import merge_equal
from chunkc._torch_compat.release import forget_source
from chunkc._torch_compat.symbolic import has_unbacked_size
from chunkc.capture.budgets import BudgetSchedules, GraphChooser
from chunkc.capture.graphs import Captured, SymbolicIteration, build
from chunkc.capture.kept_graphs import TracedGraphs, capture_key
from chunkc.capture.partition import check_outputs, copied, partition, recomputable_layers
from chunkc.capture.saved_values import source_line
from chunkc.capture.shared_outputs import return_bases, without_last
from chunkc.capture.tangents import find_reached, keeps_undefined
from chunkc.capture.tracing import TracingOptions
from chunkc.capture.zero_tangents import without_tangents
from chunkc.errors import CaptureError
from chunkc.ir.plan import StageRecord
from chunkc.ir.schedule import ParamInfo
from chunkc.progress import stage

BoxedCallable = Callable[[list[Any]], Sequence[Any]]
"""Takes its inputs as a list, which it empties."""

_KEEP_ALL = 1.0
"""The activation budget with which the partitioner decides alone."""


class ModelTensors:
    """Tensors that the graphs of one model take, told apart by identity.

    ``index`` is of parameters by id; ``casts`` are ids of inputs that are copies in compute dtype of the caller's.
    """

    def __init__(self, model: nn.Module, params: Iterable[torch.Tensor], infos: Sequence[ParamInfo]) -> None:
        self.infos = infos
        self.casts = set[int]()
        self._model = model
        self.index = {id(p): i for i, p in enumerate(params)}

    def handed_in(self, values: Iterable[Any]) -> list[Any]:
        """Those of ``values`` that are neither parameters nor buffers."""
        own = {*self.index, *map(id, self._model.buffers())}
        return [value for value in values if id(value) not in own]


class DataDependentSizeError(CaptureError):
    """Data tell the size of a tensor inside a graph, which Dynamo must break there."""


def _never(args: list[Any]) -> Sequence[Any]:
    raise CaptureError("a graph was run that was captured only")


def capture_graph(
    module: GraphModule,
    example_inputs: Sequence[Any],
    tensors: ModelTensors,
    tracing: TracingOptions,
    forward: BoxedCallable = _never,
    backward: BoxedCallable = _never,
    *,
    choose: GraphChooser | None = None,
    kept_by: str | None = None,
    evaluates: bool = False,
    trains_scalar: bool = False,
) -> tuple[Captured, Callable[..., Any]]:
    """Capture one Dynamo graph; return what was captured, and the code that stands in for the graph.

    ``forward`` and ``backward`` are what compiled code calls, not before this function has returned. ``choose`` chooses
    the activation budget; None keeps what the partitioner keeps. ``kept_by``: keep graphs between runs, under a text
    that is equal only where ``choose`` chooses alike. ``evaluates``: a graph may have nothing to train.
    ``trains_scalar``: where it returns scalars, backward takes no tangents of other outputs (`Captured.general` does).
    DataDependentSizeError before anything is traced where data tell sizes inside the graph.
    """
    _refuse_unbacked(module)
    examples = [dynamo_example(n) for n in module.graph.find_nodes(op="placeholder")]
    handed_in = tensors.handed_in(examples)
    handed_ids = set(map(id, handed_in))
    placeholders = zip(module.graph.find_nodes(op="placeholder"), examples, strict=True)
    slices = [node for node, e in placeholders if id(e) in handed_ids and isinstance(e, torch.Tensor)]
    num_bases = return_bases(module)
    capture = _GraphCapture(
        tensors.infos,
        [tensors.index.get(id(e)) for e in examples],
        [i for i, e in enumerate(examples) if id(e) in tensors.casts],
        {i for i, e in enumerate(examples) if id(e) in handed_ids},
        *(tracing, forward, backward, choose, evaluates, trains_scalar, _num_outputs(module)),
    )
    compile_with_aot = capture.backend(module, tracing.rewrites(module, slices), kept_by)
    stage("tracing forward and backward")
    try:
        compiled: Callable[..., Any] = compile_with_aot(module, example_inputs)
    except RuntimeError as error:
        if refuses_shared_inputs(error):
            raise _shared_inputs_error(handed_in) from error
        raise
    except AssertionError as error:
        if refuses_shared_outputs(error):
            raise CaptureError(
                "forward returns several views of one tensor, and how it made that is not captured; return that "
                "tensor too, or a clone in place of all views but one"
            ) from error
        raise
    return capture.take(), without_last(keeps_undefined(compiled), num_bases)


@dataclass(slots=True, eq=False, repr=False)
class _GraphCapture:
    """One graph on its way through AOTAutograd, which keeps this object: it holds no tensor."""

    infos: Sequence[ParamInfo]
    params: Sequence[int | None]
    casts: Collection[int]
    handed_in: Collection[int]
    tracing: TracingOptions
    forward: BoxedCallable
    backward: BoxedCallable
    choose: GraphChooser | None
    evaluates: bool
    trains_scalar: bool
    num_outputs: int
    _is_kept: bool = False
    _document: bytes | None = None
    _backward: GraphModule | None = None
    _backward_names: Sequence[str] = ()
    _names: Mapping[str, int] = field(default_factory=dict)
    _reached: Mapping[str, frozenset[int]] = field(default_factory=dict)
    _choice: str = ""
    _captured: Captured | None = None
    _stages: list[StageRecord] = field(default_factory=list)
    _stage_began_s: float = field(default_factory=time.perf_counter)

    def backend(self, module: GraphModule, options: Mapping[str, Any], kept_by: str | None) -> Callable[..., Any]:
        """AOTAutograd over this object's methods; ``options`` of its own; ``kept_by`` as of `capture_graph`."""
        methods = {"fw_compiler": self.compile_forward, "bw_compiler": self.compile_backward}
        others = {"inference_compiler": self.compile_inference, "partition_fn": self.partition}
        key = None
        if kept_by is not None and self.tracing.context is None:
            key = capture_key(module, _functions(options), kept_by, *self._facts())
        if key is None:
            return aot_backend(**methods, **others, **options)
        from chunkc._torch_compat.capture_cache import cached_aot_backend

        self._is_kept = True
        return cached_aot_backend(key, self, **methods, **others, **options)

    def _facts(self) -> tuple[object, ...]:
        """All that both graphs follow from beside Dynamo's graph, its inputs and torch's settings."""
        tracing, prepare = self.tracing, self.tracing.prepare_joint
        traced_by = tracing.fuses, tracing.pieces, tracing.gpu, prepare and prepare.__qualname__
        infos = [self.infos[param] for param in self.params if param is not None]
        return traced_by, self.params, infos, sorted(self.casts), sorted(self.handed_in), self.num_outputs

    def document(self) -> bytes | None:
        document, self._document = self._document, None
        return document

    def restore(self, document: bytes, mode: FakeTensorMode) -> None:
        traced = TracedGraphs.of(document, mode)
        self._end_stage("aot_autograd", "both graphs as an earlier run kept them")
        self._names, self._reached, self._choice = traced.names, traced.reached, traced.choice
        if traced.choice:
            self._end_stage("rematerialise", traced.choice)
        self._keep(self._build(traced.forward, traced.backward, traced.num_user_outputs))

    def code(self, is_backward: bool) -> BoxedCallable:
        return boxed(self.backward if is_backward else self.forward)

    def take(self) -> Captured:
        captured, self._captured, self._backward = self._captured, None, None
        if captured is None:
            raise CaptureError("AOTAutograd compiled a graph without handing it over")
        return captured

    def _end_stage(self, name: str, note: str) -> None:
        now = time.perf_counter()
        self._stages.append(StageRecord(name, 1e3 * (now - self._stage_began_s), note))
        self._stage_began_s = now

    def partition(self, joint: GraphModule, inputs: Sequence[Any], **options: Any) -> tuple[GraphModule, GraphModule]:
        self._end_stage("aot_autograd", f"a joint graph of {len(joint.graph.nodes)} nodes")
        self._names = self._params_by_name(joint)
        self._reached = find_reached(joint, options["num_fwd_outputs"])
        share_waited(joint.graph)
        if self.tracing.prepare_joint is not None:
            self.tracing.prepare_joint(joint)
        merge_equal(joint)
        budget, tried = _KEEP_ALL, dict[float, tuple[GraphModule, GraphModule]]()
        if self.choose is not None and recomputable_layers(joint.graph, self._params_in(joint)):
            schedules = BudgetSchedules(
                lambda keep: self._partition(copied(joint), inputs, {**options, "keep": keep}),
                lambda forward, backward: self._build(forward, backward, options["num_fwd_outputs"]),
            )
            (budget, self._choice), tried = self.choose(schedules), schedules.graphs
            self._end_stage("rematerialise", self._choice)
        forward, self._backward = tried.get(budget) or self._partition(joint, inputs, {**options, "keep": budget})
        self._end_stage("partition", f"{len(forward.graph.nodes)} and {len(self._backward.graph.nodes)} nodes")
        return forward, self._backward

    def _params_in(self, joint: GraphModule) -> list[Node]:
        return [n for n in joint.graph.find_nodes(op="placeholder") if n.name in self._names]

    def _partition(
        self, joint: GraphModule, inputs: Sequence[Any], options: Mapping[str, Any]
    ) -> tuple[GraphModule, GraphModule]:
        changing = self._changing_inputs(joint, options["num_fwd_outputs"])
        return partition(joint, inputs, self._params_in(joint), changing=changing, is_merged=True, **options)

    def _changing_inputs(self, joint: GraphModule, num_outputs: int) -> list[str]:
        """Return inputs, but parameters, that forward may change in place.

        Only then has it more outputs than Dynamo's graph.
        """
        if num_outputs == self.num_outputs:
            return []
        inputs = zip(joint.graph.find_nodes(op="placeholder"), self.params, strict=False)
        return [node.name for node, param in inputs if param is None]

    def _build(self, forward: GraphModule, backward: GraphModule | None, num_user_outputs: int | None) -> Captured:
        """The iteration of partitioned graphs, in place, or of copies at the sizes of the call."""
        reached = self._reached if backward is not None else None
        facts = (self._names, self.params, self.infos, num_user_outputs, reached, self.handed_in)
        options = {"fuses": self.tracing.fuses, "device_type": None if self.tracing.gpu is None else "cuda"}
        build_one = partial(_build, facts=facts, reached=reached, trains_scalar=self.trains_scalar, options=options)
        symbolic = SymbolicIteration.of(forward, backward, build_one)
        return build_one(forward, backward) if symbolic is None else symbolic.at(symbolic.sizes())

    def _params_by_name(self, graph: GraphModule) -> dict[str, int]:
        """Inputs come first in the joint graph, in the order in which Dynamo hands them over."""
        pairs = zip(graph.graph.find_nodes(op="placeholder"), self.params, strict=False)
        return {node.name: index for node, index in pairs if index is not None}

    def _keep(self, captured: Captured) -> None:
        self._end_stage("schedule", f"{sum(len(g.operators) for g in captured.schedule.graphs)} operators")
        self._captured = replace(captured, stages=tuple(self._stages))

    def compile_forward(self, module: GraphModule, example_inputs: Sequence[Any]) -> BoxedCallable:
        self._refuse_broken_rules()
        if self._backward is None:
            raise CaptureError("AOTAutograd compiled a forward graph without partitioning a joint graph first")
        backward, num_outputs = self._backward, num_forward_outputs()
        if self._is_kept:
            traced = TracedGraphs(module, backward, num_outputs, self._names, self._reached, self._choice)
            self._document = traced.document()
            self._end_stage("keep", "both graphs, for later runs")
            backward = copied(backward)  # of the one that it keeps, AOTAutograd empties the metadata
        self._keep(self._build(module, backward, num_outputs))
        self._backward_names = _operator_names(self._backward)
        return boxed(self.forward)

    def compile_backward(self, module: GraphModule, example_inputs: Sequence[Any]) -> BoxedCallable:
        forget_source(module)
        if _operator_names(module) != self._backward_names:
            raise CaptureError("the backward graph differs from the one that was planned; please report this")
        return boxed(self.backward)

    def compile_inference(self, module: GraphModule, example_inputs: Sequence[Any]) -> BoxedCallable:
        if not self.evaluates:
            raise CaptureError(
                "no output of this forward depends on a trainable parameter, so there is nothing to train: call it "
                "under torch.no_grad() to evaluate, or set requires_grad on the parameters to train before "
                "chunkc.compile"
            )
        self._end_stage("aot_autograd", f"a forward graph of {len(module.graph.nodes)} nodes")
        self._refuse_broken_rules()
        self._names = self._params_by_name(module)
        share_waited(module.graph)
        if self.tracing.prepare_joint is not None:
            self.tracing.prepare_joint(module)
        check_outputs(module, self._names)
        self._keep(self._build(module, None, None))
        return boxed(self.forward)

    def _refuse_broken_rules(self) -> None:
        if any(i in self.casts for i in mutated_inputs()):
            raise CaptureError(
                "forward changes a floating-point input in place, but mixed precision hands it a copy in compute "
                "dtype; clone it in the model, hand it over in compute dtype, or compile with dtype=torch.float32"
            )
        for rule, positions in (("mutates", mutated_inputs()), ("returns", outputs_aliasing_inputs())):
            params = [self.params[i] for i in positions if i < len(self.params)]
            names = [self.infos[p].name for p in params if p is not None]
            if names:
                raise CaptureError(
                    f"forward {rule} its own parameters {', '.join(names)} (or a view of them); parameters move "
                    "between devices while it runs. Keep such state in a buffer, or return a clone"
                )


def _build(
    forward: GraphModule,
    backward: GraphModule | None,
    *,
    facts: tuple[Any, ...],
    reached: Mapping[str, frozenset[int]] | None,
    trains_scalar: bool,
    options: Mapping[str, Any],
) -> Captured:
    """Build the iteration of both graphs, without tangents beside scalars if it ``trains_scalar``."""
    without = None
    if trains_scalar and backward is not None and reached is not None:
        without = without_tangents(backward, reached)
    captured = build(forward, without or backward, *facts, **options)
    if without is None or backward is None:
        return captured
    whole = backward

    def general() -> Captured:
        return build(copied(forward), copied(whole), *facts, **options)

    return replace(captured, general=general)


def _num_outputs(module: GraphModule) -> int:
    return len(pytree.tree_leaves(module.graph.find_nodes(op="output")[0].args[0]))


def _functions(options: Mapping[str, Any]) -> Iterable[Any]:
    """Decompositions among options of AOTAutograd."""
    table: Mapping[Any, Any] = options.get("decompositions", {})
    return table.values()


def _operator_names(module: GraphModule) -> list[str]:
    return [n.name for n in module.graph.nodes if n.op == "call_function"]


def _refuse_unbacked(module: GraphModule) -> None:
    """Dynamo admits operators with data-dependent sizes where it may not break the graph."""
    node = next((n for n in module.graph.nodes if has_unbacked_size(n)), None)
    if node is not None:
        raise DataDependentSizeError(
            f"the size of {node.name}, which {source_line(node) or 'the forward'} makes, depends on the data: such a "
            "forward is not one graph of static shapes. Use a mask of the same size in its place (torch.where, "
            "ignore_index), or let the forward break there (fullgraph=False)"
        )


def _shared_inputs_error(inputs: Sequence[Any]) -> CaptureError:
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    uses = Counter(map(storage_address, tensors))
    shared = [str(tuple(t.shape)) for t in tensors if uses[storage_address(t)] > 1]
    return CaptureError(
        f"forward changes an input in place that shares memory with another one (inputs of shapes {', '.join(shared)} "
        "do), and what the other then holds is not captured; hand over a clone of one of them, or clone it in the model"
    )


def boxed(function: BoxedCallable) -> BoxedCallable:
    """Mark ``function`` as taking one list that it empties, so that inputs die at their last use."""
    call = partial(function)
    call._boxed_call = True  # type: ignore[attr-defined]
    return call
