"""The search: options that no rule decides are decided by simulated time.

A pass decides by a rule. Which rule serves best depends on the machine: larger chunks copy faster, smaller ones overlap
better; a triple in device memory saves an update on the host and costs room for payloads. So candidates are planned
whole, by the same passes, and simulated on the machine's rates; the least step time wins, then the earlier candidate.
The plan that the passes make by themselves is a candidate too: the search never makes a plan slower in the simulator.

    passes' own plan -> triples on the device -> chunk size -> triples again, with a share of the others streamed
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from chunkc.cost.rates import CostRates
from chunkc.cost.simulate import price
from chunkc.errors import BudgetError
from chunkc.ir.layout import Home
from chunkc.ir.plan import Plan
from chunkc.passes.os_placement import most_resident_triples
from chunkc.passes.support.budget import demand_of, with_homes
from chunkc.passes.support.draft import Draft, PlanOptions, decided

MAX_ACTIONS = 600_000
"""Simulated actions after which no more candidates are tried: what bounds the time of a search for a large model."""
NUM_SCALES = 5
"""Widths of a step from one count or share to another, each half of the one before, for counts at least 1."""
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

    options: PlanOptions
    text: str
    step_ms: float
    compute_ms: float
    outcome: str


@dataclass(slots=True)
class Search:
    """Candidates around ``options``, on the rates of one machine.

    Attributes:
        draft_with: the draft of the plan with other options; it raises `BudgetError` where that does not fit.
        plan_of: the plan that a draft describes.
        rates: of the machine.
        options: the caller's wishes; what they fix is not varied.
        tried: all candidates, in the order of trial.
    """

    draft_with: Callable[[PlanOptions], Draft]
    plan_of: Callable[[Draft], Plan]
    rates: CostRates
    options: PlanOptions
    tried: list[Candidate] = field(default_factory=list)
    _drafts: dict[PlanOptions, Draft] = field(default_factory=dict)
    _refused: set[PlanOptions] = field(default_factory=set)
    _num_actions: int = 0

    def run(self, first: Draft) -> Candidate:
        """The best candidate; ``first`` is the draft of ``options``."""
        self._drafts = {self.options: first, replace(self.options, chunk_numel=first.chunk_numel): first}
        best = self._price(self.options, "the passes' own choice")
        if best.compute_ms >= best.step_ms * (1 - MIN_GAIN):
            return best  # the step is computation, of which every plan of this schedule has as much
        best = self._vary_counts(self._place_triples(best), with_shares=False)
        sized = self._best_of(best, self._sizes(best, first))
        best = best if sized is best else self._place_triples(sized)
        return self._vary_counts(best, with_shares=True)

    def _sizes(self, best: Candidate, first: Draft) -> Iterable[PlanOptions]:
        """Yield options with chunk sizes, those nearest to the passes' own choice first.

        Of every octave of sizes the one that moves least is taken. As many bytes of triples stay on the device as with
        ``best``.
        """
        sizes, own = first.fitting_numels, decided(first.chunk_numel, "chunk_numel")
        if self.options.chunk_numel is not None or not sizes:
            return
        octaves: dict[int, int] = {}
        for numel in sizes:
            octaves.setdefault(round(math.log2(numel / own)), numel)
        for octave in sorted(octaves, key=lambda o: (abs(o), o)):
            numel = octaves[octave]
            triples = best.options.num_resident_triples
            triples = triples if self._is_placed() else triples * own // numel
            keeps = best.options.keeps_payloads and triples > 0
            yield replace(best.options, chunk_numel=numel, num_resident_triples=triples, keeps_payloads=keeps)

    def _place_triples(self, best: Candidate) -> Candidate:
        """Choose how many triples stand on the device, in chunks of the best size.

        The counts tried: as many as fit beside all payloads, more at the cost of payloads, as many as fit. Where one
        rank trains, all are tried with their payloads, then as many without.
        """
        draft = self._drafts[best.options]
        if not self._places(draft):
            return best
        beside, most, alone = _margins(draft)
        keeps = draft.target.world_size == 1
        numel = draft.chunk_numel  # kept: a pass would search for it again

        def with_(triples: int, *, keeps: bool) -> PlanOptions:
            keeps = keeps and triples > 0
            return replace(best.options, chunk_numel=numel, num_resident_triples=triples, keeps_payloads=keeps)

        counts = {best.options.num_resident_triples, beside, (beside + most) // 2, most}
        best = self._best_of(best, [with_(k, keeps=keeps) for k in sorted(counts)])
        again = {beside, best.options.num_resident_triples, alone}  # seven take as much as six with their payloads
        return self._best_of(best, [with_(k, keeps=False) for k in sorted(again)])

    def _vary_counts(self, best: Candidate, *, with_shares: bool) -> Candidate:
        """Vary the count of resident triples around ``best``.

        ``with_shares``: vary the share of streamed triples too, alone and against the count. A buffer that triples pass
        through takes the room of a triple that stays.

        Steps begin with half of the triples that fit and with the share that keeps host and link busy alike; they are
        halved where none of them gains (pattern search: Hooke and Jeeves, 1961).
        """
        draft = self._drafts[best.options]
        if not self._places(draft):
            return best
        most, numel = max(_margins(draft)), draft.chunk_numel
        count, share = max(1, most // 2), self._balanced_share() if with_shares else 0.0
        may_keep = draft.target.world_size == 1

        def around(options: PlanOptions) -> Iterable[PlanOptions]:
            return _around(replace(options, chunk_numel=numel), count, share, most, may_keep=may_keep)

        for _ in range(NUM_SCALES):
            while (found := self._best_of(best, around(best.options))) is not best:
                best = found
            count, share = max(1, count // 2), share / 2
        return best

    def _places(self, draft: Draft) -> bool:
        """Whether the search decides where optimizer states stand and are updated."""
        return draft.os_home is Home.HOST and not self._is_placed()

    def _is_placed(self) -> bool:
        """Whether the caller says where optimizer states stand and are updated."""
        return bool(self.options.num_resident_triples or self.options.streamed_share)

    def _balanced_share(self) -> float:
        """Return the share of streamed triples that keeps host and link busy alike.

        The share is B / (B + 12 U) (Deep Optimizer States, section 4), with the bytes of Adam's states. The copies of
        this share in the slower direction, of B bytes a second, take as long as the host's update of the rest, of U
        parameters a second.
        """
        rates, states = self.rates, self.options.state_spec
        copied, table = min(rates.h2d.gb_per_s, rates.d2h.gb_per_s), rates.cpu_update_gparam_per_s
        updated = max(rates.update_gparam_per_s(table, dtype, states) for dtype in table)
        return copied / (copied + states.nbytes_per_element * updated)

    def _best_of(self, best: Candidate, others: Iterable[PlanOptions]) -> Candidate:
        for options in others:
            if self._num_actions >= MAX_ACTIONS:
                break
            if options in self._drafts or options in self._refused:
                continue
            found = self._price(options)
            if found.step_ms < best.step_ms * (1 - MIN_GAIN):
                best = found
        return best

    def _price(self, options: PlanOptions, text: str = "") -> Candidate:
        text = text or _difference(options, self.options)
        try:
            draft = self._drafts.get(options) or self.draft_with(options)
        except BudgetError as error:
            self._refused.add(options)
            found = Candidate(options, text, math.inf, 0.0, f"{error.missing_nbytes} bytes missing")
        else:
            self._drafts[options], plan = draft, self.plan_of(draft)
            cost = price(plan, self.rates)
            self._num_actions += cost.num_actions
            text += ", their payloads too" if _keeps_payloads(draft) else ""
            found = Candidate(options, text, cost.step_ms, cost.compute_ms, f"bound by {cost.bound}")
        self.tried.append(found)
        return found


def _margins(draft: Draft) -> tuple[int, int, int]:
    """Count the triples that fit on the device in three cases.

    The cases: beside all payloads; beside the fewest places, with the triples' own payloads (where one rank trains);
    beside the fewest places.
    """
    layout = with_homes(decided(draft.layout, "layout"), Home.HOST)
    liveness, target = decided(draft.liveness, "liveness"), draft.target
    demand = demand_of(layout, liveness, draft.options.cuts)
    beside = most_resident_triples(layout, demand, liveness, target, sum(demand.units.num_groups))
    alone = most_resident_triples(layout, demand, liveness, target)
    if layout.world_size > 1:
        return beside, alone, alone
    return beside, most_resident_triples(layout, demand, liveness, target, keeps_payloads=True), alone


def _around(options: PlanOptions, count: int, share: float, most: int, *, may_keep: bool) -> Iterable[PlanOptions]:
    """Yield the options one step away from ``options``.

    The steps are ``count`` triples, ``share``, and both in opposite directions. With ``may_keep``, options of steps in
    opposite directions, and ``options`` themselves, also come with payloads kept where they are not and the other way
    round.
    """
    opposite = [(-count, share), (count, -share)]
    moves = [(options.keeps_payloads, [(count, 0.0), (-count, 0.0), (0, share), (0, -share), *opposite])]
    moves += [(not options.keeps_payloads, [(0, 0.0), *opposite])] if may_keep else []
    for keeps, steps in moves:
        for more_triples, more_share in steps:
            triples, streamed = options.num_resident_triples + more_triples, options.streamed_share + more_share
            if triples <= most:
                yield replace(
                    options,
                    num_resident_triples=max(0, triples),
                    keeps_payloads=keeps and triples > 0,
                    streamed_share=min(max(0.0, streamed), 1.0),
                )


def _keeps_payloads(draft: Draft) -> bool:
    """Whether payloads stay on the device although others move."""
    return draft.os_home is Home.HOST and any(c.home is Home.DEVICE for c in decided(draft.layout, "layout").chunks)


def _difference(options: PlanOptions, own: PlanOptions) -> str:
    """Describe how ``options`` differ from the caller's ``own``."""
    parts = []
    if options.chunk_numel != own.chunk_numel:
        parts.append(f"chunks of {options.chunk_numel} elements")
    if options.num_resident_triples != own.num_resident_triples:
        parts.append(f"{options.num_resident_triples} optimizer states resident")
    if options.streamed_share != own.streamed_share:
        parts.append(f"{options.streamed_share:.0%} streamed")
    return ", ".join(parts)
