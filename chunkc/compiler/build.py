"""The way from a captured iteration to a verified plan and compiled segments.

No device and no model is touched. The plan of operators that run one by one takes the bytes that capture counted, and
is final. What fused operators take is an estimate until segments are compiled. So the first plan takes the estimate
(or, where that does not fit, the least budget that it allows), and is compiled. While things still move, the iteration
is planned again with corrected bytes, which allow a larger arena, and compiled; that plan is kept if it fits and moves
fewer bytes. The schedule decides all of this, so the same call decides the same.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from chunkc._torch_compat.inductor import inductor_cache_folder
from chunkc.capture.budgets import BudgetChooser, SchedulesByBudget
from chunkc.capture.bundles import CapturedGraph
from chunkc.capture.graphs import Captured
from chunkc.compiler.debug import explain
from chunkc.compiler.device_selection import check_free_memory
from chunkc.compiler.memory.correct import corrected, stated
from chunkc.compiler.memory.decisions import plan_beside, plan_with_norms, with_norms
from chunkc.compiler.memory.iteration import SegmentBytes, iteration_bytes
from chunkc.compiler.memory.moved_values import makers_of_staying, names_of_moved, with_staying
from chunkc.compiler.segment_compiler import SegmentCompiler
from chunkc.errors import BudgetError, ChunkcError
from chunkc.files import KeptDocuments
from chunkc.ir.layout import ChunkList, Layout
from chunkc.ir.plan import Plan, StageRecord
from chunkc.ir.schedule import GraphKind, Schedule
from chunkc.ir.tiers import COPIED_TIERS, Tier
from chunkc.ir.verify import verify
from chunkc.passes import (
    ChoiceStore,
    Packings,
    Pass,
    Planned,
    PlanOptions,
    Target,
    make_evaluation_plan,
    make_fastest_plan,
    make_fitting_plan,
    measuring_plan,
)
from chunkc.passes.lower import LoweredGraph, lower
from chunkc.passes.rematerialise import RECOMPUTE_ALL, KeptFirst, choose_budget
from chunkc.passes.search import MAX_ACTIONS, SCREENING_ACTIONS
from chunkc.passes.support.budget import too_small
from chunkc.progress import stage
from chunkc.report import Plan as ReportedPlan
from chunkc.runtime.execution.bound_action import CompiledGraph

logger = logging.getLogger("chunkc")

MAX_ROUNDS = 2
"""How often a plan that moves bytes is made again with corrected bytes."""
MAX_ROUNDS_OF_MOVES = 4
"""Attempts after which no value moves if some cannot, where they are compiled."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A request for one plan, by budgets of one rank.

    Attributes:
        layout: the model's layout once there is one, which is kept. An evaluation needs one.
        held_nbytes: bytes of host memory that the chunks take over from the model as they fill.
        is_host: whether host memory stands for the device.
        ranks_per_node: ranks of the job on this machine.
        choices: what searches chose in earlier runs. packings: those found for this model.
    """

    target: Target
    options: PlanOptions = PlanOptions()  # noqa: RUF009 - frozen
    passes: Sequence[Pass] | None = None
    layout: Layout | None = None
    held_nbytes: int = 0
    is_host: bool = True
    ranks_per_node: int = 1
    choices: ChoiceStore | None = None
    packings: Packings = field(default_factory=Packings, repr=False, compare=False)

    def in_new_layout(self) -> PlanRequest:
        """The request for a layout in place of the one that there is, whose memory the new one takes over."""
        return replace(self, layout=None, held_nbytes=self.all_held_nbytes())

    def keeping_values(self) -> PlanRequest:
        """The request without moves of saved values that are not asked for."""
        if self.options.activations != "auto" or self.options.fixed_moves:
            return self
        return replace(self, options=replace(self.options, activations="offload", moved_share=0.0))

    def all_held_nbytes(self) -> int:
        """``held_nbytes``, and what the layout takes of host memory."""
        if self.layout is None:
            return self.held_nbytes
        of_rank = self.layout.nbytes_in(Tier.HOST) + (self.layout.arena_nbytes if self.is_host else 0)
        return self.held_nbytes + of_rank * self.ranks_per_node


@dataclass(frozen=True, slots=True)
class CompiledPlan:
    """A plan whose segments are compiled. Where the compiler fuses, its memory is what they take.

    ``lowered`` are the segments by graph kind, ``graphs`` the same, ready for the executor. ``staying``: operators of
    forward whose values cannot move as they are compiled, although the plan moves them.
    """

    planned: Planned
    passes: Sequence[Pass] | None
    lowered: Mapping[GraphKind, LoweredGraph]
    graphs: Mapping[GraphKind, CompiledGraph]
    segment_bytes: tuple[SegmentBytes, ...] = ()
    staying: frozenset[int] = frozenset()

    @property
    def plan(self) -> Plan:
        return self.planned.plan

    @property
    def needed_nbytes(self) -> int:
        """Device bytes at the peak."""
        return self.plan.memory.device_peak_nbytes

    def explain(self) -> None:
        """Log what ``CHUNKC_DEBUG`` asks for."""
        code = {s.name: s.module.code.strip() for low in self.lowered.values() for s in low.segments}
        explain(ReportedPlan.of(self.plan), self.plan.stages, code)

    def measuring(self, more_nbytes: int = 0) -> Plan | None:
        """The same with programs that measure gradients as they land, verified; the graphs serve it as well.

        ``more_nbytes`` of others are alive than when this was made.

        None where the plan measures them already, or the budget leaves no room for what norms take.
        """
        if self.plan.tracks_grad_norm:
            return None
        plan = plan_beside(plan_with_norms(measuring_plan(self.planned, self.passes)), more_nbytes)
        missing_nbytes = plan.memory.device_peak_nbytes - plan.memory.device_budget_nbytes
        if missing_nbytes > 0:
            logger.warning(
                "gradients are read one by one before each step, which waits for them: to measure them as they land "
                "takes %d bytes more than the plan leaves. Give max_grad_norm= to the optimizer before the first "
                "forward, and the plan makes room",
                missing_nbytes,
            )
            return None
        verify(plan)
        return plan


def build(
    captured: Captured, request: PlanRequest, compiler: SegmentCompiler, log_level: int = logging.INFO
) -> CompiledPlan:
    """Plan ``captured``, check the plan, and compile its segments.

    Raises:
        ChunkcError: when the layout has no room for what the graphs train or read.
        BudgetError: when the budgets do not suffice; the ones that it names do.
    """
    if request.layout is not None:
        check_layout(captured.schedule, request.layout)
    search = _Search(captured, request, compiler)
    built = search.best() if compiler.fuses else search.attempt(search.plan(captured.schedule))
    if compiler.fuses:
        verify(built.plan)  # with the bytes that its compiled segments take
    held_nbytes = request.all_held_nbytes()
    check_free_memory(built.plan, held_nbytes, is_host=request.is_host, ranks_per_node=request.ranks_per_node)
    tried = "" if search.num_attempts == 1 else f", {search.num_attempts} plans tried"
    logger.log(log_level, "planned %s in %.1f s%s", built.plan.digest(), search.planning_s, tried)
    logger.log(log_level, "compiled %d segments in %.1f s", len(built.plan.segments), search.compiling_s)
    return built


def check_layout(schedule: Schedule, layout: Layout) -> None:
    """Check that ``layout`` trains and has what ``schedule`` does; ChunkcError names what is missing."""
    trained, used = schedule.trained_params(), schedule.used_params()
    frozen, unused = list[str](), list[str]()
    for place in layout.placements:
        kind, name = layout.chunks[place.chunk].list, repr(schedule.params[place.param].name)
        if place.num_chunks and kind is ChunkList.UNUSED and place.param in used:
            (unused if schedule.params[place.param].trainable else frozen).append(name)
        elif place.num_chunks and kind is not ChunkList.TRAINED and place.param in trained:
            frozen.append(name)
    if not frozen and not unused:
        return
    reasons = [f"{_first(frozen)} frozen"] if frozen else []
    reasons += [f"{_first(unused)} used nowhere"] if unused else []
    raise ChunkcError(
        f"the first training forward laid the model out for good, and {' and '.join(reasons)} then; this forward needs "
        "them otherwise. Let the first forward train every parameter and take every branch that is ever to be trained "
        "(to add `0 * param.sum()` to the loss is enough; what is to rest may be frozen later). To go on with this "
        "model, save its state_dict() and its optimizer's, and load both into one that is compiled anew"
    )


def _first(names: Sequence[str]) -> str:
    """The first names, how many more there are, and the verb."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{', '.join(names[:5])}{more} {'was' if len(names) == 1 else 'were'}"


