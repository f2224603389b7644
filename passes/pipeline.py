"""The passes of training in their order, and the entry points that plan by them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from chunkc.cost.rates import CostRates
from chunkc.cost.simulate import Price
from chunkc.errors import BudgetError
from chunkc.ir.layout import ChunkList, Layout
from chunkc.ir.plan import Memory, Plan, StageRecord
from chunkc.ir.schedule import Schedule
from chunkc.ir.tiers import COPIED_TIERS, Tier
from chunkc.passes.chunk_mapping import ChunkMappingPass
from chunkc.passes.chunk_size import ChunkSizePass
from chunkc.passes.communication import CommunicationPass
from chunkc.passes.contract import Check, Pass, run_passes
from chunkc.passes.evaluate import EvaluatePass
from chunkc.passes.liveness import LivenessPass, peak_nbytes
from chunkc.passes.offload import OffloadPass
from chunkc.passes.os_placement import OsPlacementPass
from chunkc.passes.prefetch import PrefetchPass
from chunkc.passes.residency import ResidencyPass
from chunkc.passes.search import MAX_ACTIONS, Candidate, Search
from chunkc.passes.states import StatesPass
from chunkc.passes.step import StepPass
from chunkc.passes.support.choices import Choice, ChoiceStore, find_choice, keep_choice, key_of
from chunkc.passes.support.draft import Draft, Packings, PlanOptions, Target, decided
from chunkc.progress import stage

ALL_MOVED = 1.0
MOVED_SHARES = (0.25, 0.5, ALL_MOVED)
"""Shares of layers whose saved values move where a plan does not fit without: the first that does is taken."""
PIPELINE: tuple[Pass, ...] = (
    OffloadPass(),
    LivenessPass(),
    ChunkSizePass(),
    ChunkMappingPass(),
    OsPlacementPass(),
    StatesPass(),
    ResidencyPass(),
    PrefetchPass(),
    CommunicationPass(),
    StepPass(),
)


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan with the drafts and the candidates that led to it.

    ``drafts``: the draft after each pass as ``(pass name, draft)``. ``candidates``: those that were simulated, if any.
    ``price``: of the plan, where a search has simulated it.
    """

    plan: Plan
    drafts: tuple[tuple[str, Draft], ...]
    candidates: tuple[Candidate, ...] = ()
    price: Price | None = None

    @property
    def moved_share(self) -> float:
        """Share of layers whose saved values move, as asked for or as makes the plan fit."""
        return self.drafts[-1][1].options.moved_share


def make_plan(
    schedule: Schedule,
    target: Target,
    options: PlanOptions = PlanOptions(),  # noqa: B008 - frozen
    *,
    layout: Layout | None = None,
    passes: Sequence[Pass] | None = None,
    check: Check | None = None,
    packings: Packings | None = None,
) -> Planned:
    """Plan one training iteration.

    Args:
        schedule: the iteration as captured.
        target: hardware, budgets in bytes of one rank, ranks.
        options: wishes.
        layout: mapping, homes and arena of an earlier shape of the same model; kept as they are.
        passes: the pipeline; default ``PIPELINE``.
        check: called with ``(pass name, draft)`` before the first pass and after each.
        packings: those found before, for this model on as many ranks; more are added.

    Raises:
        BudgetError: when the budgets do not suffice; the ones that it names do.
        PassOrderError: when contracts of ``passes`` cannot be kept.
        PlanError: when ``schedule`` or ``layout`` breaks a rule.
        ValueError: on options that contradict each other.
    """
    _check_request(schedule, target, options, layout)
    stage("planning")
    start = Draft(schedule, target, options, layout, Packings() if packings is None else packings)
    draft, drafts = run_passes(start, PIPELINE if passes is None else passes, check)
    return Planned(assemble(draft), drafts)


def make_fitting_plan(
    schedule: Schedule,
    target: Target,
    options: PlanOptions = PlanOptions(),  # noqa: B008 - frozen
    *,
    layout: Layout | None = None,
    passes: Sequence[Pass] | None = None,
    check: Check | None = None,
    packings: Packings | None = None,
) -> Planned:
    """As `make_plan`; where that does not fit, some layers move what they save to the host.

    They do where the options leave it open: the first of ``MOVED_SHARES`` that fits. Where none does, `BudgetError`
    names memory that is enough for a plan that moves nothing, or for one that moves all where that takes less of the
    device. Where the options say otherwise, the error says whether ``activations="offload"`` would do.
    """
    packings = Packings() if packings is None else packings

    def plan_with(share: float) -> Planned | BudgetError:
        moving = replace(options, moved_share=share or options.moved_share)
        try:
            return make_plan(schedule, target, moving, layout=layout, passes=passes, check=check, packings=packings)
        except BudgetError as error:
            return error

    can_move = not (options.moved_share or options.fixed_moves) and options.activations != "offload"
    is_open = can_move and options.activations == "auto"
    shares = MOVED_SHARES if is_open else MOVED_SHARES[-1:] if can_move else ()
    start, refusals = Draft(schedule, target, options, layout, packings), dict[float, BudgetError]()
    for share in (0.0, *shares):
        if is_open and passes is None and share < ALL_MOVED and _is_too_large(start, share):
            continue
        found = plan_with(share)
        if isinstance(found, Planned):
            if share and not is_open:
                raise _advised(refusals[0.0])
            return found
        refusals[share] = found
        if found.moment == Tier.HOST and found.missing_nbytes > target.budget_nbytes(Tier.DEVICE):
            break  # more than the device could take from the host if it had nothing else
    kept = refusals.get(0.0) or plan_with(0.0)
    if isinstance(kept, Planned):
        return kept
    moving = refusals.get(ALL_MOVED)
    raise kept if moving is None or not is_open else _lesser(kept, moving, target.budget_nbytes(Tier.HOST))


