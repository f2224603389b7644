"""The torch.compile backend: captures an iteration as a whole, before anything of it has run.

``partition_fn`` sees the joint graph, so forward and backward are both known when the forward graph is compiled; the
lazily called backward compiler only checks that it was handed the same graph. What to do with a captured iteration is
decided by the ``on_capture`` that the caller injects: plan and run it, or only plan it. A call without gradients has
one graph, for ``on_evaluation``.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node

from chunkc._torch_compat.core import (
    aot_backend,
    break_reason,
    dynamo_example,
    mutated_inputs,
    num_forward_outputs,
    outputs_aliasing_inputs,
    refuses_shared_inputs,
    refuses_shared_outputs,
    storage_address,
)
from chunkc._torch_compat.release import forget_source
from chunkc.capture.attention import drop_attention_dropout
from chunkc.capture.graphs import BatchSizes, Captured, build, build_evaluation
from chunkc.capture.partition import check_outputs, copied, may_recompute, partition
from chunkc.capture.shared_outputs import return_bases, without_last
from chunkc.capture.tangents import find_reached, keeps_undefined, tangents_of
from chunkc.errors import CaptureError
from chunkc.ir.plan import StageRecord
from chunkc.ir.schedule import ParamInfo, Schedule

BoxedCallable = Callable[[list[Any]], Sequence[Any]]
BudgetChooser = Callable[[Callable[[float], Schedule]], tuple[float, str]]


@dataclass(frozen=True, slots=True)
class Compiled:
    """The callables that stand in for the two graphs.

    Both take their inputs as a list, which they empty.
    """

    forward: BoxedCallable
    backward: BoxedCallable


@dataclass(slots=True, repr=False)
class CaptureBackend:
    """A backend for ``torch.compile``; one instance per model.

    Attributes:
        index_of: parameter index of a live tensor, or None for anything else.
        infos: all parameters of the model by index.
        on_capture: makes the callables for one captured iteration.
        on_evaluation: makes the callable for a captured forward without gradients; None refuses it.
        decompositions: operator decompositions for AOTAutograd, or None.
        prepare_joint: passes over the joint graph before it is partitioned, in place, or None.
        is_cast: whether a tensor is a copy in compute dtype of what the caller handed in.
        on_break: told why and where a graph ended before its frame did.
        is_buffer: whether a tensor is a buffer of the model, not something that the caller hands in.
        fuses: whether segments will be compiled by something that fuses operators.
        is_for_gpu: whether the capture is planned for a GPU and not run: attention with dropout is one kernel then.
        choose_budget: given the schedule as a function of the activation budget, the budget to take and a note on why;
            None keeps what the partitioner keeps by itself.
    """

    index_of: Callable[[Any], int | None]
    infos: Sequence[ParamInfo]
    on_capture: Callable[[Captured], Compiled]
    on_evaluation: Callable[[Captured], BoxedCallable] | None = None
    decompositions: Mapping[Any, Any] | None = None
    prepare_joint: Callable[[GraphModule], None] | None = None
    is_cast: Callable[[Any], bool] = lambda value: False
    on_break: Callable[[str], None] | None = None
    is_buffer: Callable[[Any], bool] = lambda value: False
    fuses: bool = False
    is_for_gpu: bool = False
    choose_budget: BudgetChooser | None = None

    def __call__(self, module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one Dynamo graph."""
        reason = break_reason(module)
        if reason is not None and self.on_break is not None:
            self.on_break(reason)
        if self.is_for_gpu:
            drop_attention_dropout(module)
        examples = [dynamo_example(n) for n in module.graph.find_nodes(op="placeholder")]
        params = [self.index_of(e) for e in examples]
        handed_in = [e for e, p in zip(examples, params, strict=True) if p is None and not self.is_buffer(e)]
        capture = _GraphCapture(self, params, [self.is_cast(e) for e in examples], BatchSizes.of(handed_in))
        compile_with_aot = aot_backend(
            fw_compiler=capture.compile_forward,
            bw_compiler=capture.compile_backward,
            inference_compiler=capture.compile_inference,
            partition_fn=capture.partition,
            **({"decompositions": self.decompositions} if self.decompositions is not None else {}),
        )
        num_bases = return_bases(module)
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
        return without_last(keeps_undefined(compiled), num_bases)


