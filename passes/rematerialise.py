"""Rematerialisation: choose how much of what forward computes is kept for backward.

Activations that are kept take memory that payloads and optimizer states could have; the others are computed again from
what enters their layer (Chen et al., "Training deep nets with sublinear memory cost", 2016). For each *activation
budget*, the share of layers that keep their activations, the joint graph is partitioned anew, the iteration is planned,
and simulated. So this is no pass over a schedule: it decides which schedule the passes get.

    keep all ─ fits, and nothing is to gain ───────────────────────────────────────────── keep all
        ├──── with rates: 0, 0.5, 0.25 or 0.75, then halves beside the best ones ─────────── the fastest
        ├──── without: 0.75, 0.5, 0.25, 0 (large graphs: 0, 0.5) ─ the largest that fits
        └──── nothing fits ─ the one that needs least device memory, or host memory where that alone is missing
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from chunkc.cost.rates import CostRates
from chunkc.cost.simulate import price
from chunkc.errors import BudgetError
from chunkc.files import Decoder, FormatError
from chunkc.ir.schedule import Schedule
from chunkc.ir.tiers import Tier
from chunkc.passes.pipeline import Planned
from chunkc.passes.search import MIN_GAIN
from chunkc.passes.support.choices import ChoiceStore, key_of
from chunkc.passes.support.draft import PlanOptions, Target
from chunkc.progress import within

KEEP_ALL = 1.0
"""The budget with which the partitioner decides alone: it keeps what is not cheap to compute again."""
RECOMPUTE_ALL = 0.0
BUDGETS = (0.75, 0.5, 0.25, RECOMPUTE_ALL)
WORTH_TRYING = 0.03
"""Share of the step that is not computation, which recomputing cannot shorten: below it no other budget is tried."""
WORTH_REFUSING = 0.1
"""Share of memory that a budget must save to be refused instead of ``KEEP_ALL``, which may yet fit as fused."""
MANY_OPERATORS = 6000
"""Operators of forward and backward beyond which a partition takes seconds: three budgets are tried in all."""
WORTH_HALVING = 0.004
"""Share of the step that the budgets between two must be able to gain for one of them to be tried."""
LEAST_WIDTH = 1 / 64
"""Distance of two budgets below which they are as good as one: less than a layer of most models."""
FORWARD_SHARE = 0.25
"""Share of a step's computation that is its second forward, where all layers are computed again."""
NEARLY_BEST = 0.01
"""Share by which the step of a second budget may be longer than the best one for budgets beside that to be tried."""
STALLED = 0.02
"""Share by which a step is longer than its computation from which less is kept, for more room, rather than more."""


@dataclass(frozen=True, slots=True)
class BudgetCandidate:
    """One activation budget with its simulated step.

    ``step_ms``: the simulated step, zero where no rates are known, infinity where the plan does not fit.
    ``compute_ms``: the computation in the step. ``outcome``: what bounds the step, or what is missing.
    ``least_nbytes``: device memory with which the iteration would be planned, where that is what is missing;
    ``least_host_nbytes``: host memory, where that alone is.
    ``moved_nbytes``: of saved values that go to the host. ``bound``: the stream that bounds a simulated step.
    ``device_nbytes``, ``host_nbytes``: of one rank, without what is reserved; zero where the plan does not fit.
    """

    budget: float
    step_ms: float
    compute_ms: float
    outcome: str
    least_nbytes: int = 0
    least_host_nbytes: int = 0
    moved_nbytes: int = 0
    bound: str = ""
    device_nbytes: int = 0
    host_nbytes: int = 0

    @property
    def fits(self) -> bool:
        return not math.isinf(self.step_ms)


Priced = dict[str, BudgetCandidate]
"""Candidates by digests of their schedules, since budgets that are close may give one schedule."""


@dataclass(frozen=True, slots=True)
class BudgetChoice:
    """The budget that is taken, of ``candidates``."""

    budget: float
    candidates: tuple[BudgetCandidate, ...]

    @property
    def best(self) -> BudgetCandidate:
        """The candidate of the budget that is taken."""
        return next(c for c in self.candidates if c.budget == self.budget)

    @property
    def note(self) -> str:
        """The table of candidates in one line."""
        shown = (f"{c.budget:g}: {_milliseconds(c.step_ms)}{c.outcome}" for c in self.candidates)
        return f"{self.budget:g} of the layers keep their activations; " + "; ".join(shown)


def _milliseconds(step_ms: float) -> str:
    if math.isinf(step_ms):
        return "does not fit, "
    return f"{step_ms:.4g} ms, " if step_ms else ""


