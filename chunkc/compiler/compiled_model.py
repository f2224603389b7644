"""A compiled model: ties capture, passes and runtime together behind the user's own module object.

Calls enter through ``CompiledModel.__call__``, which the module's ``__call__`` reaches as its compiled implementation.
Training forwards go through torch.compile into our backend; forwards without gradients are those of `evaluation`.
"""

from __future__ import annotations

import gc
import logging
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from chunkc._torch_compat.core import (
    BackendCompilerFailed,
    CaptureFailed,
    call_plain,
    capture_settings,
    hidden_from_dynamo,
    pytree,
    shared_frames,
)
from chunkc.capture.backend import CaptureBackend, Compiled
from chunkc.capture.graphs import Captured
from chunkc.compiler.build import CompiledPlan, PlanRequest, budget_chooser, build, measuring
from chunkc.compiler.debug import explain
from chunkc.compiler.evaluation import Evaluator
from chunkc.compiler.graph_breaks import BrokenForwards
from chunkc.compiler.graph_entry import callables, slot_of
from chunkc.compiler.keep_fp32 import Fp32Modules
from chunkc.compiler.memory.decisions import with_decisions
from chunkc.compiler.segment_compiler import SegmentCompiler
from chunkc.compiler.shape_cache import ShapeTable, Signature, entry_maker, signature_of
from chunkc.compiler.validation import buffer_test
from chunkc.distributed.process_group import Kind
from chunkc.errors import CaptureError, ChunkcError
from chunkc.passes import Planned, PlanOptions, Target
from chunkc.report import Plan as ReportedPlan
from chunkc.runtime.execution.executor import Executor
from chunkc.runtime.model.model import ModelRuntime

