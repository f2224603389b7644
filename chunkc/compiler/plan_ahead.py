"""Planning ahead: one iteration of a model is captured on fake tensors and planned, for any machine.

The path is that of ``chunkc.compile`` (Dynamo, AOTAutograd, the same capture and passes), so the plan is the one that a
run makes; a run with Inductor then corrects it by what compiled segments take. Only the tensors differ: a fake CPU
tensor of the same shape, strides, storage and dtype stands for every parameter, buffer and input, of the meta device
too. Nothing takes memory, and nothing runs.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from chunkc._torch_compat import capture_errors
from chunkc._torch_compat.collectives import ContextLine
from chunkc._torch_compat.core import (
    FakeTensorMode,
    call_plain,
    capture_settings,
    fresh_code,
    pytree,
)
from chunkc._torch_compat.release import ReleasableBackend
from chunkc.capture.attention.kernels import Capability
from chunkc.capture.backend import ModelTensors, capture_graph
from chunkc.capture.budgets import GraphChooser
from chunkc.capture.graphs import Captured
from chunkc.capture.layers.deep_captures import CapturedAhead, captured_by_layers
from chunkc.compiler.build import PlanRequest, budget_chooser, kept_choices
from chunkc.compiler.keep_fp32 import Fp32Modules
from chunkc.compiler.memory.decisions import with_decision_bytes
from chunkc.compiler.segment_compiler import Backend, SegmentCompiler
from chunkc.compiler.validation import is_mixed, param_infos, unique_params
from chunkc.errors import CaptureError, ChunkcError
from chunkc.ir.plan import StageRecord
from chunkc.ir.schedule import ParamInfo, Schedule
from chunkc.ir.verify import verify
from chunkc.passes import Packings, Pass, PlanOptions, Target, make_fastest_plan
from chunkc.passes.search import MAX_ACTIONS
from chunkc.progress import stage
from chunkc.report import Plan

logger = logging.getLogger("chunkc")


@contextmanager
def uncollected() -> Iterator[None]:
    """Switch off Python's cyclic garbage collector, which takes a quarter of the time and finds nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@uncollected()
def plan_ahead(
    model: nn.Module,
    target: Target,
    options: PlanOptions,
    *,
    example_inputs: Mapping[str, Any] | Sequence[Any],
    dtype: torch.dtype | None,
    backend: Backend,
    passes: Sequence[Pass] | None = None,
    in_fp32: Fp32Modules | None = None,
    gpu: Capability | None = None,
    context: ContextLine | None = None,
) -> Plan:
    """Return the verified plan of one iteration of ``model``.

    Nothing is compiled, so where ``backend`` fuses operators the non-model bytes are an estimate, with a margin
    (`chunkc.capture.liveness.MARGIN`). ``compile`` corrects it: it may then plan fewer moves, or have to plan more.

    Args:
        dtype: what fp32 parameters are computed in, or None to leave all as they are.
        in_fp32: the parameters that stay in fp32.
        gpu: compute capability of the target, whose kernels of attention are traced; None: those of the CPU.
        context: ranks that have slices of the same sequences, those of the inputs among them; they need not exist.

    Raises:
        BudgetError: when the model does not fit ``target``.
        CaptureError: when its forward is no single graph that can be trained.
    """
    choose = budget_chooser(PlanRequest(target, options, passes, choices=kept_choices()))
    infos = param_infos(model, dtype, (in_fp32 or Fp32Modules()).params)

    def capture(choose: GraphChooser | None) -> Captured:
        return capture_ahead(model, dtype, example_inputs, backend, choose, in_fp32, gpu=gpu, context=context)

    captured = captured_by_layers(model, capture, choose, infos)
    if captured is None:
        whole = capture(choose)
        captured = CapturedAhead(whole.estimates, whole.stages)
    wishes = {"tracks_grad_norm": options.tracks_grad_norm, "scales": options.scales}
    schedule = with_decision_bytes(captured.schedule, **wishes)
    return plan_schedule(schedule, target, options, captured.stages, backend, passes)


def plan_schedule(
    schedule: Schedule,
    target: Target,
    options: PlanOptions,
    stages: Sequence[StageRecord],
    backend: Backend,
    passes: Sequence[Pass] | None = None,
    max_actions: int = MAX_ACTIONS,
    packings: Packings | None = None,
) -> Plan:
    """Return the verified plan of an iteration captured in ``stages``; BudgetError when it does not fit.

    ``max_actions`` and ``packings``: as of `make_fastest_plan`.
    """
    num_ops = sum(len(g.operators) for g in schedule.graphs)
    logger.info("captured %d operators in %.1f s", num_ops, sum(s.elapsed_ms for s in stages) / 1e3)
    captured_at = time.perf_counter()
    choices = kept_choices()
    planned = make_fastest_plan(
        schedule, target, options, passes=passes, max_actions=max_actions, choices=choices, packings=packings
    )
    plan = planned.plan
    plan = replace(plan, memory=replace(plan.memory, is_estimate=SegmentCompiler.of(backend).fuses))
    planned_at = time.perf_counter()
    stage("verifying the plan")
    verify(plan)
    finished = time.perf_counter()
    logger.info("planned %s in %.1f s", plan.digest(), finished - captured_at)
    verified = StageRecord("verify", 1e3 * (finished - planned_at), "safe in every interleaving")
    return Plan.of(replace(plan, stages=(*stages, *plan.stages, verified)))