@dataclass(frozen=True, slots=True)
class KeptFirst:
    """First candidates that settled choices in earlier runs, by all that they follow from.

    ``made_by``: the file of the code that plans candidates; the planner's own counts as well.
    """

    store: ChoiceStore | None
    target: Target
    options: PlanOptions
    made_by: Path

    def key_of(self, schedule: Schedule) -> str:
        """A key that is equal where the plan of ``schedule``, and so its candidate, is."""
        facts = key_of(schedule.digest(), self.target, self.options, 0), self.target.rank
        return hashlib.sha256(repr(facts).encode() + self.made_by.read_bytes()).hexdigest()[:32]

    def find(self, schedule: Schedule) -> BudgetCandidate | None:
        document = None if self.store is None else self.store.find(self.key_of(schedule))
        try:
            return None if document is None else Decoder().decode(BudgetCandidate, document)
        except FormatError:
            return None

    def keep(self, schedule: Schedule, first: BudgetCandidate) -> None:
        if self.store is not None:
            self.store.keep(self.key_of(schedule), asdict(first))


def choose_budget(
    schedule_with: Callable[[float], Schedule],
    plan_with: Callable[[Schedule], Planned],
    rates: CostRates | None,
    *,
    is_cheap: bool = False,
    forget: Callable[[float], None] = lambda _: None,
    kept: KeptFirst | None = None,
    priced: Priced | None = None,
) -> BudgetChoice:
    """Choose the activation budget of one iteration.

    Args:
        schedule_with: the iteration with an activation budget in [0, 1].
        plan_with: its plan; it raises `BudgetError` where that does not fit.
        rates: of the machine; None where they are not known.
        is_cheap: whether a schedule of a large graph takes no time to make.
        forget: is told of budgets that will not be chosen, all but the best so far.
        kept: what settled the choice in earlier runs for the same request; it spares the first plan.
        priced: candidates of the same request that were priced before; more are added.

    Returns:
        The budget whose plan simulates fastest, or, without rates, the largest that fits. Only ``KEEP_ALL`` is tried
        where it fits and the step is computation alone, of which recomputing makes more. Where nothing fits, the choice
        needs least device memory, or, where only the host is too small, least host memory.
    """
    trial = _Trial(schedule_with, plan_with, rates, forget, {} if priced is None else priced)
    with _counted(1):
        first_schedule = schedule_with(KEEP_ALL)
        known = None if kept is None else kept.find(first_schedule)
        if known is not None:
            trial.priced[first_schedule.digest()] = known
        first = trial.priced_of(KEEP_ALL, first_schedule)
    if first.fits and first.compute_ms >= first.step_ms * (1 - WORTH_TRYING):
        if kept is not None and known is None:
            kept.keep(first_schedule, first)
        return BudgetChoice(KEEP_ALL, (first,))
    trial.candidates.append(first)
    is_large = sum(len(g.operators) for g in first_schedule.graphs) > MANY_OPERATORS
    if is_large and not is_cheap:
        trial.try_ends()
    elif rates is None:
        trial.descend()
    else:
        trial.bisect()
    return BudgetChoice(trial.best().budget, tuple(trial.candidates))


def choose_among(
    budgets: Sequence[float],
    schedule_with: Callable[[float], Schedule],
    plan_with: Callable[[Schedule], Planned],
    rates: CostRates | None,
    priced: Priced,
) -> BudgetChoice:
    """The best of ``budgets``, of which the first keeps least; other arguments as of `choose_budget`.

    Where the host is too small for the first, no other is tried.
    """
    trial = _Trial(schedule_with, plan_with, rates, lambda _: None, priced)
    for budget in budgets:
        with _counted(len(trial.candidates) + 1):
            trial.candidates.append(trial.priced_of(budget, schedule_with(budget)))
        if not trial.candidates[0].fits and not trial.candidates[0].least_nbytes:
            break
    return BudgetChoice(trial.best().budget, tuple(trial.candidates))