def budget_chooser(request: PlanRequest) -> BudgetChooser | None:
    """Return what chooses activation budgets; None, which keeps all, if asked for.

    Without the machine's rates it keeps what fits, if need be in another layout than the one that there is, and moves
    nothing that recomputing spares.
    """
    if request.options.activations == "recompute":
        return lambda _: (RECOMPUTE_ALL, "layers are computed again in backward, as asked for")
    if request.options.activations != "auto":
        return None
    if request.target.rates is None:
        request = request.keeping_values()

    def plan_with(schedule: Schedule) -> Planned:
        schedule = with_norms(schedule) if request.options.tracks_grad_norm else schedule
        try:
            return _plan(schedule, request.target, request, max_actions=SCREENING_ACTIONS)
        except BudgetError:
            if request.layout is None or request.target.rates is not None:
                raise
            return _plan(schedule, request.target, request.in_new_layout())

    store = request.choices if request.passes is None and request.layout is None else None
    kept = KeptFirst(store, request.target, request.options, Path(__file__))

    def choose(schedules: SchedulesByBudget) -> tuple[float, str]:
        choice = choose_budget(schedules, plan_with, request.target.rates, forget=schedules.forget, kept=kept)
        return choice.budget, choice.note

    return choose


def kept_choices() -> KeptDocuments:
    """Choices of searches in earlier runs, kept beside what Inductor compiled in them."""
    return KeptDocuments(Path(inductor_cache_folder()) / "chunkc")