logger = logging.getLogger("chunkc")

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of work that a steady state no longer does.

    Attributes:
        num_compiles: captures of the forward, and segments compiled.
        num_slot_allocations: arenas and homes taken on the model's device (models that share one count together).
        num_unasked_syncs: how often the host waited for the device although nobody asked to see a value.
    """

    num_compiles: int
    num_slot_allocations: int
    num_unasked_syncs: int

    def since(self, earlier: Counts) -> dict[str, int]:
        """The differences by name."""
        return {f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)}


@dataclass(slots=True)
class Settings:
    """The resolved settings of one call of ``compile``.

    Attributes:
        ranks_per_node: ranks of the job on each node.
        cast_inputs: dtype that floating-point inputs are cast to, or None.
        backend_options: settings for the capture backend that the segment compiler needs (decompositions and the like).
    """

    target: Target
    options: PlanOptions
    cast_inputs: torch.dtype | None
    compiler: SegmentCompiler
    backend_options: dict[str, Any]
    passes: Any = None
    fullgraph: bool = False
    ranks_per_node: int = 1


class CompiledModel:
    """The implementation behind a compiled module's ``__call__``.

    Attributes:
        shapes: training programs by the signature of a call; ``shapes.max_programs`` bounds them.
        in_fp32: modules that compute in fp32 while others do not; they cast their inputs and outputs.
        is_open: whether the module holds plain parameters now (``full_params``): calls run the plain forward.
    """

    def __init__(self, model: nn.Module, runtime: ModelRuntime, settings: Settings) -> None:
        self.runtime = runtime
        self.planned: list[Planned] = []
        self.settings = settings
        self._model = model
        self._capture_started_s = 0.0
        self._warm: Counts | None = None
        self._least: tuple[int, int] | None = None
        self.is_open = False
        self.in_fp32 = Fp32Modules()
        by_id = {id(p): i for i, p in enumerate(runtime.params)}
        cast_ids = self._cast_ids = set[int]()
        options: dict[str, Any] = {
            "index_of": lambda value: by_id.get(id(value)),
            "infos": runtime.infos,
            "is_cast": lambda value: id(value) in cast_ids,
            "is_buffer": buffer_test(model),
            **settings.backend_options,
        }
        self.breaks = BrokenForwards(
            type(model).__name__, runtime, settings.compiler, _weakly(self.request), _weakly(self._on_built)
        )
        runtime.plan_recorded = _weakly(self.breaks.plan_recorded)
        choose = budget_chooser(settings.target.rates, _weakly(self.request))
        whole = CaptureBackend(on_capture=_weakly(self._on_capture), choose_budget=choose, **options)
        parts = CaptureBackend(
            on_capture=_weakly(self._on_part),
            on_break=_weakly(self.breaks.on_break),
            on_evaluation=_weakly(self.breaks.on_frozen),
            **options,
        )

        self.shapes = ShapeTable(entry_maker(model, whole))
        self.broken_shapes = ShapeTable(entry_maker(model, parts, fullgraph=False))
        self.evaluator = self.make_evaluator()

    def make_evaluator(self) -> Evaluator:
        """A new evaluator without programs."""
        settings, cast_ids = self.settings, self._cast_ids
        return Evaluator(
            self._model, self, settings.compiler, lambda value: id(value) in cast_ids, settings.backend_options
        )

    @hidden_from_dynamo
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward. An outer torch.compile breaks its graph here and calls it as it is.

        Raises:
            CaptureError: when the forward cannot be captured as one graph, with the source line that breaks it.
            BudgetError: on the first call of a shape, when the model does not fit.
            ShapeLimitError: when the call needs a program of its own and ``shapes.max_programs`` are made.
            AccumulationError: when gradients wait that were neither stepped nor zeroed.
        """
        if self.is_open:
            return call_plain(self._model, args, kwargs)
        with self.runtime.ranks.agreement_scope():
            return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._check_params()
        args, kwargs = self._cast(args, kwargs)
        if not torch.is_grad_enabled():
            return self.evaluator(args, kwargs)
        self.runtime.before_forward()
        if self.runtime.layout is None and self.runtime.ranks.size > 1:
            self._least = None
            self._agree_on_budgets()
        before = self.runtime.num_forwards
        if before == 1 and self._warm is None:
            self._warm = self._counts()
        outputs = self._captured(args, kwargs)
        if self.runtime.num_forwards == before:
            raise CaptureError(
                "this call ran without entering a compiled graph, so nothing of it can be trained: "
                + ("; ".join(self.breaks.reasons) or "Dynamo found no part of the forward that it can compile")
                + ". Breaks inside loops, and inside modules that torch owns, keep all of it from being compiled: "
                "move the break to the top of the forward"
            )
        self.runtime.watch(outputs)
        self.breaks.after_call()
        self.runtime.accounting.steps.forward([graph.plan for graph in self.runtime.ran if isinstance(graph, Executor)])
        return outputs

    def counts_since_warm_up(self) -> dict[str, int]:
        """``Counts`` by name since the second training forward began; zeros before."""
        now = self._counts()
        return now.since(self._warm or now)

    def _counts(self) -> Counts:
        return Counts(
            num_compiles=len(self.planned) + len(self.evaluator.planned) + self.settings.compiler.num_compiles,
            num_slot_allocations=self.runtime.device.num_allocations(),
            num_unasked_syncs=self.runtime.accounting.num_unasked_syncs(),
        )

    def _captured(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._capture_started_s = time.perf_counter()
        try:
            with capture_settings(), self.runtime.entering():
                return self._enter(signature_of(self._model, args, kwargs), args, kwargs)
        except BackendCompilerFailed as error:
            inner = error.inner_exception
            if isinstance(inner, ChunkcError):
                raise inner.with_traceback(None) from None
            raise

    def _enter(self, signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As one graph where that is possible; else, unless ``fullgraph`` was asked for, as several."""
        if signature not in self.broken_shapes:
            try:
                return self.shapes.call(signature, args, kwargs)
            except BackendCompilerFailed:
                raise
            except CaptureFailed as error:
                self._check_placed(args, kwargs, error)
                if self.settings.fullgraph:
                    raise CaptureError(
                        f"the forward of {type(self._model).__name__} breaks into several graphs, and fullgraph=True "
                        f"refuses that; the first break:\n{error}"
                    ) from error
        self.broken_shapes.max_programs = self.shapes.max_programs
        with shared_frames():
            return self.broken_shapes.call(signature, args, kwargs)

    def _cast(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs in compute dtype, noting which of them are copies."""
        self._cast_ids.clear()
        dtype = self.settings.cast_inputs
        if dtype is None:
            return args, kwargs

        def cast(value: torch.Tensor) -> torch.Tensor:
            found = value.to(dtype) if value.is_floating_point() else value
            if found is not value:
                self._cast_ids.add(id(found))
            return found

        cast_args, cast_kwargs = pytree.tree_map_only(torch.Tensor, cast, (args, kwargs))
        return cast_args, cast_kwargs

    def _check_placed(self, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> None:
        """After a capture that failed: were inputs on another device? Some models take such; this one did not."""
        device = self.runtime.device.torch_device
        named = [*((f"argument {i}", value) for i, value in enumerate(args)), *kwargs.items()]
        found = [
            f"{name} on {leaf.device}"
            for name, value in named
            for leaf in pytree.tree_leaves(value)
            if isinstance(leaf, torch.Tensor) and leaf.device != device
        ]
        if found:
            raise ChunkcError(
                f"the compiled model runs on {device}, but was called with {', '.join(found[:5])}: move the inputs "
                f"there (`tensor.to({str(device)!r})`). torch says: {error}"
            ) from error

    def _check_params(self) -> None:
        """The module must still hold the managed parameters, all of them and no others."""
        current, params = list(dict.fromkeys(self._model.parameters())), self.runtime.params
        if len(current) == len(params) and all(
            p is q and getattr(p, "_chunkc_index", None) == i
            for i, (p, q) in enumerate(zip(current, params, strict=True))
        ):
            return
        managed = {p for p in params if hasattr(p, "_chunkc_index")}
        strange = [n for n, p in self._model.named_parameters() if p not in managed]
        raise ChunkcError(
            f"parameters of the compiled model were replaced, added or removed ({', '.join(strange[:5]) or 'removed'});"
            " its layout is fixed. Change the model before chunkc.compile, write values in place, and load state dicts "
            "without assign=True"
        )

    def request(self) -> PlanRequest:
        """Return the request for a plan made now.

        The budgets are those that other models leave. The layout is the model's once there is one. A layout that was
        made without norms may leave no room for them: then a plan goes over to them later, or not.
        """
        settings, accounting, layout = self.settings, self.runtime.accounting, self.runtime.layout
        if accounting.others_device_nbytes() or accounting.others_host_nbytes(layout):
            gc.collect()  # a model that nobody holds any more, such as that of a notebook cell run again, still has it
        others_nbytes = accounting.others_device_nbytes()
        target = replace(
            settings.target,
            device_budget_nbytes=settings.target.device_budget_nbytes - others_nbytes,
            reserved_nbytes=settings.target.reserved_nbytes + others_nbytes,
            host_budget_nbytes=settings.target.host_budget_nbytes - accounting.others_host_nbytes(layout),
        )
        held_nbytes, is_host = self.runtime.staged_nbytes(), self.runtime.device.torch_device.type == "cpu"
        target = self._with_least(target)
        has_norms = any(executor.norm_table is not None for executor in self.runtime.executors.values())
        wanted = self.runtime.measures and (layout is None or has_norms)
        measures = settings.options.measures or wanted
        options = replace(settings.options, measures=measures, state_spec=self.runtime.state_spec)
        return PlanRequest(target, options, settings.passes, layout, held_nbytes, is_host, settings.ranks_per_node)

    def _agree_on_budgets(self) -> None:
        """The least budgets of all ranks, by which their first plans lay out the same chunks."""
        target, ranks = self.request().target, self.runtime.ranks
        budgets = (target.device_budget_nbytes, target.host_budget_nbytes)
        device, host = (min(ranks.agree(Kind.PLAN, lambda: [target.model], number=n)) for n in budgets)
        self._least = (device, host)

    def _with_least(self, target: Target) -> Target:
        if self._least is None:
            return target
        device, host = map(min, self._least, (target.device_budget_nbytes, target.host_budget_nbytes))
        others_nbytes = target.device_budget_nbytes - device
        return replace(
            target,
            device_budget_nbytes=device,
            host_budget_nbytes=host,
            reserved_nbytes=target.reserved_nbytes + others_nbytes,
        )

    def _on_capture(self, captured: Captured) -> Compiled:
        self.shapes.check_room()
        self._log_captured(captured)
        request = self.request()
        decided = with_decisions(captured, measures=request.options.measures, scales=request.options.scales)
        built = build(decided, request, self.settings.compiler)
        self.shapes.captured()
        self._on_built(built)
        slot = slot_of(captured)
        slot.plan, slot.graphs = built.planned.plan, built.graphs
        slot.measuring = measuring(built, self.settings.passes)
        return callables(slot, self.runtime)

    def _on_part(self, captured: Captured) -> Compiled:
        self.broken_shapes.check_room()
        self._log_captured(captured)
        compiled = self.breaks.on_capture(captured)
        self.broken_shapes.captured()
        return compiled

    def _log_captured(self, captured: Captured) -> None:
        num_ops = sum(len(g.operators) for g in captured.schedule.graphs)
        logger.info("captured %d operators in %.1f s", num_ops, time.perf_counter() - self._capture_started_s)

    def _on_built(self, built: CompiledPlan) -> None:
        plan = built.planned.plan
        self.planned.append(built.planned)
        explain(ReportedPlan.of(plan), plan.stages, built.code)


def compiled_of(model: nn.Module) -> CompiledModel:
    """Return the compiled model behind a module that ``chunkc.compile`` gave back.

    Raises:
        ChunkcError: for any other module.
    """
    compiled = getattr(model, "_compiled_call_impl", None)
    if not isinstance(compiled, CompiledModel):
        raise ChunkcError(f"this {type(model).__name__} was not compiled by chunkc.compile")
    return compiled


def _weakly(method: Callable[P, R]) -> Callable[P, R]:
    """``method`` without holding on to its object: Dynamo holds backends until the object is deleted."""
    reference = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        found = reference()
        if found is None:
            raise ChunkcError("the compiled model was deleted while its forward was captured")
        return found(*args, **kwargs)

    return call