@dataclass(slots=True)
class _Trial:
    """Candidates as they are tried, ``KEEP_ALL`` the first; arguments as of `choose_budget`."""

    schedule_with: Callable[[float], Schedule]
    plan_with: Callable[[Schedule], Planned]
    rates: CostRates | None
    forget: Callable[[float], None]
    priced: Priced
    candidates: list[BudgetCandidate] = field(default_factory=list)

    def price(self, budget: float) -> BudgetCandidate:
        with _counted(len(self.candidates) + 1):
            candidate = self.priced_of(budget, self.schedule_with(budget))
        before = self.best()
        self.candidates.append(candidate)
        best = self.best()
        for other in {before.budget, budget} - {best.budget}:
            self.forget(other)
        return candidate

    def priced_of(self, budget: float, schedule: Schedule) -> BudgetCandidate:
        digest = schedule.digest()
        if digest not in self.priced:
            self.priced[digest] = _price(budget, schedule, self.plan_with, self.rates)
        return replace(self.priced[digest], budget=budget)

    def descend(self) -> None:
        """Try budgets from the largest down, until one fits."""
        for budget in BUDGETS:
            if self.price(budget).fits:
                break

    def try_ends(self) -> bool:
        """Try to recompute all, and half where that fits, which is returned."""
        fits = self.price(RECOMPUTE_ALL).fits
        if fits:
            self.price((RECOMPUTE_ALL + KEEP_ALL) / 2)
        return fits

    def bisect(self) -> None:
        """Try the ends, their middle, the middle of the better half, and halves around the best."""
        if self.try_ends():
            middle = (RECOMPUTE_ALL + KEEP_ALL) / 2
            self.price((middle + (KEEP_ALL if self.best().budget >= middle else RECOMPUTE_ALL)) / 2)
            self.halve()

    def halve(self) -> None:
        """Try halves beside the best budget, and one that is nearly so, the widest first, while they gain."""
        while budgets := [b for c in self._promising() if (b := self._beside(c)) is not None]:
            self.price(max(budgets, key=self._width))

    def _width(self, budget: float) -> float:
        return min(abs(budget - c.budget) for c in self.candidates)

    def _promising(self) -> list[BudgetCandidate]:
        """The best candidate, and the next one that is nearly as fast and faster than its neighbours."""
        best, tried = self.best(), sorted(self.candidates, key=lambda c: c.budget)
        if not best.fits:
            return []
        bar_ms = best.step_ms * (1 + NEARLY_BEST)
        around = zip([None, *tried], tried, [*tried[1:], None], strict=False)
        dips = [c for left, c, right in around if all(n is None or n.step_ms > c.step_ms for n in (left, right))]
        others = sorted((c for c in dips if c is not best and c.step_ms <= bar_ms), key=lambda c: c.step_ms)
        return [best, *others[:1]]

    def _beside(self, candidate: BudgetCandidate) -> float | None:
        """The budget to try next, between ``candidate`` and a neighbour, where that can gain enough.

        More is kept where the step is little more than computation, of which that leaves less. Elsewhere less is, for
        room, where the rest of the step is longer than what is then computed again.
        """
        tried = sorted(self.candidates, key=lambda c: c.budget)
        position, rest_ms = tried.index(candidate), candidate.step_ms - candidate.compute_ms
        stalls = rest_ms > candidate.compute_ms * STALLED
        neighbours = tried[:position][-1:] if stalls else tried[position + 1 :][:1]
        width = abs(neighbours[0].budget - candidate.budget) / 2 if neighbours else 0.0
        worth_ms = self._worth_ms()
        while stalls and worth_ms * width > rest_ms:
            width /= 2
        if width < LEAST_WIDTH or worth_ms * width < candidate.step_ms * WORTH_HALVING:
            return None
        return candidate.budget - width if stalls else candidate.budget + width

    def _worth_ms(self) -> float:
        """Computation that is spared where all layers keep their activations."""
        fitting = sorted((c for c in self.candidates if c.fits), key=lambda c: c.budget)
        least, most = fitting[0], fitting[-1]
        if least is most:
            return least.compute_ms * FORWARD_SHARE
        return (least.compute_ms - most.compute_ms) / (most.budget - least.budget)

    def best(self) -> BudgetCandidate:
        """The fastest candidate; of those that are as fast the one that moves least, then keeps most."""
        fitting = [c for c in self.candidates if c.fits]
        if not fitting:
            first, least = self.candidates[0], min(self.candidates, key=_needs)
            saves = any(a < b * (1 - WORTH_REFUSING) for a, b in zip(_needs(least), _needs(first), strict=True))
            return least if saves else first
        bar_ms = min(c.step_ms for c in fitting) / (1 - MIN_GAIN)
        return min((c for c in fitting if c.step_ms <= bar_ms), key=lambda c: (c.moved_nbytes, -c.budget))


def _needs(candidate: BudgetCandidate) -> tuple[int, int]:
    """Device memory, then host memory, that a candidate which does not fit needs."""
    return candidate.least_nbytes, candidate.least_host_nbytes


def _counted(number: int) -> AbstractContextManager[None]:
    return within(f"activations kept, choice {number}")


def _price(
    budget: float, schedule: Schedule, plan_with: Callable[[Schedule], Planned], rates: CostRates | None
) -> BudgetCandidate:
    try:
        planned = plan_with(schedule)
    except BudgetError as error:
        lacks_host = error.moment == Tier.HOST
        needs = (0, error.min_host_nbytes) if lacks_host else (error.min_device_nbytes, 0)
        return BudgetCandidate(budget, math.inf, 0.0, f"{error.missing_nbytes} bytes missing", *needs)
    plan = planned.plan
    activations_mib = plan.memory.nonmodel_nbytes / 2**20
    if rates is None:
        return BudgetCandidate(budget, 0.0, 0.0, f"{activations_mib:.0f} MiB of activations")
    cost = planned.price or price(plan, rates)
    return BudgetCandidate(
        budget,
        cost.step_ms,
        cost.compute_ms,
        f"{activations_mib:.0f} MiB of activations, bound by {cost.bound}",
        moved_nbytes=plan.copies_nbytes,
        bound=cost.bound,
        device_nbytes=plan.memory.device_peak_nbytes,
        host_nbytes=plan.memory.host_nbytes,
    )
