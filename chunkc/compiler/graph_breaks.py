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
from typing import Any

from torch.fx import GraphModule

from chunkc._torch_compat.core import break_reason
from chunkc._torch_compat.release import compilations_forgotten
from chunkc.capture.backend import capture_graph
from chunkc.capture.bundles import CapturedGraph
from chunkc.capture.graphs import Captured
from chunkc.capture.joined import join, saved_nbytes, with_concurrent
from chunkc.compiler.build import CompiledPlan, PlanRequest, build
from chunkc.compiler.capture_session import CaptureSession
from chunkc.compiler.graph_entry import GraphEntry
from chunkc.compiler.memory.decisions import with_decisions
from chunkc.compiler.segment_compiler import SegmentCompiler, compile_eager
from chunkc.compiler.shape_cache import ShapeTable, entry_maker, weakly
from chunkc.ir.plan import Segment
from chunkc.ir.schedule import GraphKind
from chunkc.passes import make_plan
from chunkc.passes.lower import lower
from chunkc.runtime.execution.bound_action import CompiledGraph
from chunkc.runtime.execution.warmup_graph import UnplannedGraph

logger = logging.getLogger("chunkc")

MAX_UNPLANNED_STEPS = 3
"""Steps that a forward may run for without a plan before the log says why there is none."""


class BrokenForwards:
    """The graphs of one model whose forward breaks; ``reasons``: why and where, each once, as met."""

    def __init__(self, session: CaptureSession) -> None:
        self.shapes = ShapeTable(entry_maker(session.model, self.compile_graph, fullgraph=False))
        self.reasons: list[str] = []
        self._session = session
        self._name = type(session.model).__name__
        self._recorded: list[tuple[Captured, GraphEntry]] = []
        self._num_unplanned = 0
        session.runtime.steps.plan_recorded = weakly(self.plan_recorded)

    def compile_graph(self, module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Capture one of the graphs. Before there is a layout it is recorded, afterwards planned."""
        reason = break_reason(module)
        if reason is not None and reason not in self.reasons:
            self.reasons.append(reason)
            logger.warning("the forward of %s breaks: %s", self._name, reason)
        session, entry = self._session, GraphEntry()
        captured, code = capture_graph(
            *(module, example_inputs, session.tensors, session.settings.compiler.tracing),
            *(entry.forward, entry.backward),
            evaluates=True,
        )
        entry.attach(session.runtime, captured, UnplannedGraph(unplanned(captured)))
        if captured.tangents is not None:
            self.shapes.check_room()
            session.log(captured)
            captured = self._beside_others(captured)
            if session.runtime.layout is not None:
                self._plan_later(captured, entry)
            self._recorded.append((captured, entry))
            self.shapes.captured()
        return code

    def _beside_others(self, captured: Captured) -> Captured:
        """A graph as it is in its forward: beside what earlier graphs of the same call saved."""
        nbytes = sum(saved_nbytes(c.schedule, c.concurrent_nbytes) for c, entry in self._recorded if entry.ran())
        schedule = with_concurrent(captured.schedule, nbytes, _trainable(captured))
        measures = self._session.request().options.tracks_grad_norm
        return with_decisions(
            replace(captured, schedule=schedule, concurrent_nbytes=nbytes), tracks_grad_norm=measures, scales=False
        )

    def _plan_later(self, captured: Captured, entry: GraphEntry) -> None:
        request = self._session.request()
        target = replace(request.target, model=f"{request.target.model} (a later graph)")
        built = build(captured, replace(request, target=target), self._session.settings.compiler)
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
                built = build_together([c for c, _ in self._recorded], session.request(), session.settings.compiler)
            for (_, entry), one in zip(self._recorded, built, strict=True):
                session.install(one, entry)
        executors = [entry.install() for _, entry in self._recorded]
        runtime.state.switch_to(executors[0])
        logger.info("%s runs as %d graphs from the next iteration on", self._name, len(executors))


def _trainable(captured: Captured) -> list[int]:
    return [i for i, info in enumerate(captured.schedule.params) if info.trainable]


def build_together(captures: Sequence[Captured], request: PlanRequest, compiler: SegmentCompiler) -> list[CompiledPlan]:
    """Plans of several graphs of one forward over one layout, which is made from all of them.

    ``captures`` are in the order in which they run forward, each as it is beside the others. Every parameter with
    ``trainable`` gets an optimizer state, since gradients may also come from eager operators between the graphs.
    """
    schedule, cuts = join([c.schedule for c in captures], _trainable(captures[0]))
    options = replace(request.options, cuts=cuts)
    layout = make_plan(schedule, request.target, options, passes=request.passes).plan.layout
    built = []
    for number, captured in enumerate(captures, 1):
        name = f"{request.target.model} (graph {number} of {len(captures)})"
        one = replace(request, target=replace(request.target, model=name), layout=layout)
        built.append(build(captured, one, compiler))
    return built


def unplanned(captured: Captured) -> dict[GraphKind, CompiledGraph]:
    """Both graphs in eager segments that begin wherever an operator reads parameters."""
    return {kind: _unplanned(graph, kind) for kind, graph in captured.graphs.items()}


def _unplanned(graph: CapturedGraph, kind: GraphKind) -> CompiledGraph:
    starts = sorted({0, *(i for i, b in enumerate(graph.bundles) if b.reads)}) if graph.bundles else []
    ends = [*starts[1:], len(graph.bundles)]
    segments = [Segment(kind, i, a, b, (), (), 0, 0) for i, (a, b) in enumerate(zip(starts, ends, strict=False))]
    lowered = lower(graph.module, [b.nodes for b in graph.bundles], segments, graph.params)
    return CompiledGraph(lowered, [compile_eager(s) for s in lowered.segments], graph.gradients)
