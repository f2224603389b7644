"""The search: options that no rule decides are decided by simulated time.

A pass decides by a rule. Which rule serves best depends on the machine: larger chunks copy faster, smaller ones overlap
better; a triple in device memory saves an update on the host and costs room for payloads. So candidates are planned
whole, by the same passes, and simulated on the machine's rates; the least step time wins, then the earlier candidate.
One quantity is varied at a time, from the plan that the passes make by themselves, which is a candidate too: the search
never makes a plan slower in the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from chunkc.cost.rates import CostRates
from chunkc.cost.simulate import simulate_with
from chunkc.errors import BudgetError
from chunkc.ir.actions import Stream
from chunkc.ir.plan import Plan
from chunkc.passes.draft import Options

MAX_ACTIONS = 100_000
"""Simulated actions after which no more candidates are tried: what bounds the time of a search for a large model."""
MIN_GAIN = 0.002
"""Share of the step time that a candidate must gain: less is below what the simulator can tell apart."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One plan that was considered.

    Attributes:
        options: what it was planned with.
        text: what was varied.
        step_ms: simulated; infinity where it does not fit. compute_ms: what the compute stream's actions take alone.
        outcome: what bounds it, or what it lacks.
    """

    options: Options
    text: str
    step_ms: float
    compute_ms: float
    outcome: str


@dataclass(slots=True)
class Search:
    """Candidates around ``options``, on the rates of one machine.

    Attributes:
        plan_with: the plan with other options; it raises `BudgetError` where that does not fit.
        rates: of the machine.
        options: the caller's wishes; what they fix is not varied.
        tried: all candidates, in the order of trial.
    """

    plan_with: Callable[[Options], Plan]
    rates: CostRates
    options: Options
    tried: list[Candidate] = field(default_factory=list)
    _num_actions: int = 0

    def run(self, first: Plan, sizes: Sequence[int]) -> Candidate:
        """The best candidate.

        Args:
            first: the plan of ``options``.
            sizes: elements per chunk that fit, the best by bytes moved first.
        """
        best = self._price(self.options, "the passes' own choice", lambda: first)
        if best.compute_ms >= best.step_ms * (1 - MIN_GAIN):
            return best  # the step is computation, of which every plan of this schedule has as much
        return self._best_of(best, self._sizes(sizes))

    def _sizes(self, sizes: Sequence[int]) -> Iterable[tuple[Options, str]]:
        """What moves least of every octave of sizes, nearest to the passes' own choice first."""
        if self.options.chunk_numel is not None or not sizes:
            return
        own = sizes[0]
        octaves: dict[int, int] = {}
        for numel in sizes[1:]:
            octaves.setdefault(round(math.log2(numel / own)), numel)
        for octave in sorted(octaves, key=lambda o: (abs(o), o)):
            numel = octaves[octave]
            yield replace(self.options, chunk_numel=numel), f"chunks of {numel} elements"

    def _best_of(self, best: Candidate, others: Iterable[tuple[Options, str]]) -> Candidate:
        for options, text in others:
            if self._num_actions >= MAX_ACTIONS:
                break
            found = self._price(options, text, lambda: self.plan_with(options))  # noqa: B023 - called at once
            if found.step_ms < best.step_ms * (1 - MIN_GAIN):
                best = found
        return best

    def _price(self, options: Options, text: str, plan_of: Callable[[], Plan]) -> Candidate:
        try:
            timeline = simulate_with(plan := plan_of(), self.rates)
        except BudgetError as error:
            found = Candidate(options, text, math.inf, 0.0, f"{error.missing_nbytes} bytes missing")
        else:
            self._num_actions += timeline.num_iterations * sum(len(p.actions) for p in plan.programs)
            compute_ms = timeline.stream(Stream.COMPUTE).alone_ms
            found = Candidate(options, text, timeline.step_ms, compute_ms, f"bound by {timeline.bound}")
        self.tried.append(found)
        return found
