"""Forwards without gradients: forward-only programs, and the gathered path for the rest.

    call                                                      path
    of shapes seen before                                     program: planned, verified, within the budget
    the first of its shapes                                   gathered
    inputs one longer than in the call before (generation)    gathered: never a graph for each token
    arguments of other kinds (key-value caches)               gathered
    before the first training step laid the model out         gathered, from the staging store
    while gradients lie over parameters (no step yet)         gathered, the gradients stay
    not captured as one graph, or too large for the budget    gathered, with the reason

Programs stand in the layout of training, beside activations that wait for a backward. On the gathered path the plain
forward runs and every parameter gathers itself for the operator that reads it: exact, slow, outside of the plan. Both
leave parameters, gradients and optimizer states as they were.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from chunkc._torch_compat import capture_errors
from chunkc._torch_compat.core import call_plain, capture_settings, compiles_here
from chunkc.capture.attention.in_slices import AttentionOfSlices
from chunkc.capture.backend import capture_graph
from chunkc.compiler.build import CompiledPlan, build
from chunkc.compiler.capture_session import CaptureSession
from chunkc.compiler.graph_entry import RuntimeReference
from chunkc.compiler.memory.decisions import with_decisions
from chunkc.compiler.shape_cache import ShapeTable, Signature, entry_maker, signature_of
from chunkc.distributed.agreement import Kind
from chunkc.distributed.slices import check_slices, unchecked
from chunkc.errors import CaptureError, ChunkcError, RankError, ShapeLimitError
from chunkc.ir.verify import verify_beside
from chunkc.passes import Planned
from chunkc.progress import shown
from chunkc.runtime.execution.executor import Executor
from chunkc.runtime.model.model import ModelRuntime
from chunkc.runtime.model.program_state import AtStake
from chunkc.runtime.storage.parameter_io import static_slots

logger = logging.getLogger("chunkc")

_MAX_REMEMBERED = 4096  # signatures, as hashes
_STRANGE = "its arguments are not only tensors, numbers and strings (key-value caches are objects)"
_NOT_HERE = "torch.compile is switched off, or a function transform or a dispatch mode is active"
_STAGED = "no training step has laid the model out yet"
_WAITING = "gradients wait in the chunks to be stepped or discarded"
_FIRST = "its shapes are new; a program is made when they come again"
_GROWING = "inputs grow by one from call to call, as in generation"
_LIMIT = "as many programs are made as a model may have"


class Evaluator:
    """All calls without gradients of one compiled model; ``planned``: the plans made, in order."""

    def __init__(self, session: CaptureSession) -> None:
        self.planned: list[Planned] = []
        self._session = session
        self.shapes = self._make_table()
        self._layout = session.runtime.layout
        self._told: set[str] = set()
        self._seen = _Memory()
        self._refused = _Memory()
        self._last: Signature | None = None

    def _make_table(self) -> ShapeTable:
        return ShapeTable(entry_maker(self._session.model, self.compile_graph))

    def _follow_layout(self) -> None:
        """Forget programs of a layout that the model has left."""
        layout = self._session.runtime.layout
        if layout is not self._layout and self._layout is not None:
            most, self.shapes = self.shapes.max_programs, self._make_table()
            self.shapes.max_programs = most
        self._layout = layout

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._follow_layout()
        if self._session.runtime.ranks.context is not None and self._session.runtime.layout is None:
            raise unchecked()
        signature = signature_of(self._session.model, args, kwargs)
        reason = self._why_gathered(signature)
        way = "as planned" if reason is None else "operator by operator"
        ranks = self._session.runtime.ranks
        if ranks.context is not None:
            check_slices(ranks, ranks.context, self._session.model, args, kwargs)
        ranks.agree(Kind.EVALUATE, lambda: [way])
        self._seen.add(signature)
        self._last = signature
        if reason is None:
            try:
                return self._run_program(signature, args, kwargs)
            except (capture_errors.CaptureFailed, ShapeLimitError) as error:  # raised in place of running
                self._refused.add(signature)
                is_limit = isinstance(getattr(error, "inner_exception", error), ShapeLimitError)
                self._tell(_cause(error), logging.WARNING, kind=_LIMIT if is_limit else "")
        elif reason:
            self._tell(reason, logging.INFO)
        return self._gathered(args, kwargs)

    def _gathered(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The plain forward, in which every parameter gathers itself."""
        runtime = self._session.runtime
        context = runtime.ranks.context
        if context is not None:  # its operators exchange, and others wait for those of this rank
            place = "a forward without gradients"
            with runtime.ranks.collective_section(place, runtime.device.synchronize), AttentionOfSlices(context):
                return call_plain(self._session.model, args, kwargs)
        try:
            return call_plain(self._session.model, args, kwargs)
        except RankError:
            raise
        except Exception:  # whatever the model raises: the others may be reading a parameter
            self._session.runtime.ranks.announce_failure()
            raise

    def _why_gathered(self, signature: Signature) -> str | None:
        """Why this call takes the gathered path (empty: told before); None where it may take a program."""
        runtime = self._session.runtime
        if not signature.is_plain:
            return _STRANGE
        if signature in self._refused:
            return ""
        if not compiles_here():
            return _NOT_HERE
        if not runtime.can_evaluate:
            return _STAGED if runtime.layout is None else _WAITING
        if signature in self.shapes:
            return None
        if self._last is not None and signature.continues(self._last):
            return _GROWING
        return None if signature in self._seen else _FIRST

    def _tell(self, reason: str, level: int, kind: str = "") -> None:
        """Log ``reason`` once, or once for all of a kind."""
        kind = kind or reason
        if kind not in self._told:
            self._told.add(kind)
            logger.log(
                level,
                "a forward without gradients gathers its parameters operator by operator, outside the plan: %s",
                reason,
            )

    def _run_program(self, signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        runtime = self._session.runtime
        before, self._session.started_s = runtime.accounting.num_evaluations, time.perf_counter()
        with shown(is_first_rank=runtime.ranks.is_first_of_job), capture_settings(), runtime.parameters.entering():
            outputs = self.shapes.call(signature, args, kwargs)
        if runtime.accounting.num_evaluations == before:  # a stance of torch.compiler, or nothing to compute
            self._refused.add(signature)
            self._tell("torch.compile ran it without a graph", logging.WARNING)
        return outputs

    def compile_graph(self, module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Capture, plan and compile a forward without gradients, beside the latest training program."""
        session, entry = self._session, _Entry()
        runtime, training, compiler = session.runtime, session.runtime.executor, session.settings.compiler
        captured, code = capture_graph(
            module, example_inputs, session.tensors, session.tracing, entry.forward, evaluates=True
        )
        if captured.tangents is not None:
            raise CaptureError("the forward turns gradients on although the call has turned them off")
        self.shapes.check_room()
        session.log(captured, " without gradients")
        if training is None or not captured.schedule.forward.operators:
            raise CaptureError("there is nothing to compute, or no training program to stand beside")
        decided = with_decisions(captured, tracks_grad_norm=training.plan.tracks_grad_norm, scales=False)
        built = build(decided, session.request(), compiler)
        verify_beside(built.plan, training.plan)
        runtime.accounting.reserve(built.plan.memory.device_peak_nbytes)
        entry.attach(runtime, built, captured.held_at_start_nbytes)
        self.planned.append(built.planned)
        self.shapes.captured()
        built.explain()
        return code


class _Entry(RuntimeReference):
    """The functions behind compiled code of one graph without gradients."""

    def attach(self, runtime: ModelRuntime, built: CompiledPlan, held_nbytes: int) -> None:
        self.refer_to(runtime)
        self._built, self._held_nbytes = built, held_nbytes

    def forward(self, args: list[Any]) -> list[Any]:
        """Run the program between joined streams, from cold to cold. A backward that waits resumes from cold."""
        runtime, executor = self.runtime(), self._executor()
        executor.agree(Kind.EVALUATE, executor.program("evaluate"))
        with runtime.ranks.collective_section("an evaluation", runtime.device.synchronize):
            runtime.settle()
            runtime.state.to_cold()
            runtime.parameters.join()
            runtime.device.check_usable()
            runtime.accounting.start_evaluation(self._held_nbytes)
            try:
                with runtime.state.changing(AtStake.DEVICE):
                    outputs = executor.evaluate(args)
            except BaseException:
                runtime.state.recover()
                raise
        runtime.accounting.num_asked_syncs += 1
        runtime.accounting.end_evaluation(runtime.layout, outputs)
        return outputs

    def _executor(self) -> Executor:
        runtime, plan = self.runtime(), self._built.plan
        if self not in runtime.executors:
            with torch.inference_mode(False):  # views of the arena are ordinary tensors
                store = runtime.parameters.adopt(plan.layout, static_slots(plan.layout, plan.cold.resident))
                runtime.executors[self] = Executor(plan, store, runtime.device, self._built.graphs, runtime.ranks)
        return runtime.executors[self]


class _Memory:
    """Which signatures came before: hashes only, the oldest forgotten first."""

    def __init__(self) -> None:
        self._hashes: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, signature: Signature) -> bool:
        return hash(signature.key) in self._hashes

    def add(self, signature: Signature) -> None:
        self._hashes[hash(signature.key)] = None
        self._hashes.move_to_end(hash(signature.key))
        if len(self._hashes) > _MAX_REMEMBERED:
            self._hashes.popitem(last=False)


def _cause(error: Exception) -> str:
    """Return the cause of ``error`` as one text; of a graph break, with the source line."""
    inner = getattr(error, "inner_exception", None)
    if isinstance(inner, ChunkcError) or isinstance(error, ChunkcError):
        return str(inner or error)
    if inner is not None:
        return f"its graph does not compile: {type(inner).__name__}: {inner}"
    text, _, user_code = str(error).partition("from user code:")
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    lines = [line.strip() for line in user_code.partition("Set TORCHDYNAMO")[0].splitlines() if line.strip()]
    return f"it is not captured as one graph: {first}" + (f"; at {' '.join(lines[-2:])}" if lines else "")