def _is_too_large(start: Draft, share: float) -> bool:
    """Whether single operators take more than the device where ``share`` of the layers move values."""
    found = replace(start, options=replace(start.options, moved_share=share))
    found = LivenessPass()(OffloadPass()(found))
    return peak_nbytes(decided(found.liveness, "liveness")) > found.target.budget_nbytes(Tier.DEVICE)


def _lesser(error: BudgetError, moving: BudgetError, host_nbytes: int) -> BudgetError:
    """The error of a plan, or that of one that moves saved values, where less of the device is enough.

    One that lacks host memory alone is taken only where the plan would lack some of ``host_nbytes``, too.
    """
    if moving.moment == Tier.HOST:
        return moving if error.min_host_nbytes > host_nbytes else error
    return moving if moving.min_device_nbytes < error.min_device_nbytes else error


def _advised(error: BudgetError) -> BudgetError:
    """``error`` of a plan that would fit if saved values moved."""
    return BudgetError(
        f"{error} With activations='offload' it fits as it is.",
        moment=error.moment,
        tensors=error.tensors,
        missing_nbytes=error.missing_nbytes,
        min_device_nbytes=error.min_device_nbytes,
        min_host_nbytes=error.min_host_nbytes,
    )


def make_fastest_plan(
    schedule: Schedule,
    target: Target,
    options: PlanOptions = PlanOptions(),  # noqa: B008 - frozen
    *,
    passes: Sequence[Pass] | None = None,
    check: Check | None = None,
    max_actions: int = MAX_ACTIONS,
    choices: ChoiceStore | None = None,
    packings: Packings | None = None,
) -> Planned:
    """Plan one training iteration with those options that simulate fastest on ``target.rates``.

    What ``options`` fixes is kept; after ``max_actions`` simulated actions nothing else is tried. Where the rates are
    not known, or nothing is copied or exchanged, this is `make_fitting_plan`, which takes and raises the same. All
    ranks must choose alike, so candidates are planned for rank 0. Where ``choices`` keeps what was chosen for the same
    request, nothing is searched, and there are no candidates.
    """
    packings = Packings() if packings is None else packings
    planned = make_fitting_plan(schedule, target, options, passes=passes, check=check, packings=packings)
    options = replace(options, moved_share=planned.moved_share)
    moves = planned.plan.moved_nbytes(*COPIED_TIERS)
    if target.rates is None or (not moves and target.world_size == 1):
        return planned
    started, tried, cost = time.perf_counter(), list[Candidate](), None
    store = choices if passes is None else None
    key = "" if store is None else key_of(planned.plan.schedule_digest, target, options, max_actions)
    choice = None if store is None else find_choice(store, key)
    if choice is None:
        choice, cost, tried = _searched(planned, schedule, target, options, target.rates, passes, max_actions)
        if store is not None:
            keep_choice(store, key, choice)
    stage_record = StageRecord("search", (time.perf_counter() - started) * 1e3, choice.note)
    best = choice.applied_to(options)
    if best != options:
        planned = make_plan(schedule, target, best, passes=passes, check=check, packings=packings)
    plan = replace(planned.plan, stages=(*planned.plan.stages, stage_record))
    return replace(planned, plan=plan, candidates=tuple(tried), price=cost if target.rank == 0 else None)


def _searched(
    planned: Planned,
    schedule: Schedule,
    target: Target,
    options: PlanOptions,
    rates: CostRates,
    passes: Sequence[Pass] | None,
    max_actions: int,
) -> tuple[Choice, Price, list[Candidate]]:
    """The fastest options, their price on the first rank, and all candidates.

    ``planned`` is the passes' own plan.
    """
    first_rank, packings = replace(target, rank=0), planned.drafts[-1][1].packings

    def draft_with(varied: PlanOptions) -> Draft:
        start = Draft(schedule, first_rank, varied, packings=packings)
        return run_passes(start, PIPELINE if passes is None else passes)[0]

    def plan_of(draft: Draft) -> Plan:
        return assemble(draft, planned.plan.schedule_digest)

    search = Search(draft_with, plan_of, rates, options, max_actions)
    best = search.run(planned.drafts[-1][1] if target.rank == 0 else draft_with(options))
    note = f"{best.text}: {best.step_ms:.4g} ms a step, the least of {len(search.tried)} plans simulated"
    return Choice.of(best.options, note), search.price_of(best), search.tried


