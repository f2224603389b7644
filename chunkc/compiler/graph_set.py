"""The captured graphs of one model, planned over its one layout.

A graph is planned beside what else is alive when it runs: graphs of the same call, and forwards that wait for their
backward. Where a plan does not fit any more, since more lives beside it or inputs are larger than before, there are
three ways, the cheapest first:

    room is left beside its arena             the plan stays, and counts more
    it fits otherwise, in the same layout     it is planned again
    it fits in another layout                 all graphs are planned again, and values move there from the cold state

BudgetError, with budgets that suffice for all graphs together, leaves everything as it was.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace

from chunkc.capture.graphs import Captured
from chunkc.capture.joined import join, with_concurrent
from chunkc.compiler.build import CompiledPlan, PlanRequest, build
from chunkc.compiler.device_selection import check_room_aside
from chunkc.compiler.graph_entry import GraphEntry
from chunkc.compiler.memory.decisions import plan_beside, with_decisions
from chunkc.compiler.segment_compiler import SegmentCompiler
from chunkc.errors import BudgetError, ChunkcError
from chunkc.ir.layout import Layout
from chunkc.ir.plan import Plan
from chunkc.ir.tiers import Tier
from chunkc.passes import make_plan
from chunkc.progress import within
from chunkc.runtime.model.model import ModelRuntime

logger = logging.getLogger("chunkc")

SHARE_OF_GROWTH = 1 / 8
"""Of the bytes beside a graph that have grown before: by so much more are counted, so that few steps make it anew."""


def _peak_nbytes(captured: Captured) -> int:
    operators = (op for graph in captured.schedule.graphs for op in graph.operators)
    return max((op.live_nbytes + op.workspace_nbytes for op in operators), default=0)


def _of_all(request: PlanRequest, num_graphs: int) -> PlanRequest:
    """The request by whose name an error is about all graphs."""
    if num_graphs == 1:
        return request
    name = f"{request.target.model}, with the {num_graphs} graphs of all its calls,"
    return replace(request, target=replace(request.target, model=name))


@dataclass(slots=True)
class RecordedGraph:
    """One graph as captured, and how it is planned.

    Attributes:
        beside_nbytes: bytes of others that have been alive while it ran.
        compiler: of its segments.
        compiled_by: the compiler of its segments where they do not fit as ``compiler`` interprets them; else None.
        also_trained: parameters whose gradients come from elsewhere.
        scales: whether the plan multiplies its tangents by a loss scale.
        name: of the graph among others, for messages; empty for a whole forward.
        log_level: of what is said of its plans.
        returning_nbytes: bytes of saved values that come back from host memory while it is planned.
        is_in_flight: whether nothing lives beside it but the micro-batches in flight that its plan counts.
    """

    captured: Captured
    compiler: SegmentCompiler
    beside_nbytes: int = 0
    also_trained: Sequence[int] = ()
    scales: bool = False
    name: str = ""
    log_level: int = logging.INFO
    compiled_by: SegmentCompiler | None = None
    is_in_flight: bool = False
    returning_nbytes: int = 0

    def counted_nbytes(self, plan: Plan | None) -> int:
        """Bytes of others that ``plan`` of this graph counts."""
        if plan is None or not self.is_in_flight:
            return self.beside_nbytes
        return (plan.in_flight - 1) * plan.waiting_nbytes


class GraphSet:
    """The graphs of one model by their entries; see the module docstring.

    ``request`` gives the request for a plan made now, ``installed`` is told of every plan. ``trains_scalar``: no
    backward has asked for gradients of an output beside a scalar one.
    """

    def __init__(
        self,
        runtime: ModelRuntime,
        request: Callable[[], PlanRequest],
        installed: Callable[[CompiledPlan, GraphEntry], None],
    ) -> None:
        self.graphs: dict[GraphEntry, RecordedGraph] = {}
        self.trains_scalar = True
        self._runtime, self._request, self._installed = runtime, request, installed

    def add(self, entry: GraphEntry, graph: RecordedGraph) -> None:
        """Keep a graph beside what is alive now; it has no plan yet."""
        self.graphs[entry] = graph
        graph.is_in_flight = self._request().options.in_flight > 1 and not graph.name
        graph.beside_nbytes = max(graph.beside_nbytes, self._runtime.live.nbytes())

    def remove(self, entry: GraphEntry) -> None:
        self.graphs.pop(entry, None)

    def let_go(self, entry: GraphEntry) -> bool:
        """Remove a graph, and give back what it takes, unless it runs now; return whether that was done."""
        is_left = entry.uninstall()
        if is_left:
            self.remove(entry)
        return is_left

    def plan(self, entry: GraphEntry) -> None:
        """Plan a graph of the set in the layout, or make one; BudgetError where no layout suffices.

        In the layout that there is, saved values only move by themselves where no other layout suffices: what they move
        is moved in every step, a layout once.
        """
        request, graph = self._request(), self.graphs[entry]
        try:
            built = self._build(graph, request if request.layout is None else request.keeping_values())
        except BudgetError:
            counts_garbage = self._recount(graph)
            if request.layout is None and graph.compiled_by is None and not counts_garbage:
                raise
        else:
            self._installed(built, entry)
            return
        if counts_garbage:
            self.plan(entry)
        elif graph.compiled_by is not None:
            graph.compiler, graph.compiled_by, graph.log_level = graph.compiled_by, None, logging.INFO
            self.plan(entry)
        else:
            self._plan_elsewhere(entry, request)

    def _plan_elsewhere(self, entry: GraphEntry, request: PlanRequest) -> None:
        """Plan in a new layout, else in that of ``request`` with saved values that move."""
        try:
            self._plan_in_new_layout(entry)
        except BudgetError as refusal:
            if request.keeping_values() is request:
                raise
            try:
                built = self._build(self.graphs[entry], request)
            except BudgetError:
                raise refusal from None
            self._installed(built, entry)

    def _recount(self, graph: RecordedGraph) -> bool:
        """Count what is alive beside ``graph`` without garbage, as of an exception; whether it is less."""
        before = graph.beside_nbytes
        if before:
            gc.collect()
            graph.beside_nbytes = min(before, self._runtime.live.nbytes() + graph.returning_nbytes)
        return graph.beside_nbytes < before

    def plan_together(self, *, leaves_room: bool) -> None:
        """Plan all graphs, in the order in which they run, over one layout, made from all if there is none.

        ``leaves_room``: sizes may be larger in later calls.
        """
        request = self._request()
        layout = request.layout or self._joined_layout(request, list(self.graphs.values()), leaves_room=leaves_room)
        self._install_all(self._build_all(replace(request, layout=layout), self.graphs))

    def plan_declared(self) -> None:
        """Plan graphs that were captured only, over one layout; BudgetError plans none."""
        request = self._request()
        trained = sorted(set().union(*(graph.captured.schedule.trained_params() for graph in self.graphs.values())))
        graphs = {entry: replace(graph, also_trained=trained) for entry, graph in self.graphs.items()}
        largest = max(graphs, key=lambda entry: _peak_nbytes(graphs[entry].captured))
        self._install_all(self._built_together(largest, graphs, request))
        largest.install()  # the layout is theirs from now on, also if the next shape is none of them

    def fit(self, entry: GraphEntry, beside_nbytes: Callable[[], int]) -> int:
        """Let a graph run beside ``beside_nbytes()`` of others; BudgetError where that does not fit.

        Return beside how many bytes it may run now: more than asked for where they grow again and again, as with sizes
        that data tell, and there is room.
        """
        graph = self.graphs.get(entry)
        if graph is None:
            return beside_nbytes()
        nbytes, plan = beside_nbytes(), entry.plan
        before = graph.counted_nbytes(plan)
        if nbytes > before:
            gc.collect()  # graphs that nobody holds any more, such as those of an exception, are not alive
            nbytes = beside_nbytes()
        graph.beside_nbytes = max(nbytes, before)
        is_in_flight, graph.is_in_flight = graph.is_in_flight, graph.is_in_flight and nbytes <= before
        if plan is not None and not self._runtime.parameters.accepts(plan.layout):
            self.plan(entry)  # planned for a layout that the model has left
        elif plan is not None and nbytes > before and not self._counts_more(entry, plan, nbytes, before):
            logger.info(
                "%d bytes of other forwards are alive while a graph runs that was planned beside %d: it is planned "
                "again",
                *(nbytes, before),
            )
            try:
                self.plan(entry)
            except BaseException as error:
                graph.beside_nbytes, graph.is_in_flight = before, is_in_flight
                if isinstance(error, BudgetError):
                    error.args = (
                        f"{error} Of these, {nbytes} bytes are held by other forwards of the model: those of the same "
                        "loss, and those whose outputs are kept though no backward has run (`del loss`)",
                    )
                raise
        return graph.counted_nbytes(entry.plan)

    def widen(self, entry: GraphEntry, returning_nbytes: int = 0) -> Captured:
        """Plan the iteration of ``entry`` with the tangents of all outputs; BudgetError changes nothing.

        ``returning_nbytes`` of saved values that are away come back before its backward runs.
        """
        graph = self.graphs[entry]
        captured, beside_nbytes, is_in_flight = graph.captured, graph.beside_nbytes, graph.is_in_flight
        if captured.general is None:
            raise ChunkcError("a backward reads all tangents already and is to read more; please report this")
        logger.info("a loss uses outputs beside the scalar one: plans count their gradients from now on")
        graph.captured, graph.returning_nbytes = captured.with_all_tangents(), returning_nbytes
        try:
            if not returning_nbytes or not self._plan_with_room(entry, returning_nbytes):
                self.plan(entry)
        except BaseException as error:
            graph.captured, graph.beside_nbytes, graph.is_in_flight = captured, beside_nbytes, is_in_flight
            if isinstance(error, BudgetError):
                away = f" {returning_nbytes} bytes of saved values come back from host memory for it."
                error.args = (
                    f"{error} The loss uses outputs beside the scalar one, whose gradients take as much memory as they "
                    f"do; compute it inside forward, or detach these outputs.{away if returning_nbytes else ''}",
                )
            raise
        finally:
            graph.returning_nbytes = 0
        self.trains_scalar = False
        return graph.captured

    def _plan_with_room(self, entry: GraphEntry, nbytes: int) -> bool:
        """Plan a graph in the layout where ``nbytes`` are left then, else count them; whether it is planned."""
        graph, request = self.graphs[entry], self._request()
        try:
            built = self._build(graph, request.keeping_values())
        except BudgetError:
            built = None
        if built is not None:
            memory = built.plan.memory
            peak_nbytes = memory.device_peak_nbytes + nbytes
            if peak_nbytes <= memory.device_budget_nbytes and self._runtime.accounting.can_reserve(peak_nbytes):
                self._installed(built, entry)
                return True
        graph.beside_nbytes, graph.is_in_flight = graph.counted_nbytes(entry.plan) + nbytes, False
        return False

    def _counts_more(self, entry: GraphEntry, plan: Plan, nbytes: int, before_nbytes: int) -> bool:
        """Let ``plan`` count ``nbytes`` of others, for ``before_nbytes``, if there is room beside its arena."""
        ample_nbytes = nbytes + int(SHARE_OF_GROWTH * nbytes) if before_nbytes else nbytes
        for wanted_nbytes in sorted({ample_nbytes, nbytes}, reverse=True):
            more = plan_beside(plan, wanted_nbytes - before_nbytes)
            fits = more.memory.device_peak_nbytes <= more.memory.device_budget_nbytes
            if fits and self._runtime.accounting.can_reserve(more.memory.device_peak_nbytes):
                self.graphs[entry].beside_nbytes = wanted_nbytes
                entry.count_more(more, wanted_nbytes - before_nbytes)
                return True
        return False

    def _build(self, graph: RecordedGraph, request: PlanRequest) -> CompiledPlan:
        if graph.name:
            request = replace(request, target=replace(request.target, model=f"{request.target.model} ({graph.name})"))
            if request.options.moved_share:
                logger.info("%s keeps its activations: values move in forwards of one graph only", request.target.model)
            request = replace(request, options=replace(request.options, moved_share=0.0, activations="offload"))
        if not graph.is_in_flight:
            request = replace(request, options=replace(request.options, in_flight=1))
        return build(self._as_it_runs(graph, request), request, graph.compiler, graph.log_level)

    def _as_it_runs(self, graph: RecordedGraph, request: PlanRequest) -> Captured:
        """A graph beside others, with what is decided for its plan."""
        captured, nbytes = graph.captured, 0 if graph.is_in_flight else graph.beside_nbytes
        schedule = with_concurrent(captured.schedule, nbytes, graph.also_trained)
        beside = replace(captured, schedule=schedule, concurrent_nbytes=captured.concurrent_nbytes + nbytes)
        return with_decisions(beside, tracks_grad_norm=request.options.tracks_grad_norm, scales=graph.scales)

    def _build_all(
        self, request: PlanRequest, graphs: Mapping[GraphEntry, RecordedGraph]
    ) -> dict[GraphEntry, CompiledPlan]:
        built = {}
        for number, (entry, graph) in enumerate(graphs.items(), 1):
            with within(f"graph {number} of {len(graphs)}"):
                built[entry] = self._build(graph, request)
        return built

    def _install_all(self, built: Mapping[GraphEntry, CompiledPlan]) -> None:
        for entry, one in built.items():
            self._installed(one, entry)

    def _plan_in_new_layout(self, entry: GraphEntry) -> None:
        """Plan all graphs over a layout in which ``entry`` fits; BudgetError changes nothing."""
        runtime = self._runtime
        request = self._request().in_new_layout()
        logger.info("%s does not fit beside the others as they are laid out: making a new layout", request.target.model)
        graphs = {e: self._trained_as_before(self.graphs[e]) for e in self._kept_with(entry)}
        built = self._built_together(entry, graphs, request)
        if runtime.layout is not None and not request.is_host:
            check_room_aside(runtime.layout, request.ranks_per_node)

        runtime.settle()
        if runtime.saving is not None:
            wait([runtime.saving])  # it reads the chunks

        def change() -> None:
            runtime.leave_layout(built[entry].plan.layout)
            self._install_all(built)

        runtime.transactions.run(change)

    def _built_together(
        self, entry: GraphEntry, graphs: Mapping[GraphEntry, RecordedGraph], request: PlanRequest
    ) -> dict[GraphEntry, CompiledPlan]:
        """Plans over a new layout, that of ``entry`` or of the largest graph if it serves all."""
        largest = max(graphs, key=lambda e: _peak_nbytes(graphs[e].captured))
        for lead in dict.fromkeys((entry, largest)):
            try:
                return self._over_layout_of(lead, graphs, request)
            except ChunkcError as error:
                logger.debug("the layout of one graph does not serve all: %s", error)
        joined = self._joined_layout(_of_all(request, len(graphs)), list(graphs.values()), leaves_room=False)
        return self._build_all(replace(request, layout=joined), graphs)

    def _kept_with(self, entry: GraphEntry) -> list[GraphEntry]:
        """``entry`` and all whose graphs are planned in a new layout at once, and not when they run again.

        Those of other sizes fit where larger ones do, and interpreted segments take more than they have to.
        """
        kept = [e for e, graph in self.graphs.items() if e is entry or (e.plan is not None and not graph.compiled_by)]
        captured = [self.graphs[e].captured for e in kept]
        return [e for e in kept if e is entry or not any(map(self.graphs[e].captured.is_within, captured))]

    def _trained_as_before(self, graph: RecordedGraph) -> RecordedGraph:
        trained = sorted({*graph.also_trained, *self._runtime.parameters.trained})
        return replace(graph, also_trained=trained)

    def _over_layout_of(
        self, entry: GraphEntry, graphs: Mapping[GraphEntry, RecordedGraph], request: PlanRequest
    ) -> dict[GraphEntry, CompiledPlan]:
        """All plans, over the layout that is best for ``entry``."""
        own = self._build(graphs[entry], request)
        others = {e: graph for e, graph in graphs.items() if e is not entry}
        return {**self._build_all(replace(request, layout=own.plan.layout), others), entry: own}

    def _joined_layout(self, request: PlanRequest, graphs: Sequence[RecordedGraph], *, leaves_room: bool) -> Layout:
        """A layout for all of ``graphs``; ``leaves_room``: for more activations."""
        schedules = [self._as_it_runs(graph, request).schedule for graph in graphs]
        schedule, cuts = join(schedules, graphs[0].also_trained)
        in_flight = request.options.in_flight if all(graph.is_in_flight for graph in graphs) else 1
        options = replace(request.options, cuts=cuts, in_flight=in_flight)
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
