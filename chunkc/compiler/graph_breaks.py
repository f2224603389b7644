"""Forwards that break into several graphs.

Dynamo runs one graph before it sees the next, so the first iteration runs operator by operator
(``runtime.execution.warmup_graph``) while graphs are recorded in the order in which they run. The first step makes one
layout from all of them, and a plan for each over it; a graph that is met later gets a plan over that layout. Eager code
between the graphs gathers the parameters that it reads; its gradients are ordinary tensors until the step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.fx import GraphModule

from chunkc._torch_compat.core import break_reason, without_modes
from chunkc._torch_compat.release import compilations_forgotten
from chunkc.capture.backend import capture_graph
from chunkc.capture.bundles import CapturedGraph
from chunkc.capture.graphs import Captured
from chunkc.capture.symbolic import Sizes
from chunkc.compiler.capture_session import CaptureSession
from chunkc.compiler.graph_entry import GraphEntry
from chunkc.compiler.graph_set import RecordedGraph
from chunkc.compiler.segment_compiler import compile_eager, compile_inductor
from chunkc.compiler.shape_cache import ShapeTable, entry_maker, weakly
from chunkc.compiler.sized_entries import MAX_COMPILED_SIZES, SizedEntries
from chunkc.ir.plan import Segment
from chunkc.ir.schedule import GraphKind
from chunkc.passes.lower import LoweredSegment, lower
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
        entry = entries.get(sizes)
        if entry is None or entries.should_compile(sizes):
            entry = self._make_now(entries, sizes)
        entries.use(sizes)
        return entry.forward(args)

    def _backward(self, entries: SizedEntries, args: list[Any]) -> list[Any]:
        """Outputs of a backward graph, None for those that nobody asks for; empties ``args``."""
        sizes = entries.backward_sizes(args)
        entry = entries.get(sizes)
        if entry is None:  # its forward ran so long ago that others have taken its place
            entry = self._make_now(entries, sizes)
        return entry.backward(args)

    def _make_now(self, entries: SizedEntries, sizes: Sizes) -> GraphEntry:
        with without_modes(), self._session.runtime.ranks.agreement_scope():
            return self._make(entries, sizes, entries.captured_at(sizes), compiles=entries.is_compiled(sizes))

    def _make(self, entries: SizedEntries, sizes: Sizes, captured: Captured, *, compiles: bool) -> GraphEntry:
        """A new entry of a graph at ``sizes``, without a plan before there is a layout."""
        session, entry = self._session, GraphEntry(entries.family)
        fit, graphs = weakly(session.graphs.fit), session.graphs
        entry.attach(session.runtime, captured, fit, UnplannedGraph(unplanned(captured), entries.family))
        if captured.tangents is not None:
            graphs.add(entry, self._recorded(captured, compiles=compiles))
            try:
                if session.runtime.layout is not None:
                    graphs.plan(entry)
            except BaseException:
                graphs.remove(entry)
                raise
        for left in entries.put(sizes, entry, is_compiled=compiles):
            if left.uninstall():
                graphs.remove(left)
            else:
                entries.keep(left)
        return entry

    def _recorded(self, captured: Captured, *, compiles: bool) -> RecordedGraph:
        """A graph, and how it is planned: one that may not come again, operator by operator."""
        compiler, number = self._session.settings.compiler, len(self._session.graphs.graphs) + 1
        is_compiled = compiles or _draws_by_seed(captured)
        return RecordedGraph(
            captured,
            compiler if is_compiled else compiler.interpreter(),
            also_trained=_trainable(captured),
            name=f"graph {number}",
            log_level=logging.INFO if is_compiled else logging.DEBUG,
        )

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
        if runtime.layout is None:  # else an exception came between layout and executors
            with compilations_forgotten():
                graphs.plan_together(leaves_room=self.has_data_sizes)
        executors = [entry.install() for entry in graphs.graphs]
        runtime.state.switch_to(executors[0])
        logger.info("%s runs as %d graphs from the next iteration on", self._name, len(executors))


def _draws_by_seed(captured: Captured) -> bool:
    """Whether a graph draws random numbers by seeds of Inductor's, which its operators ignore one by one."""
    nodes = (node for graph in captured.graphs.values() for node in graph.module.graph.nodes)
    return any("inductor_" in str(node.target) for node in nodes)


def _trainable(captured: Captured) -> list[int]:
    return [i for i, info in enumerate(captured.schedule.params) if info.trainable]


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
