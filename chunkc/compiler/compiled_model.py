"""A compiled model: what the user's own module object calls in place of its forward.

Training forwards go through torch.compile into the capture session; those without gradients are those of `evaluation`.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from chunkc._torch_compat import capture_errors
from chunkc._torch_compat.core import (
    call_plain,
    capture_settings,
    forget_constant_floats,
    hidden_from_dynamo,
    pytree,
    shared_frames,
)
from chunkc._torch_compat.symbolic import changing
from chunkc.compiler.capture_session import CaptureSession, Planner, Settings
from chunkc.compiler.changing_sizes import MAX_SHARED_PROGRAMS, ChangingSizes
from chunkc.compiler.evaluation import Evaluator
from chunkc.compiler.float_inputs import MAX_PROGRAMS_OF_FLOATS, FloatCall, FloatInputs
from chunkc.compiler.graph_breaks import BrokenForwards
from chunkc.compiler.graph_entry import NotPlannedYet
from chunkc.compiler.module_frames import add_frames
from chunkc.compiler.shape_cache import Signature, is_data_dependent, numbers_of, signature_of, tensors_of
from chunkc.distributed.mesh import RankMesh
from chunkc.distributed.slices import check_slices, one_slice_alone
from chunkc.errors import BudgetError, CaptureError, ChunkcError
from chunkc.progress import shown
from chunkc.runtime.model.model import ModelRuntime
from chunkc.runtime.params.tensor_views import TensorViews, views_of

logger = logging.getLogger("chunkc")


class CompiledModel:
    """Implements a compiled module's ``__call__``; ``is_open`` within ``full_params``: the plain forward."""

    def __init__(
        self, model: nn.Module, runtime: ModelRuntime, settings: Settings, planner: Planner = CaptureSession.plan
    ) -> None:
        self.session = CaptureSession(model, runtime, settings, planner)
        self.breaks = BrokenForwards(self.session)
        self.evaluator = Evaluator(self.session)
        self.is_open = False
        self._model = model
        self._warm: dict[str, int] | None = None
        self._floats = FloatInputs()
        self._sizes = ChangingSizes()
        self._checked: list[tuple[nn.Module, list[int]]] = []

    @property
    def runtime(self) -> ModelRuntime:
        return self.session.runtime

    @property
    def settings(self) -> Settings:
        return self.session.settings

    def enter(self) -> None:
        """Let calls of the module enter here from now on."""
        self._model._compiled_call_impl = self

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
            if self.runtime.ranks.context is not None:
                raise one_slice_alone()
            return call_plain(self._model, args, kwargs)
        with self.runtime.ranks.agreement_scope():
            return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._check_params()
        args, kwargs = self._cast(args, kwargs)
        if not torch.is_grad_enabled():
            return self.evaluator(args, kwargs)
        ranks = self.runtime.ranks
        if ranks.context is not None:
            check_slices(ranks, ranks.context, self._model, args, kwargs)
        self.runtime.before_forward()
        if self.runtime.layout is None and ranks.job_size > 1:
            self.session.agree_on_budgets()
        if self.settings.examples:
            self._declare()
        before = self.runtime.num_forwards
        if before == 1 and self._warm is None:
            self._warm = self._counts()
        outputs = self._captured(args, kwargs)
        if self.runtime.num_forwards == before:
            raise CaptureError(
                "this call ran without entering a compiled graph, so nothing of it can be trained: "
                + ("; ".join(self.breaks.reasons) or "Dynamo found no part of the forward that it can compile")
                + ". A break inside a loop keeps the function around it from being compiled, and only modules that it "
                "calls are: make the body of the loop a module, or move the break out of the loop"
            )
        self.runtime.watch(outputs)
        if self.runtime.layout is None:
            self.breaks.after_call()
        elif self.runtime.parameters.outside.between:
            self.runtime.parameters.outside.tell_share(type(self._model).__name__)
        self.runtime.steps.log.forward([ran.plan for ran in self.runtime.ran if ran.plan is not None])
        return outputs

    def _declare(self) -> None:
        """Capture the examples without running anything, and plan all over one layout."""
        session, examples = self.session, self.settings.examples
        session.is_declaring = True
        try:
            for args, kwargs in examples:
                with suppress(NotPlannedYet):
                    self._captured(*self._cast(args, kwargs), may_break=False)
            session.is_declaring = False
            session.graphs.plan_declared()
        except BaseException:
            session.graphs.graphs.clear()
            session.shapes.clear()
            raise
        finally:
            session.is_declaring = False
        self.settings.examples = ()

    def counts_since_warm_up(self) -> dict[str, int]:
        """Count work that a steady state no longer does, since the second training forward began."""
        now = self._counts()
        return {name: count - (self._warm or now)[name] for name, count in now.items()}

    def _counts(self) -> dict[str, int]:
        """Captures and compiled segments; arenas and homes, also of models on the same device; unasked waits."""
        num_plans = self.session.num_planned + len(self.evaluator.planned)
        return {
            "num_compiles": num_plans + self.settings.compiler.num_compiles,
            "num_slot_allocations": self.runtime.device.num_allocations(),
            "num_unasked_syncs": self.runtime.accounting.num_unasked_syncs(),
        }

    def _captured(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, may_break: bool = True) -> Any:
        self.session.started_s, runtime = time.perf_counter(), self.runtime
        try:
            with capture_settings(), runtime.parameters.entering():
                signature = signature_of(self._model, args, kwargs)
                if signature in self.session.shapes:
                    return self._enter_as(signature, args, kwargs, may_break=may_break)
                with shown(is_first_rank=runtime.ranks.is_first_of_job):
                    return self._enter_as(signature, args, kwargs, may_break=may_break)
        except capture_errors.BackendCompilerFailed as error:
            inner = error.inner_exception
            if isinstance(inner, ChunkcError):
                raise inner.with_traceback(None) from None
            raise

    def _enter_as(self, signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any], *, may_break: bool) -> Any:
        if not may_break:
            return self._enter_whole(signature, args, kwargs)
        places = self._floats.changed(args, kwargs) if signature.numbers else ()
        if places:
            return self._enter_with_floats(FloatCall.of(places, args, kwargs), args, kwargs)
        return self._enter(signature, args, kwargs)

    def _enter_with_floats(self, call: FloatCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As one graph for any value of the floats that change, or else one for each value."""
        shapes, signature = self.session.shapes, signature_of(self._model, call.args, call.kwargs)
        signature = replace(signature, numbers=numbers_of(args, kwargs))
        reason = "it takes them for constants"
        try:
            forget_constant_floats()
            return self._as_one_graph(signature, call.args, call.kwargs, call)
        except capture_errors.CaptureFailed as error:
            if isinstance(getattr(error, "inner_exception", None), ChunkcError):
                raise
            reason = str(error).partition("\n")[0]
            self._floats.refuse(args, kwargs)
            return self._enter(signature_of(self._model, args, kwargs), args, kwargs)
        finally:
            shared = self._sizes.shared(signature) or signature
            if max(map(shapes.num_programs_of, (signature, shared))) > MAX_PROGRAMS_OF_FLOATS:
                self._floats.refuse(args, kwargs)
            if self._floats.is_refused(args, kwargs):
                logger.info(
                    "%s is captured anew for each value of %s, which change from call to call: %s. Keep them in "
                    "tensors",
                    *(type(self._model).__name__, ", ".join(signature.numbers), reason),
                )

    def _enter(self, signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As one graph where that is possible; else, unless ``fullgraph`` was asked for, as several."""
        shapes, broken_shapes = self.session.shapes, self.breaks.shapes
        if signature not in broken_shapes:
            try:
                return self._as_one_graph(signature, args, kwargs)
            except capture_errors.BackendCompilerFailed:
                raise
            except capture_errors.CaptureFailed as error:
                self._check_placed(args, kwargs, error)
                self.breaks.has_data_sizes |= is_data_dependent(error)
                if self.settings.fullgraph:
                    raise self._breaks("fullgraph=True refuses that", error) from error
        broken_shapes.max_programs = shapes.max_programs
        add_frames(self._model)
        with shared_frames():
            return broken_shapes.call(signature, args, kwargs)

    def _as_one_graph(
        self, signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any], floats: FloatCall | None = None
    ) -> Any:
        """As one graph for any sizes where those of such calls change, or else one for these sizes."""
        shapes, sizes, reason = self.session.shapes, self._sizes, ""
        if signature in shapes:
            return self._call_entry(signature, args, kwargs, floats)
        shared = sizes.shared(signature)
        if shared is not None:
            try:
                return self._at_any_size(signature, shared, args, kwargs, floats)
            except (capture_errors.CaptureFailed, CaptureError, BudgetError) as error:
                inner = getattr(error, "inner_exception", error)
                if isinstance(inner, ChunkcError) and not isinstance(inner, (CaptureError, BudgetError)):
                    raise
                if not isinstance(inner, BudgetError):  # alone, more of it may be recomputed
                    reason = str(inner).partition("\n")[0]
        outputs = self._call_entry(signature, args, kwargs, floats)
        sizes.note_alone(signature)
        if shared is not None and reason and not shapes.num_programs_of(shared):
            self._capture_alone(signature, reason)
        return outputs

    def _at_any_size(
        self,
        signature: Signature,
        shared: Signature,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        floats: FloatCall | None,
    ) -> Any:
        """By the entry that calls of this form share, unless its graphs turn out to serve few sizes."""
        shapes, sizes, tensors = self.session.shapes, self._sizes, tensors_of(args, kwargs)
        num_programs = shapes.num_programs_of(shared)
        with changing((tensors[number], dimension) for number, dimension in sizes.changed(signature)):
            outputs = self._call_entry(shared, args, kwargs, floats)
        if shapes.num_programs_of(shared) > num_programs:
            sizes.note_served(signature)
            is_fixed = shapes.has_fixed and not sizes.is_special(signature)
            if is_fixed or num_programs + 1 >= MAX_SHARED_PROGRAMS:
                self._capture_alone(signature, "its forward reads them as numbers")
        return outputs

    def _call_entry(
        self, signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any], floats: FloatCall | None
    ) -> Any:
        if floats is None:
            return self.session.shapes.call(signature, args, kwargs)
        return self.session.shapes.call(signature, (floats.values, *args), kwargs, floats.places)

    def _capture_alone(self, signature: Signature, reason: str) -> None:
        """From now on, have one graph for each size of calls of this form, and say so."""
        self._sizes.refuse(signature)
        logger.warning(
            "%s is captured anew for each size of its inputs (%.1f s this time, and %d sizes at most): %s. Pad inputs "
            "to few lengths",
            *(type(self._model).__name__, time.perf_counter() - self.session.started_s),
            *(self.session.shapes.max_programs, reason),
        )

    def _enter_whole(self, signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As one graph, or CaptureError."""
        try:
            return self.session.shapes.call(signature, args, kwargs)
        except NotPlannedYet:
            self._sizes.note_alone(signature)
            raise
        except capture_errors.BackendCompilerFailed:
            raise
        except capture_errors.CaptureFailed as error:
            self._check_placed(args, kwargs, error)
            raise self._breaks("its shapes cannot be declared by example_inputs", error) from error

    def _breaks(self, rule: str, error: Exception) -> CaptureError:
        name = type(self._model).__name__
        return CaptureError(f"the forward of {name} breaks into several graphs, and {rule}; the first break:\n{error}")

    def _cast(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs in compute dtype, noting which of them are copies."""
        casts = self.session.tensors.casts
        casts.clear()
        dtype = self.settings.cast_inputs
        if dtype is None:
            return args, kwargs

        def cast(value: torch.Tensor) -> torch.Tensor:
            copy = value.to(dtype) if value.is_floating_point() else value
            if copy is not value:
                casts.add(id(copy))
            return copy

        cast_args, cast_kwargs = pytree.tree_map_only(torch.Tensor, cast, (args, kwargs))
        return cast_args, cast_kwargs

    def _check_placed(self, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> None:
        """After a capture that failed: were inputs on another device? Some models take such; this one did not."""
        device = self.runtime.device.torch_device
        named = [*((f"argument {i}", value) for i, value in enumerate(args)), *kwargs.items()]
        leaves = [(name, leaf) for name, value in named for leaf in pytree.tree_leaves(value)]
        strange = [f"{n} on {t.device}" for n, t in leaves if isinstance(t, torch.Tensor) and t.device != device]
        if strange:
            raise ChunkcError(
                f"the compiled model runs on {device}, but was called with {', '.join(strange[:5])}: move the inputs "
                f"there (`tensor.to({str(device)!r})`). torch says: {error}"
            ) from error

    def _check_params(self) -> None:
        """The module must still hold the managed parameters, all of them and no others."""
        if self._checked and all(_members(module) == members for module, members in self._checked):
            return
        current, params = list(dict.fromkeys(self._model.parameters())), self.runtime.params
        if len(current) == len(params) and all(
            p is q and getattr(p, "chunkc_index", None) == i
            for i, (p, q) in enumerate(zip(current, params, strict=True))
        ):
            self._checked = [(module, _members(module)) for module in self._model.modules()]
            return
        managed = {p for p in params if hasattr(p, "chunkc_index")}
        strange = [n for n, p in self._model.named_parameters() if p not in managed]
        raise ChunkcError(
            f"parameters of the compiled model were replaced, added or removed ({', '.join(strange[:5]) or 'removed'});"
            " its layout is fixed. Change the model before chunkc.compile, write values in place, and load state dicts "
            "without assign=True"
        )


def _members(module: nn.Module) -> list[int]:
    """Identities of the parameters and modules that ``module`` holds itself."""
    return [*map(id, module._parameters.values()), *map(id, module._modules.values())]


def compiled_of(model: nn.Module) -> CompiledModel:
    """Return the compiled model behind a module from ``chunkc.compile``; ChunkcError for any other."""
    compiled = getattr(model, "_compiled_call_impl", None)
    if not isinstance(compiled, CompiledModel):
        raise ChunkcError(f"this {type(model).__name__} was not compiled by chunkc.compile")
    return compiled


def views_ahead(model: nn.Module, ranks: RankMesh) -> TensorViews:
    """The DTensors of a model that is planned for ``ranks``; ChunkcError where it is compiled with some."""
    compiled = getattr(model, "_compiled_call_impl", None)
    if isinstance(compiled, CompiledModel) and compiled.runtime.parameters.shards:
        raise ChunkcError(
            f"{type(model).__name__} is compiled under tensor parallelism: plan it before (chunkc.plan_of has its plan)"
        )
    return views_of(model, ranks)