def make_evaluation_plan(
    schedule: Schedule,
    target: Target,
    options: PlanOptions = PlanOptions(),  # noqa: B008 - frozen
    *,
    layout: Layout,
    passes: Sequence[Pass] | None = None,
    check: Check | None = None,
) -> Planned:
    """Plan one forward without gradients beside the training programs of ``layout``.

    The passes are those of training with ``evaluate`` in place of the one that decides the programs; the arguments are
    those of `make_plan`.

    Raises:
        BudgetError: when its activations do not fit beside the arena; it says what would.
        PlanError: when it reads parameters that ``layout`` keeps off the device.
        ValueError: when ``schedule`` has gradients.
    """
    if not schedule.is_evaluation:
        raise ValueError(f"an evaluation has no backward graph, found {len(schedule.backward.operators)} operators")
    trains = PIPELINE if passes is None else passes
    swapped = [EvaluatePass() if "programs" in p.provides else p for p in trains]
    return make_plan(schedule, target, options, layout=layout, passes=swapped, check=check)


def measuring_plan(planned: Planned, passes: Sequence[Pass] | None = None) -> Plan:
    """``planned``, which ``passes`` made, with programs that measure gradients; nothing else differs."""
    draft = planned.drafts[-1][1]
    draft = replace(draft, options=replace(draft.options, tracks_grad_norm=True), programs=None)
    for pass_ in PIPELINE if passes is None else passes:
        draft = pass_(draft) if "programs" in pass_.provides else draft
    return replace(planned.plan, programs=decided(draft.programs, "programs"))


def _check_request(schedule: Schedule, target: Target, options: PlanOptions, layout: Layout | None) -> None:
    """Refuse what no pass could honour.

    Raises:
        ValueError: naming the option and the value found.
    """
    for graph, cuts in zip(schedule.graphs, options.cuts or ((), ()), strict=True):
        outside = [c for c in cuts if not 0 < c < len(graph.operators)]
        if outside:
            raise ValueError(
                f"cut {outside[0]} is not inside the {graph.kind} graph of {len(graph.operators)} operators"
            )
    if layout is not None and _rank_name(layout) != _rank_name(target):
        raise ValueError(f"the layout is that of {_rank_name(layout)}, the target is {_rank_name(target)}")


def _rank_name(of: Layout | Target) -> str:
    replicas = "" if of.num_replicas == 1 else f" in each of {of.num_replicas} replicas"
    return f"rank {of.rank} of {of.world_size}{replicas}"


def assemble(draft: Draft, schedule_digest: str | None = None) -> Plan:
    """The plan that ``draft`` describes; ``schedule_digest`` saves computing it again."""
    layout = decided(draft.layout, "mapping")
    forward, backward = decided(draft.timelines, "segments")
    segments = (*forward.segments, *backward.segments)
    trained_here = draft.schedule.trained_params()
    trained = [p.param for p in layout.placements if p.num_chunks and layout.chunks[p.chunk].list is ChunkList.TRAINED]
    worst = max(segments, key=lambda s: s.nonmodel_nbytes, default=None)
    moves = tuple(sorted((move.value for move in draft.moves), key=lambda value: value.index))
    in_flight = 1 if draft.schedule.is_evaluation else draft.options.in_flight
    copies_nbytes = in_flight * sum(value.nbytes for value in moves)
    return Plan(
        model=draft.target.model,
        hw=draft.target.hw,
        schedule_digest=schedule_digest or draft.schedule.digest(),
        layout=layout,
        segments=segments,
        programs=decided(draft.programs, "programs"),
        memory=Memory(
            device_budget_nbytes=draft.target.budget_nbytes(Tier.DEVICE),
            host_budget_nbytes=draft.target.budget_nbytes(Tier.HOST) + copies_nbytes,
            arena_nbytes=layout.arena_nbytes,
            nonmodel_nbytes=0 if worst is None else worst.nonmodel_nbytes,
            nonmodel_segment="" if worst is None else worst.name,
            host_nbytes=layout.nbytes_in(Tier.HOST) + copies_nbytes,
        ),
        moves=moves,
        stages=draft.stages,
        saved=draft.schedule.saved_values(),
        trained_elsewhere=tuple(p for p in trained if p not in trained_here),
        num_samples=draft.schedule.num_samples,
        num_tokens=draft.schedule.num_tokens,
        mesh=draft.target.mesh,
        accumulate=1 if draft.schedule.is_evaluation else draft.options.accumulate,
        in_flight=in_flight,
        waiting_nbytes=draft.waiting_nbytes,
    )