def lower_graph(graph: CapturedGraph, plan: Plan, kind: GraphKind) -> LoweredGraph:
    """``graph`` cut at the boundaries of the plan's segments of ``kind``."""
    operators = [b.nodes for b in graph.bundles]
    return lower(graph.module, operators, plan.graph_segments(kind), graph.params)


def _plan(schedule: Schedule, target: Target, request: PlanRequest, max_actions: int = MAX_ACTIONS) -> Planned:
    options, layout, passes = request.options, request.layout, request.passes
    if not schedule.is_evaluation and layout is None:
        search = partial(make_fastest_plan, schedule, target, options, passes=passes, packings=request.packings)
        return search(max_actions=max_actions, choices=request.choices)
    if not schedule.is_evaluation:
        return make_fitting_plan(schedule, target, options, layout=layout, passes=passes)
    if layout is None:
        raise ValueError("an evaluation is planned in the layout of training, and there is none yet")
    return make_evaluation_plan(schedule, target, replace(options, cuts=None), layout=layout, passes=passes)


@dataclass(slots=True)
class _Search:
    """Plans, compiles, compares; ``staying``: operators whose values cannot move, as was found."""

    captured: Captured
    request: PlanRequest
    compiler: SegmentCompiler
    staying: set[int] = field(default_factory=set)
    num_attempts: int = 0
    planning_s: float = 0.0
    compiling_s: float = 0.0

    def plan(self, schedule: Schedule, device_nbytes: int | None = None) -> Planned:
        """A verified plan for the target, or another device budget; BudgetError when it does not suffice."""
        started = time.perf_counter()
        request = self.request
        target = request.target
        if device_nbytes is not None:
            target = target.with_budget(Tier.DEVICE, device_nbytes)
        try:
            planned = _plan(with_staying(schedule, self.staying), target, request)
            stage("verifying the plan")
            verify(planned.plan)
        finally:
            self.planning_s += time.perf_counter() - started
        return planned

    def attempt(self, planned: Planned) -> CompiledPlan:
        """Compile the segments of a plan, and state what they take where the compiler says it."""
        started = time.perf_counter()
        sources, draws, compiler = self.captured.graphs, self.captured.draws, self.compiler
        lowered = {kind: lower_graph(graph, planned.plan, kind) for kind, graph in sources.items()}
        saved = names_of_moved(self.captured, planned.plan)
        compiler.compile_all(lowered.values())
        stage("putting the segments together")
        graphs = {
            kind: CompiledGraph(
                low, compiler.compile(low), sources[kind].gradients, saved if kind == "forward" else {}, draws
            )
            for kind, low in lowered.items()
        }
        self.num_attempts += 1
        self.compiling_s += time.perf_counter() - started
        built = CompiledPlan(planned, self.request.passes, lowered, graphs)
        return self._stated(built) if compiler.fuses else built

    def _stated(self, built: CompiledPlan) -> CompiledPlan:
        started, plan, forward = time.perf_counter(), built.plan, built.graphs["forward"]
        footprints = {kind: self.compiler.footprints(graph) for kind, graph in built.lowered.items()}
        segment_bytes = iteration_bytes(self.captured, plan.segments, built.lowered, footprints)
        is_estimate = not all(f.is_exact for of_graph in footprints.values() for f in of_graph)
        true = stated(plan, segment_bytes, is_estimate=is_estimate)
        memory = replace(true.memory, device_budget_nbytes=self.request.target.budget_nbytes(Tier.DEVICE))
        note = (
            f"{memory.nonmodel_nbytes / 2**20:.2f} MiB of activations as compiled, planned with "
            f"{plan.memory.nonmodel_nbytes / 2**20:.2f}; plan {self.num_attempts} tried"
        )
        elapsed_s = time.perf_counter() - started
        self.planning_s += elapsed_s
        stages = (*plan.stages, StageRecord("fusion", elapsed_s * 1000, note))
        true = replace(true, memory=memory, stages=stages, schedule_digest=self.captured.schedule.digest())
        staying = makers_of_staying(plan, forward.saved, forward.graph, footprints["forward"])
        planned = replace(built.planned, plan=true)
        return replace(built, planned=planned, segment_bytes=segment_bytes, staying=frozenset(staying))

    def compiled(self, schedule: Schedule, device_nbytes: Callable[[], int] | None = None) -> CompiledPlan:
        """Plan for the target, or ``device_nbytes()``, and compile; again where values cannot move as planned."""
        while True:
            built = self.attempt(self.plan(schedule, None if device_nbytes is None else device_nbytes()))
            if not built.staying:
                return built
            makers = {value.made_by for value in built.plan.moves}
            self.staying |= built.staying if self.num_attempts < MAX_ROUNDS_OF_MOVES else makers

    def best(self) -> CompiledPlan:
        """The plan that moves fewest bytes among those tried that fit; BudgetError when none does."""
        schedule, refusal = self.captured.schedule, None
        try:
            best = self.compiled(schedule)
            schedule = corrected(schedule, best.plan.segments, best.segment_bytes)
        except BudgetError as error:
            refusal = error
        if refusal is not None or not self._fits(best):
            best, schedule = self._least(refusal)
        for _ in range(MAX_ROUNDS):
            better = self._better(schedule, best)
            if better is None:
                break
            if self._fits(better):
                best = better
            schedule = corrected(schedule, better.plan.segments, better.segment_bytes)
        return best

    def _fits(self, built: CompiledPlan) -> bool:
        return built.needed_nbytes <= self.request.target.budget_nbytes(Tier.DEVICE)

    def _better(self, schedule: Schedule, than: CompiledPlan) -> CompiledPlan | None:
        """A plan with the bytes of ``schedule`` that moves less, compiled; it may turn out not to fit."""
        moved_nbytes = than.plan.moved_nbytes(*COPIED_TIERS)
        if not moved_nbytes:
            return None
        try:
            planned = self.plan(schedule)
        except BudgetError:
            return None
        if planned.plan.moved_nbytes(*COPIED_TIERS) >= moved_nbytes:
            return None
        built = self.attempt(planned)
        return None if built.staying else built

    def _least(self, refusal: BudgetError | None) -> tuple[CompiledPlan, Schedule]:
        """Return the plan that needs least device memory of those tried, and the schedule corrected by it.

        BudgetError, with a device budget that works, when the target has less, or as ``refusal`` for host memory.
        """
        schedule = self.captured.schedule
        try:
            least = self.compiled(schedule, lambda: self._least_nbytes(schedule))
        except BudgetError as error:
            raise refusal or error from None
        schedule = corrected(schedule, least.plan.segments, least.segment_bytes)
        nbytes = self._least_nbytes(schedule)
        if nbytes < least.needed_nbytes:
            less = self.compiled(schedule, lambda: self._least_nbytes(schedule))
            schedule = corrected(schedule, less.plan.segments, less.segment_bytes)
            least = min(least, less, key=lambda built: built.needed_nbytes)
        if not self._fits(least):
            raise too_small(least.plan, self.request.target, self.request.options)
        return least, schedule

    def _least_nbytes(self, schedule: Schedule) -> int:
        try:
            self.plan(schedule, 0)
        except BudgetError as error:
            return error.min_device_nbytes - self.request.target.budgets[Tier.DEVICE].reserved_nbytes
        return 0
