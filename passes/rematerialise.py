"""Rematerialisation: choose how much of what forward computes is kept for backward.

Activations that are kept take memory that payloads and optimizer states could have; the others are computed again from
what enters their layer (Chen et al., "Training deep nets with sublinear memory cost", 2016). For each *activation
budget*, the share of layers that keep their activations, the joint graph is partitioned anew, the iteration is planned,
and simulated. So this is no pass over a schedule: it decides which schedule the passes get.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from chunkc.cost.rates import CostRates
from chunkc.cost.simulate import price
from chunkc.errors import BudgetError
from chunkc.ir.plan import Plan
from chunkc.ir.schedule import Schedule
from chunkc.passes.search import MIN_GAIN
from chunkc.progress import within

KEEP_ALL = 1.0
"""The budget with which the partitioner decides alone: it keeps what is not cheap to compute again."""
BUDGETS = (0.75, 0.5, 0.25, 0.0)
WORTH_TRYING = 0.03
"""Share of the step that is not computation, which recomputing cannot shorten: below it no other budget is tried."""
MAX_OPERATORS = 6000
"""Operators of forward and backward beyond which partitioning again and again would take minutes."""


@dataclass(frozen=True, slots=True)
class BudgetCandidate:
    """One activation budget with its simulated step.

    ``step_ms``: the simulated step, infinity where the plan does not fit. ``compute_ms``: the computation in the step.
    ``outcome``: what bounds the step, or what is missing.
    """

    budget: float
    step_ms: float
    compute_ms: float
    outcome: str


@dataclass(frozen=True, slots=True)
class BudgetChoice:
    """The budget that simulates fastest, among ``candidates``."""

    budget: float
    candidates: tuple[BudgetCandidate, ...]

    @property
    def note(self) -> str:
        """The table of candidates in one line."""
        shown = (f"{c.budget:g}: {_milliseconds(c.step_ms)}, {c.outcome}" for c in self.candidates)
        return f"{self.budget:g} of the layers keep their activations; " + "; ".join(shown)


def _milliseconds(step_ms: float) -> str:
    return "does not fit" if math.isinf(step_ms) else f"{step_ms:.4g} ms"


def choose_budget(
    schedule_with: Callable[[float], Schedule], plan_with: Callable[[Schedule], Plan], rates: CostRates
) -> BudgetChoice:
    """Price activation budgets from the largest down, until two in a row gain nothing.

    Args:
        schedule_with: the iteration with an activation budget in [0, 1].
        plan_with: its plan; it raises `BudgetError` where that does not fit.
        rates: of the machine.

    Returns:
        The choice. Only ``KEEP_ALL`` is tried where the step is computation alone, of which recomputing makes more, and
        where the graphs are large; where nothing fits, it is the choice too.
    """
    with _counted(1):
        first = _price(KEEP_ALL, schedule := schedule_with(KEEP_ALL), plan_with, rates)
    candidates, best, misses = [first], first, 0
    num_operators = sum(len(g.operators) for g in schedule.graphs)
    if first.compute_ms >= first.step_ms * (1 - WORTH_TRYING) or num_operators > MAX_OPERATORS:
        return BudgetChoice(KEEP_ALL, (first,))
    for number, budget in enumerate(BUDGETS, 2):
        with _counted(number):
            candidate = _price(budget, schedule_with(budget), plan_with, rates)
        candidates.append(candidate)
        is_better = candidate.step_ms < best.step_ms * (1 - MIN_GAIN)
        misses = 0 if is_better or math.isinf(candidate.step_ms) else misses + 1
        best = candidate if is_better else best
        if misses == 2:
            break
    return BudgetChoice(best.budget, tuple(candidates))


def _counted(number: int) -> AbstractContextManager[None]:
    return within(f"activations kept, {number} of at most {1 + len(BUDGETS)} choices")


def _price(
    budget: float, schedule: Schedule, plan_with: Callable[[Schedule], Plan], rates: CostRates
) -> BudgetCandidate:
    try:
        plan = plan_with(schedule)
    except BudgetError as error:
        return BudgetCandidate(budget, math.inf, 0.0, f"{error.missing_nbytes} bytes missing")
    cost = price(plan, rates)
    activations_mib = plan.memory.nonmodel_nbytes / 2**20
    outcome = f"{activations_mib:.0f} MiB of activations, bound by {cost.bound}"
    return BudgetCandidate(budget, cost.step_ms, cost.compute_ms, outcome)