class _CaptureDone(Exception):
    """Ends a capture from inside torch.compile, with what was captured."""

    def __init__(self, captured: Captured) -> None:
        super().__init__("captured")
        self.captured = captured


def capture_ahead(
    model: nn.Module,
    dtype: torch.dtype | None,
    example_inputs: Mapping[str, Any] | Sequence[Any],
    backend: Backend,
    choose_budget: GraphChooser | None = None,
    in_fp32: Fp32Modules | None = None,
    *,
    gpu: Capability | None = None,
    context: ContextLine | None = None,
) -> Captured:
    """Capture one iteration of ``model``, which stays as it is; arguments and errors as of `plan_ahead`."""

    def compile_graph(module: GraphModule, graph_inputs: Sequence[Any]) -> Callable[..., Any]:
        captured, _ = capture_graph(module, graph_inputs, tensors, tracing, choose=choose_budget, trains_scalar=True)
        raise _CaptureDone(replace(captured, general=None))

    def enter(*args: Any, **kwargs: Any) -> Any:
        return call_plain(model, args, kwargs)

    started = time.perf_counter()
    in_fp32, tracing = in_fp32 or Fp32Modules(), replace(SegmentCompiler.of(backend).tracing, context=context, gpu=gpu)
    params = list(unique_params(model))
    fakes = _Fakes(dict(zip(params, param_infos(model, dtype, in_fp32.params), strict=True)))
    with in_fp32.attached(), FakeTensorMode(allow_non_fake_inputs=True), swapped_tensors(model, fakes.stand_in):
        tensors = ModelTensors(model, unique_params(model), list(fakes.infos.values()))
        inputs = pytree.tree_map_only(torch.Tensor, fakes.of, example_inputs)
        if is_mixed(params, dtype):
            inputs = pytree.tree_map_only(torch.Tensor, lambda value: _cast(value, dtype, tensors), inputs)
        releasable = ReleasableBackend(compile_graph)
        stage("capturing the forward")
        run: Callable[..., Any] = torch.compile(fresh_code(enter), backend=releasable, fullgraph=True, dynamic=False)
        try:
            with capture_settings(), torch.enable_grad():
                run(**inputs) if isinstance(inputs, Mapping) else run(*inputs)
        except capture_errors.BackendCompilerFailed as error:
            if isinstance(error.inner_exception, _CaptureDone):
                captured = error.inner_exception.captured
                elapsed_ms = 1e3 * (time.perf_counter() - started) - sum(s.elapsed_ms for s in captured.stages)
                return replace(
                    captured, stages=(StageRecord("dynamo", elapsed_ms, "forward as one graph"), *captured.stages)
                )
            if isinstance(error.inner_exception, ChunkcError):
                raise error.inner_exception from None
            raise
        except capture_errors.CaptureFailed as error:
            raise CaptureError(f"{type(model).__name__} breaks into several graphs:\n{error}") from error
        finally:
            releasable.release()
    raise CaptureError(f"{type(model).__name__} was not captured: its forward has nothing to train")


@dataclass(slots=True)
class _Fakes:
    """Fake CPU tensors in a ``FakeTensorMode``; ``infos``: facts of parameters, in compute dtype."""

    infos: Mapping[torch.Tensor, ParamInfo]
    _storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    _made: dict[int, torch.Tensor] = field(default_factory=dict)

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """For a parameter or a buffer of the model."""
        info = self.infos.get(tensor)
        if info is None:
            return self.of(tensor)
        empty = torch.empty_strided(info.shape, info.stride, dtype=getattr(torch, info.dtype), device="cpu")
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)

    def of(self, value: torch.Tensor) -> torch.Tensor:
        """Return the one fake of ``value``, with its strides; fakes share storage as their tensors do."""
        if id(value) not in self._made:
            storage = value.untyped_storage()
            if storage._cdata not in self._storages:
                memory = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu")
                self._storages[storage._cdata] = memory.untyped_storage()
            made = torch.empty(0, dtype=value.dtype, device="cpu")
            made.set_(self._storages[storage._cdata], value.storage_offset(), value.shape, value.stride())
            self._made[id(value)] = made.requires_grad_(value.requires_grad)
        return self._made[id(value)]


def _cast(value: torch.Tensor, dtype: torch.dtype | None, tensors: ModelTensors) -> torch.Tensor:
    """A floating-point input in compute dtype, noted as a copy; itself where it has that already."""
    copy = value.detach().to(dtype) if value.is_floating_point() and value.dtype is not dtype else value
    if copy is not value:
        tensors.casts.add(id(copy))
    return copy.requires_grad_(value.requires_grad)


@contextmanager
def swapped_tensors(
    model: nn.Module, make: Callable[[torch.Tensor], torch.Tensor], *, buffers: bool = True
) -> Iterator[dict[torch.Tensor, torch.Tensor]]:
    """Replace every parameter (and buffer) ``t`` of ``model`` by ``make(t)`` in the block, ties kept."""
    made: dict[torch.Tensor, torch.Tensor] = {}
    before: list[tuple[dict[str, Any], dict[str, Any]]] = []
    try:
        for module in model.modules():
            for table in (module._parameters, module._buffers) if buffers else (module._parameters,):
                before.append((table, dict(table)))
                for key, tensor in table.items():
                    if tensor is not None:
                        table[key] = made[tensor] = made[tensor] if tensor in made else make(tensor)  # type: ignore
        yield made
    finally:
        for table, original in before:
            table.update(original)