class _GraphCapture:
    """One graph on its way through AOTAutograd."""

    def __init__(
        self,
        backend: CaptureBackend,
        input_params: Sequence[int | None],
        input_is_cast: Sequence[bool],
        sizes: BatchSizes,
    ) -> None:
        self._backend = backend
        self._input_params = input_params
        self._input_is_cast = input_is_cast
        self._options: dict[str, Any] = {"fuses": backend.fuses, "sizes": sizes}
        self._backward: GraphModule | None = None
        self._names: dict[str, int] = {}
        self._reached: dict[str, frozenset[int]] = {}
        self._compiled: Compiled | None = None
        self._stages: list[StageRecord] = []
        self._stage_began_s = time.perf_counter()

    def _end_stage(self, name: str, note: str) -> None:
        now = time.perf_counter()
        self._stages.append(StageRecord(name, 1e3 * (now - self._stage_began_s), note))
        self._stage_began_s = now

    def partition(self, joint: GraphModule, inputs: Sequence[Any], **options: Any) -> tuple[GraphModule, GraphModule]:
        self._end_stage("aot_autograd", f"a joint graph of {len(joint.graph.nodes)} nodes")
        placeholders = joint.graph.find_nodes(op="placeholder")
        self._names = self._params_by_name(placeholders)
        params = [n for n in placeholders if n.name in self._names]
        self._reached = find_reached(joint, options["num_fwd_outputs"])
        if self._backend.prepare_joint is not None:
            self._backend.prepare_joint(joint)
        if self._backend.choose_budget is not None and may_recompute(joint):
            budget, note = self._backend.choose_budget(partial(self._schedule_with, joint, inputs, options))
            options = {**options, "keep": budget}
            self._end_stage("rematerialise", note)
        forward, self._backward = partition(joint, inputs, params, **options)
        self._end_stage("partition", f"{len(forward.graph.nodes)} and {len(self._backward.graph.nodes)} nodes")
        return forward, self._backward

    def _schedule_with(
        self, joint: GraphModule, inputs: Sequence[Any], options: Mapping[str, Any], budget: float
    ) -> Schedule:
        """The schedule of a copy of ``joint`` partitioned with an activation budget."""
        trial = copied(joint)
        params = [n for n in trial.graph.find_nodes(op="placeholder") if n.name in self._names]
        forward, backward = partition(trial, inputs, params, **{**options, "keep": budget})
        return self._build(forward, backward, options["num_fwd_outputs"]).schedule

    def _build(self, forward: GraphModule, backward: GraphModule, num_user_outputs: int) -> Captured:
        num_outputs = len(backward.graph.find_nodes(op="output")[0].args[0])
        gradients: list[int | None] = [*self._input_params, *([None] * num_outputs)][:num_outputs]
        infos = self._backend.infos
        captured = build(forward, backward, self._names, gradients, num_user_outputs, infos, **self._options)
        return replace(captured, tangents=tangents_of(backward, self._reached, gradients))

    def _params_by_name(self, placeholders: Sequence[Node]) -> dict[str, int]:
        """Inputs come first in the joint graph, in the order in which Dynamo hands them over."""
        pairs = zip(placeholders, self._input_params, strict=False)
        return {node.name: index for node, index in pairs if index is not None}

    def compile_forward(self, module: GraphModule, example_inputs: Sequence[Any]) -> BoxedCallable:
        self._refuse_broken_rules()
        if self._backward is None:
            raise CaptureError("AOTAutograd compiled a forward graph without partitioning a joint graph first")
        captured = self._build(module, self._backward, num_forward_outputs())
        self._end_stage("schedule", f"{sum(len(g.operators) for g in captured.schedule.graphs)} operators")
        captured = replace(captured, stages=tuple(self._stages))
        self._node_names = [n.name for n in self._backward.graph.nodes if n.op == "call_function"]
        self._compiled = self._backend.on_capture(captured)
        return boxed(self._compiled.forward)

    def compile_backward(self, module: GraphModule, example_inputs: Sequence[Any]) -> BoxedCallable:
        forget_source(module)
        names = [n.name for n in module.graph.nodes if n.op == "call_function"]
        if self._compiled is None or names != self._node_names:
            raise CaptureError("the backward graph differs from the one that was planned; please report this")
        return boxed(self._compiled.backward)

    def compile_inference(self, module: GraphModule, example_inputs: Sequence[Any]) -> BoxedCallable:
        if self._backend.on_evaluation is None:
            raise CaptureError(
                "no output of this forward depends on a trainable parameter, so there is nothing to train: call it "
                "under torch.no_grad() to evaluate, or set requires_grad on the parameters to train before "
                "chunkc.compile"
            )
        self._end_stage("aot_autograd", f"a forward graph of {len(module.graph.nodes)} nodes")
        self._refuse_broken_rules()
        names = self._params_by_name(module.graph.find_nodes(op="placeholder"))
        if self._backend.prepare_joint is not None:
            self._backend.prepare_joint(module)
        check_outputs(module, names)
        captured = build_evaluation(module, names, self._backend.infos, **self._options)
        self._end_stage("schedule", f"{len(captured.schedule.forward.operators)} operators")
        return boxed(self._backend.on_evaluation(replace(captured, stages=tuple(self._stages))))

    def _refuse_broken_rules(self) -> None:
        if any(self._input_is_cast[i] for i in mutated_inputs() if i < len(self._input_is_cast)):
            raise CaptureError(
                "forward changes a floating-point input in place, but mixed precision hands it a copy in compute "
                "dtype; clone it in the model, hand it over in compute dtype, or compile with dtype=torch.float32"
            )
        for rule, positions in (("mutates", mutated_inputs()), ("returns", outputs_aliasing_inputs())):
            params = [self._input_params[i] for i in positions if i < len(self._input_params)]
            names = [self._backend.infos[p].name for p in params if p is not None]
            if names:
                raise CaptureError(
                    f"forward {rule} its own parameters {', '.join(names)} (or a view of them); parameters move "
                    "between devices while it runs. Keep such state in a buffer, or return a clone"
                )


def _shared_inputs_error(inputs: Sequence[Any]) -> CaptureError:
    """Make the error for a forward that changes one of ``inputs`` in place.

    Others of the ``inputs`` are over the same memory.
    """
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    uses = Counter(map(storage_address, tensors))
    shared = [str(tuple(t.shape)) for t in tensors if uses[storage_address(t)] > 1]
    return CaptureError(
        f"forward changes an input in place that shares memory with another one (inputs of shapes {', '.join(shared)} "
        "do), and what the other then holds is not captured; hand over a clone of one of them, or clone it in the model"
    )


def boxed(function: BoxedCallable) -> BoxedCallable:
    """Mark ``function`` as taking one list that it empties, so that inputs die at their last use."""

    def call(args: list[Any]) -> Sequence[Any]:
        return function(args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
