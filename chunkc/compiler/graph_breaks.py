"""Forwards that break into several graphs.

Dynamo runs one graph before it sees the next, so the first iteration runs operator by operator
(``runtime.execution.warmup_graph``) while graphs are recorded in the order in which they run. The first step makes one
layout from all of them, and a plan for each over it; a graph that is met later gets a plan over that layout. Eager code
between the graphs gathers the parameters that it reads; its gradients are ordinary tensors until the step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch.fx import GraphModule

from chunkc._torch_compat.core import break_reason, without_modes
from chunkc._torch_compat.release import compilations_forgotten
from chunkc.capture.backend import capture_graph
from chunkc.capture.bundles import CapturedGraph
from chunkc.capture.graphs import Captured
from chunkc.capture.joined import join, saved_nbytes, with_concurrent
from chunkc.capture.symbolic import Sizes
from chunkc.compiler.build import CompiledPlan, PlanRequest, build
from chunkc.compiler.capture_session import CaptureSession
from chunkc.compiler.graph_entry import GraphEntry
from chunkc.compiler.memory.decisions import with_decisions
from chunkc.compiler.segment_compiler import SegmentCompiler, compile_eager, compile_inductor
from chunkc.compiler.shape_cache import ShapeTable, entry_maker, weakly
from chunkc.compiler.sized_entries import MAX_COMPILED_SIZES, SizedEntries
from chunkc.errors import BudgetError
from chunkc.ir.layout import Layout
from chunkc.ir.plan import Segment
from chunkc.ir.schedule import GraphKind
from chunkc.ir.tiers import Tier
from chunkc.passes import make_plan
from chunkc.passes.lower import LoweredSegment, lower
from chunkc.runtime.execution.bound_action import CompiledGraph, SegmentCallable
from chunkc.runtime.execution.warmup_graph import UnplannedGraph

logger = logging.getLogger("chunkc")

MAX_UNPLANNED_STEPS = 3
"""Steps that a forward may run for without a plan before the log says why there is none."""


class BrokenForwards:
    """The graphs of one model whose forward breaks.

    Attributes:
        reasons: why and where it breaks, each once, as met.
        has_data_sizes: whether data tell sizes in the forward, so that those of the first calls bound nothing.
    """

    def __init__(self, session: CaptureSession) -> None:
        self.shapes = ShapeTable(entry_maker(session.model, self.compile_graph, breaks=True))
        self.reasons: list[str] = []
        self.has_data_sizes = False
        self._alive_nbytes = 0
        self._session = session
        self._name = type(session.model).__name__
        self._recorded: dict[GraphEntry, Captured] = {}
        self._num_unplanned = 0
        session.runtime.steps.plan_recorded = weakly(self.plan_recorded)

    def compile_graph(self, module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Capture one of the graphs. Before there is a layout it is recorded, afterwards planned."""
        reason = break_reason(module)
        if reason is not None and reason not in self.reasons:
            self.reasons.append(reason)
            logger.warning("the forward of %s breaks: %s", self._name, reason)
        session, entries = self._session, SizedEntries()
        captured, code = capture_graph(
            *(module, example_inputs, session.tensors, session.settings.compiler.tracing),
            *(partial(weakly(self._forward), entries), partial(weakly(self._backward), entries)),
            evaluates=True,
        )
        if captured.tangents is not None:
            self.shapes.check_room()
            session.log(captured)
            if captured.symbolic is not None:
                logger.info(
                    "its inputs change in size from call to call: a size is planned when it comes, from the graph "
                    "captured now, and compiled when it comes again (%d sizes at most)",
                    MAX_COMPILED_SIZES,
                )
        self._make(entries, entries.capture(captured), captured, compiles=captured.symbolic is None)
        if captured.tangents is not None:
            self.shapes.captured()
        return code

    def _forward(self, entries: SizedEntries, args: list[Any]) -> list[Any]:
        """Outputs of a forward graph; empties ``args``."""
        sizes = entries.forward_sizes(args)
        entry, compiles = entries.get(sizes), entries.should_compile(sizes)
        if entry is None or compiles or self._is_outgrown(entry):
            with without_modes():
                entry = self._make(entries, sizes, entries.captured_at(sizes), compiles=entries.is_compiled(sizes))
        entries.use(sizes)
        own = self._recorded.get(entry)
        self._alive_nbytes = self._concurrent_nbytes() + (0 if own is None else _own_saved_nbytes(own))
        return entry.forward(args)

    def _backward(self, entries: SizedEntries, args: list[Any]) -> list[Any]:
        """Outputs of a backward graph, None for those that nobody asks for; empties ``args``."""
        sizes = entries.backward_sizes(args)
        entry = entries.get(sizes)
        if entry is None:  # its forward ran so long ago that others have taken its place
            with without_modes():
                entry = self._make(entries, sizes, entries.captured_at(sizes), compiles=entries.is_compiled(sizes))
        return entry.backward(args)

    def _make(self, entries: SizedEntries, sizes: Sizes, captured: Captured, *, compiles: bool) -> GraphEntry:
        """A new entry of a graph at ``sizes``, without a plan before there is a layout.

        It is planned beside as much as other graphs of a call have held so far, where that fits, else beside what they
        hold in this call.
        """
        entry, now_nbytes = GraphEntry(entries.family), self._concurrent_nbytes()
        entry.attach(self._session.runtime, captured, UnplannedGraph(unplanned(captured), entries.family))
        if captured.tangents is not None:
            most_nbytes = max(now_nbytes, entries.most_concurrent_nbytes)
            try:
                self._record(entry, captured, most_nbytes, compiles)
            except BudgetError:
                if most_nbytes == now_nbytes:
                    raise
                self._record(entry, captured, now_nbytes, compiles)
            entries.most_concurrent_nbytes = most_nbytes
        for left in entries.put(sizes, entry, is_compiled=compiles):
            if left.uninstall():
                self._recorded.pop(left, None)
            else:
                entries.keep(left)
        return entry

    def _record(self, entry: GraphEntry, captured: Captured, concurrent_nbytes: int, compiles: bool) -> None:
        """Note a graph as it is beside others of its call, with its plan where there is a layout."""
        captured = self._beside(captured, concurrent_nbytes)
        if self._session.runtime.layout is not None:
            self._plan_later(captured, entry, compiles)
        self._recorded[entry] = captured

    def _concurrent_nbytes(self) -> int:
        """Bytes that the graphs of the call under way that have run so far hold for their backwards."""
        if not self._session.runtime.ran:
            self._alive_nbytes = 0
        return self._alive_nbytes

    def _is_outgrown(self, entry: GraphEntry) -> bool:
        """Whether other graphs of the call hold more than ``entry`` was planned beside."""
        own = self._recorded.get(entry)
        return own is not None and self._concurrent_nbytes() > own.concurrent_nbytes

    def _beside(self, captured: Captured, nbytes: int) -> Captured:
        """A graph as it is in its forward: beside ``nbytes`` that earlier graphs of the same call saved."""
        schedule = with_concurrent(captured.schedule, nbytes, _trainable(captured))
        measures = self._session.request().options.tracks_grad_norm
        return with_decisions(
            replace(captured, schedule=schedule, concurrent_nbytes=nbytes), tracks_grad_norm=measures, scales=False
        )

    def _plan_later(self, captured: Captured, entry: GraphEntry, compiles: bool) -> None:
        request, compiler = self._session.request(), self._session.settings.compiler
        target = replace(request.target, model=f"{request.target.model} (a later graph)")
        request = replace(request, target=target)
        if compiles or _draws_by_seed(captured):
            built = build(captured, request, compiler)
        else:
            built = build(captured, request, compiler.interpreter(), logging.DEBUG)
        self._session.install(built, entry)

    def after_call(self) -> None:
        """A training forward has run before there was a layout; say once why it still does so."""
        if not self._recorded:
            return
        self._num_unplanned += 1
        if self._num_unplanned == MAX_UNPLANNED_STEPS * self._session.runtime.accumulate:
            logger.warning(
                "%s has run %d training forwards operator by operator, outside of any plan and budget. Its forward "
                "breaks into several graphs (%s), which are planned together at the first step() of chunkc's "
                "optimizer, and there was none yet (said once per model)",
                self._name,
                self._num_unplanned,
                "; ".join(self.reasons) or "Dynamo compiles parts of it only",
            )

    def plan_recorded(self) -> None:
        """Plan all graphs that have run, and move parameters into chunks; BudgetError changes nothing."""
        session, runtime = self._session, self._session.runtime
        if not self._recorded or runtime.executor is not None:
            return
        if runtime.layout is None:  # else an exception came between layout and executors
            with compilations_forgotten():
                captures = list(self._recorded.values())
                request, compiler = session.request(), session.settings.compiler
                built = build_together(captures, request, compiler, leaves_room=self.has_data_sizes)
            for entry, one in zip(self._recorded, built, strict=True):
                session.install(one, entry)
        executors = [entry.install() for entry in self._recorded]
        runtime.state.switch_to(executors[0])
        logger.info("%s runs as %d graphs from the next iteration on", self._name, len(executors))


