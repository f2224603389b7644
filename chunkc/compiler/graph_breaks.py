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
from chunkc.compiler.capture_session import CaptureSession
from chunkc.compiler.graph_entry import GraphEntry, SizedEntries
from chunkc.compiler.graph_set import RecordedGraph
from chunkc.compiler.segment_compiler import compile_eager, compile_inductor
from chunkc.compiler.shape_cache import ShapeTable, entry_maker, weakly
from chunkc.ir.plan import Segment
from chunkc.ir.schedule import GraphKind
from chunkc.passes.lower import LoweredSegment, lower
from chunkc.progress import shown
from chunkc.runtime.execution.bound_action import CompiledGraph, SegmentCallable
from chunkc.runtime.execution.warmup_graph import UnplannedGraph

logger = logging.getLogger("chunkc")

MAX_UNPLANNED_STEPS = 3
"""Steps that a forward may run for without a plan before the log says why there is none."""


SHARE_OF_MORE = 1 / 8
"""Of one program, by which a further one of known inputs counts: Dynamo has graphs of their own for sizes 0 and 1."""


class BrokenForwards:
    """The graphs of one model whose forward breaks.

    Attributes:
        reasons: why and where it breaks, each once, as met.
        has_data_sizes: whether data tell sizes in the forward, so that those of the first calls bound nothing.
    """

    def __init__(self, session: CaptureSession) -> None:
        make_run = entry_maker(session.model, self.compile_graph, breaks=True)
        self.shapes = ShapeTable(make_run, share_of_more=SHARE_OF_MORE)
        self.reasons: list[str] = []
        self.has_data_sizes = False
        self._session = session
        self._name = type(session.model).__name__
        self._num_unplanned = 0
        session.runtime.steps.plan_recorded = weakly(self.plan_recorded)

    def compile_graph(self, module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Capture one of the graphs. Before there is a layout it is recorded, afterwards planned."""
        reason = break_reason(module)
        if reason is not None and reason not in self.reasons:
            self.reasons.append(reason)
            logger.warning("the forward of %s breaks: %s", self._name, reason)
        session = self._session
        compiler = session.settings.compiler
        entries = SizedEntries(weakly(self._make), weakly(session.graphs.let_go), compiles=compiler.fuses)
        captured, code = capture_graph(
            *(module, example_inputs, session.tensors, session.tracing, entries.forward, entries.backward),
            evaluates=True,
        )
        if captured.tangents is not None:
            self.shapes.check_room()
            session.log(captured)
        entries.start(captured)
        if captured.tangents is not None:
            self.shapes.captured()
        return code

    def _make(self, captured: Captured, family: object, compiles: bool) -> GraphEntry:
        """A new entry of a graph at some sizes, without a plan before there is a layout."""
        session, entry = self._session, GraphEntry(family)
        fit, graphs = weakly(session.graphs.fit), session.graphs
        entry.attach(session.runtime, captured, fit, UnplannedGraph(unplanned(captured), family))
        if captured.tangents is None:
            return entry
        with session.runtime.ranks.agreement_scope():
            graphs.add(entry, self._recorded(captured, compiles=compiles))
            try:
                if session.runtime.layout is not None:
                    graphs.plan(entry)
            except BaseException:
                graphs.remove(entry)
                raise
        return entry

    def _recorded(self, captured: Captured, *, compiles: bool) -> RecordedGraph:
        """A graph, and how it is planned."""
        number = len(self._session.graphs.graphs) + 1
        recorded = self._session.recorded(captured, compiles=compiles)
        return replace(recorded, scales=False, also_trained=_trainable(captured), name=f"graph {number}")

    def after_call(self) -> None:
        """A training forward has run before there was a layout; say once why it still does so."""
        if not self._session.graphs.graphs:
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
        graphs, runtime = self._session.graphs, self._session.runtime
        if not graphs.graphs or runtime.executor is not None:
            return
        with shown(is_first_rank=runtime.ranks.is_first_of_job):
            self._plan_and_install()

    def _plan_and_install(self) -> None:
        graphs, runtime = self._session.graphs, self._session.runtime
        if runtime.layout is None:  # else an exception came between layout and executors
            with compilations_forgotten():
                graphs.plan_together(leaves_room=self.has_data_sizes)
        executors = [entry.install() for entry in graphs.graphs]
        runtime.state.switch_to(executors[0])
        logger.info("%s runs as %d graphs from the next iteration on", self._name, len(executors))


def _trainable(captured: Captured) -> list[int]:
    return [i for i, info in enumerate(captured.schedule.params) if info.trainable]


def unplanned(captured: Captured) -> dict[GraphKind, CompiledGraph]:
    """Both graphs in segments that begin wherever an operator reads parameters.

    Segments are eager, unless the graphs draw by seeds of Inductor's.
    """
    compile_one = compile_inductor if captured.draws_by_seed else compile_eager
    return {kind: _unplanned(graph, kind, compile_one) for kind, graph in captured.graphs.items()}


def _unplanned(
    graph: CapturedGraph, kind: GraphKind, compile_one: Callable[[LoweredSegment], SegmentCallable]
) -> CompiledGraph:
    starts = sorted({0, *(i for i, b in enumerate(graph.bundles) if b.reads)}) if graph.bundles else []
    ends = [*starts[1:], len(graph.bundles)]
    segments = [Segment(kind, i, a, b, (), (), 0, 0) for i, (a, b) in enumerate(zip(starts, ends, strict=False))]
    lowered = lower(graph.module, [b.nodes for b in graph.bundles], segments, graph.params)
    return CompiledGraph(lowered, [compile_one(s) for s in lowered.segments], graph.gradients)
