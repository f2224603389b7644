"""Schedules of one iteration by activation budget, and what chooses between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torch.fx import GraphModule

from chunkc.capture.graphs import Captured, lowest_peak
from chunkc.capture.partition import copied
from chunkc.ir.schedule import Schedule


@dataclass(slots=True, eq=False, repr=False)
class BudgetSchedules:
    """Schedules of one joint graph by activation budget.

    Of large models each pair of graphs takes much memory. ``partition`` cuts a copy of the joint graph with a budget,
    ``build`` makes the iteration of two graphs in place.
    """

    partition: Callable[[float], tuple[GraphModule, GraphModule]]
    build: Callable[[GraphModule, GraphModule], Captured]
    graphs: dict[float, tuple[GraphModule, GraphModule]] = field(default_factory=dict)

    def __call__(self, budget: float) -> Schedule:
        """Return the schedule with a budget; the graphs behind it stay until it is forgotten."""
        return lowest_peak(self.estimates(budget))

    def estimates(self, budget: float) -> tuple[Schedule, ...]:
        """Return the schedule with a budget by each estimate of its live bytes."""
        self.graphs[budget] = self.partition(budget)
        return self.build(*map(copied, self.graphs[budget])).estimates

    def forget(self, budget: float) -> None:
        """Let go of the graphs of a budget, which would have to be partitioned again."""
        self.graphs.pop(budget, None)


class SchedulesByBudget(Protocol):
    """Schedules of one iteration by activation budget."""

    def __call__(self, budget: float) -> Schedule:
        """Return the schedule with a budget."""
        ...

    def forget(self, budget: float) -> None:
        """Let go of what is kept for a budget."""
        ...


BudgetChooser = Callable[[SchedulesByBudget], tuple[float, str]]
"""From the schedule as a function of the activation budget to the budget to take, and a note on why."""
GraphChooser = Callable[[BudgetSchedules], tuple[float, str]]
"""The same of one joint graph."""