def _own_saved_nbytes(captured: Captured) -> int:
    return saved_nbytes(captured.schedule, captured.concurrent_nbytes)


def _draws_by_seed(captured: Captured) -> bool:
    """Whether a graph draws random numbers by seeds of Inductor's, which its operators ignore one by one."""
    nodes = (node for graph in captured.graphs.values() for node in graph.module.graph.nodes)
    return any("inductor_" in str(node.target) for node in nodes)


def _trainable(captured: Captured) -> list[int]:
    return [i for i, info in enumerate(captured.schedule.params) if info.trainable]


def build_together(
    captures: Sequence[Captured], request: PlanRequest, compiler: SegmentCompiler, *, leaves_room: bool = False
) -> list[CompiledPlan]:
    """Plans of several graphs of one forward over one layout, which is made from all of them.

    ``captures`` are in the order in which they run forward, each as it is beside the others. Every parameter with
    ``trainable`` gets an optimizer state, since gradients may also come from eager operators between the graphs.
    ``leaves_room``: sizes may be larger in later calls.
    """
    layout = _layout(captures, request, leaves_room=leaves_room)
    built = []
    for number, captured in enumerate(captures, 1):
        name = f"{request.target.model} (graph {number} of {len(captures)})"
        one = replace(request, target=replace(request.target, model=name), layout=layout)
        built.append(build(captured, one, compiler))
    return built


