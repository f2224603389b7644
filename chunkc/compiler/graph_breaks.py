"""Forwards that break into several graphs.

Dynamo compiles and runs one graph before it sees the next, so nothing can be planned before the first iteration: it
runs operator by operator (``runtime.unplanned``) while the graphs are recorded, in the order in which they run. The
first step makes one layout from all of them, and a plan for each over it. A graph that is met later gets a plan over
that layout. Between the graphs eager code runs, which gathers the parameters that it reads; the gradients that it makes
are ordinary tensors until the step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from chunkc._torch_compat.release import compilations_forgotten
from chunkc.capture.backend import BoxedCallable, Compiled
from chunkc.capture.graphs import Captured, CapturedGraph
from chunkc.capture.joined import beside, join, saved_nbytes
from chunkc.compiler.build import CompiledPlan, PlanRequest, build, measuring
from chunkc.compiler.graph_entry import GraphSlot, callables, frozen_callable, install, slot_of
from chunkc.compiler.memory.decisions import with_decisions
from chunkc.compiler.segment_compiler import SegmentCompiler, compile_eager
from chunkc.ir.plan import Segment
from chunkc.ir.schedule import GraphKind
from chunkc.passes import make_plan
from chunkc.passes.lower import lower
from chunkc.runtime.execution.bound_action import CompiledGraph
from chunkc.runtime.execution.warmup_graph import UnplannedGraph
from chunkc.runtime.model.model import ModelRuntime

logger = logging.getLogger("chunkc")

MAX_UNPLANNED_STEPS = 3
"""Steps that a forward may run for without a plan before the log says why there is none."""


@dataclass(frozen=True, slots=True)
class _Record:
    """A graph as captured, and as it is in its forward: beside what earlier graphs of the same call saved."""

    captured: Captured
    beside_others: Captured
    slot: GraphSlot

    def ran(self, runtime: ModelRuntime) -> bool:
        """Whether its forward ran in the call under way."""
        return self.slot.unplanned in runtime.ran or runtime.executors.get(id(self.slot)) in runtime.ran


class BrokenForwards:
    """The graphs of one model whose forward breaks.

    Attributes:
        reasons: why and where graphs ended, each once, in the order in which they were met.
    """

    def __init__(
        self,
        name: str,
        runtime: ModelRuntime,
        compiler: SegmentCompiler,
        request: Callable[[], PlanRequest],
        on_built: Callable[[CompiledPlan], None],
    ) -> None:
        """``request`` says what to plan for now; ``on_built`` is told of every plan."""
        self.reasons: list[str] = []
        self._name = name
        self._runtime = runtime
        self._compiler = compiler
        self._request = request
        self._on_built = on_built
        self._recorded: list[_Record] = []
        self._num_unplanned = 0

    def on_break(self, reason: str) -> None:
        """Dynamo ended a graph before its frame."""
        if reason not in self.reasons:
            self.reasons.append(reason)
            logger.warning("the forward of %s breaks: %s", self._name, reason)

    def on_capture(self, captured: Captured) -> Compiled:
        """One of the graphs. Before there is a layout it is recorded, afterwards planned."""
        slot = slot_of(captured)
        slot.unplanned = UnplannedGraph(unplanned(captured))
        held_nbytes = sum(saved_nbytes(r.captured.schedule) for r in self._recorded if r.ran(self._runtime))
        trainable = [i for i, info in enumerate(captured.schedule.params) if info.trainable]
        beside_others = replace(
            captured, schedule=beside(captured.schedule, held_nbytes, trainable), beside_nbytes=held_nbytes
        )
        beside_others = with_decisions(beside_others, measures=self._request().options.measures, scales=False)
        if self._runtime.layout is not None:
            self._plan_later(beside_others, slot)
        self._recorded.append(_Record(captured, beside_others, slot))
        return callables(slot, self._runtime)

    def on_frozen(self, captured: Captured) -> BoxedCallable:
        """A graph in which nothing is trained."""
        return frozen_callable(unplanned(captured), self._runtime)

    def _plan_later(self, captured: Captured, slot: GraphSlot) -> None:
        request = self._request()
        target = replace(request.target, model=f"{request.target.model} (a later graph)")
        self._planned(slot, build(captured, replace(request, target=target), self._compiler))

    def after_call(self) -> None:
        """A training forward has run; say once why it still does so without a plan."""
        if self._runtime.layout is not None or not self._recorded:
            return
        self._num_unplanned += 1
        num_steps = self._num_unplanned // self._runtime.accumulate
        if num_steps == MAX_UNPLANNED_STEPS and self._num_unplanned % self._runtime.accumulate == 0:
            logger.warning(
                "%s has run %d training forwards operator by operator, outside of any plan and budget. Its forward "
                "breaks into several graphs (%s), which are planned together at the first step() of chunkc's "
                "optimizer, and there was none yet (said once per model)",
                self._name,
                self._num_unplanned,
                "; ".join(self.reasons) or "Dynamo compiles parts of it only",
            )

    def plan_recorded(self) -> None:
        """Plans of all graphs that have run; the model's parameters move into chunks.

        Raises:
            BudgetError: when they do not fit; nothing has changed then.
        """
        if not self._recorded or self._runtime.executor is not None:
            return
        if self._runtime.layout is None:  # else an exception came between layout and executors
            with compilations_forgotten():
                built = build_together([r.beside_others for r in self._recorded], self._request(), self._compiler)
            for record, one in zip(self._recorded, built, strict=True):
                self._planned(record.slot, one)
        executors = [install(self._runtime, r.slot) for r in self._recorded]
        self._runtime.begin_with(executors[0])
        logger.info("%s runs as %d graphs from the next iteration on", self._name, len(executors))

    def _planned(self, slot: GraphSlot, built: CompiledPlan) -> None:
        slot.plan, slot.graphs = built.planned.plan, built.graphs
        slot.measuring = measuring(built, self._request().passes)
        self._on_built(built)


def build_together(captures: Sequence[Captured], request: PlanRequest, compiler: SegmentCompiler) -> list[CompiledPlan]:
    """Plans of several graphs of one forward over one layout, which is made from all of them.

    Args:
        captures: in the order in which they run forward, with schedules as they are beside each other.
        request: without a layout; every parameter with ``trainable`` gets an optimizer state, since gradients may also
            come from eager operators between the graphs.

    Raises:
        As ``build``.
    """
    trainable = [i for i, info in enumerate(captures[0].schedule.params) if info.trainable]
    schedule, cuts = join([c.schedule for c in captures], trainable)
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
    sources: dict[GraphKind, CapturedGraph] = {"forward": captured.forward, "backward": captured.backward}
    return {kind: _unplanned(graph, kind) for kind, graph in sources.items()}


def _unplanned(graph: CapturedGraph, kind: GraphKind) -> CompiledGraph:
    starts = sorted({0, *(i for i, b in enumerate(graph.bundles) if b.reads)}) if graph.bundles else []
    ends = [*starts[1:], len(graph.bundles)]
    segments = [Segment(kind, i, a, b, (), (), 0, 0) for i, (a, b) in enumerate(zip(starts, ends, strict=False))]
    lowered = lower(graph.module, [b.nodes for b in graph.bundles], segments, graph.params)
    return CompiledGraph(lowered, [compile_eager(s) for s in lowered.segments], graph.gradients)
