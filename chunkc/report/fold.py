"""Fold a sequence whose parts repeat, so that a table has one line for all equal layers.

Runs are taken greedily from the left, each the one that covers most: run-length encoding of patterns. It is not always
the shortest description, which a reader does not need: equal layers stand next to each other.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

MAX_PERIOD = 32


@dataclass(frozen=True, slots=True)
class Run:
    """Items ``first`` to ``end`` (exclusive): ``num_repeats`` times the first ``period`` of them."""

    first: int
    period: int
    num_repeats: int

    @property
    def end(self) -> int:
        return self.first + self.period * self.num_repeats


def fold(items: Sequence[Hashable]) -> tuple[Run, ...]:
    """Runs that cover ``items`` in order; an item that repeats nothing is a run of one.

    >>> [(r.first, r.period, r.num_repeats) for r in fold("xababab")]
    [(0, 1, 1), (1, 2, 3)]
    """
    runs: list[Run] = []
    first = 0
    while first < len(items):
        run = _longest(items, first)
        runs.append(run)
        first = run.end
    return tuple(runs)


def _longest(items: Sequence[Hashable], first: int) -> Run:
    """The run at ``first`` that covers most items; of equal ones the one with the shortest period."""
    best = Run(first, 1, 1)
    for period in range(1, min(MAX_PERIOD, (len(items) - first) // 2) + 1):
        end = first + period
        while end < len(items) and items[end] == items[end - period]:
            end += 1
        run = Run(first, period, (end - first) // period)
        if run.num_repeats > 1 and run.end > best.end:
            best = run
    return best


def merge(runs: Sequence[Run], max_runs: int) -> tuple[Run, ...]:
    """At most ``max_runs`` (two or more) runs: neighbours are joined to runs of one repeat until they fit.

    Of all pairs of neighbours the next one joined has the fewest folded runs, then avoids the first and the last run,
    then has the fewest items: equal layers, the beginning and the end of a model are what a reader looks for.
    """
    merged = list(runs)
    while len(merged) > max_runs:
        last = len(merged) - 2
        costs = [
            ((a.num_repeats > 1) + (b.num_repeats > 1), i in (0, last), b.end - a.first, i)
            for i, (a, b) in enumerate(pairwise(merged))
        ]
        i = min(costs)[-1]
        merged[i : i + 2] = [Run(merged[i].first, merged[i + 1].end - merged[i].first, 1)]
    return tuple(merged)