def _layout(captures: Sequence[Captured], request: PlanRequest, *, leaves_room: bool) -> Layout:
    """A layout for all of ``captures``; ``leaves_room``: for more activations."""
    schedule, cuts = join([c.schedule for c in captures], _trainable(captures[0]))
    options = replace(request.options, cuts=cuts)
    plan = make_plan(schedule, request.target, options, passes=request.passes).plan
    for part in (1, 2, 4) if leaves_room else ():
        room_nbytes = plan.memory.nonmodel_nbytes // part
        try:
            target = request.target.less({Tier.DEVICE: room_nbytes})
            plan = make_plan(schedule, target, options, passes=request.passes).plan
        except BudgetError:
            continue
        logger.info("data tell sizes: %d bytes of device memory are left for larger ones", room_nbytes)
        break
    return plan.layout


def unplanned(captured: Captured) -> dict[GraphKind, CompiledGraph]:
    """Both graphs in segments that begin wherever an operator reads parameters.

    Segments are eager, unless the graphs draw by seeds of Inductor's.
    """
    compile_one = compile_inductor if _draws_by_seed(captured) else compile_eager
    return {kind: _unplanned(graph, kind, compile_one) for kind, graph in captured.graphs.items()}


def _unplanned(
    graph: CapturedGraph, kind: GraphKind, compile_one: Callable[[LoweredSegment], SegmentCallable]
) -> CompiledGraph:
    starts = sorted({0, *(i for i, b in enumerate(graph.bundles) if b.reads)}) if graph.bundles else []
    ends = [*starts[1:], len(graph.bundles)]
    segments = [Segment(kind, i, a, b, (), (), 0, 0) for i, (a, b) in enumerate(zip(starts, ends, strict=False))]
    lowered = lower(graph.module, [b.nodes for b in graph.bundles], segments, graph.params)
    return CompiledGraph(lowered, [compile_one(s) for s in lowered.segments], graph.gradients)
