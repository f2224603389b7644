"""The search: options that no rule decides are decided by simulated time.

Larger chunks copy faster, smaller ones overlap better; states in device memory save an update on the host and cost
room for payloads. So candidates are planned whole, by the same passes, and simulated on the machine's rates; the least
step time wins, then the earlier candidate. The plan that the passes make by themselves is a candidate too.

    passes' own plan -> second homes, where updates are held -> states of half of the chunks that they fit for, where
       few plans can be tried
    -> saved values moved -> states on the device -> chunk size
    -> second homes again -> states again, with a share of the others streamed -> second homes again, and once more as
       many as fit where the search ended before it came so far
    -> where everything is resident and ranks exchange: more segments, each of a few chunk sizes
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from chunkc.cost.rates import CostRates
from chunkc.cost.simulate import Price, price
from chunkc.errors import BudgetError
from chunkc.ir.actions import Stream
from chunkc.ir.plan import Plan
from chunkc.ir.schedule import FLOAT_DTYPES
from chunkc.ir.tiers import Tier
from chunkc.passes.os_placement import most_resident_states
from chunkc.passes.support.budget import demand_of, most_within, with_homes
from chunkc.passes.support.draft import Draft, PlanOptions, decided
from chunkc.passes.support.moved_values import movable_layers
from chunkc.passes.support.second_homes import candidates
from chunkc.passes.support.variations import difference, options_around
from chunkc.progress import stage

MAX_ACTIONS = 600_000
"""Simulated actions after which no more candidates are tried, which bounds the time of a search for a large model.

A candidate that gives a plan for the second time takes the time of the passes alone, and counts for nothing."""
SCREENING_ACTIONS = 60_000
"""As many where schedules are compared, of which one is then searched in full."""
NUM_SCALES = 5
"""Widths of a step from one count or share to another, each half of the one before, for counts at least 1."""
SHARES = (1.0, 0.5, 0.25)
"""Of layers whose saved values move, tried before states, since they decide how much room those have."""
EXCHANGES = (16, 32)
"""Segments of a resident plan's graph between which ranks exchange, tried while each is `WORTH_SEGMENTS`."""
WORTH_SEGMENTS = 0.01
"""Share of the step time for which twice the segments are compiled."""
MIN_GAIN = 0.002
"""Share of the step time that a candidate must gain: less is below what the simulator can tell apart."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One plan that was considered; ``text``: what was varied, ``outcome``: what bounds it or it lacks.

    ``step_ms``: simulated; infinity where it does not fit. ``compute_ms``: the compute stream's actions alone.
    ``updates_ms``: of the step, what it waits for updates on the host.
    """

    options: PlanOptions
    text: str
    step_ms: float
    compute_ms: float
    outcome: str
    updates_ms: float = 0.0


@dataclass(slots=True)
class Search:
    """Candidates around ``options``, the caller's wishes, on the rates of one machine.

    ``draft_with``: the draft of the plan with other options; it raises `BudgetError` where that does not fit.
    ``plan_of``: the plan that a draft describes. ``max_actions``: simulated actions after which no more are tried.
    ``tried``: all candidates, in the order of trial, but for those that give the plan of an earlier one.
    """

    draft_with: Callable[[PlanOptions], Draft]
    plan_of: Callable[[Draft], Plan]
    rates: CostRates
    options: PlanOptions
    max_actions: int = MAX_ACTIONS
    tried: list[Candidate] = field(default_factory=list)
    _drafts: dict[PlanOptions, Draft] = field(default_factory=dict)
    _refused: set[PlanOptions] = field(default_factory=set)
    _num_actions: int = 0
    _prices: dict[int, Price] = field(default_factory=dict)  # by hashes of what is priced

    def run(self, first: Draft) -> Candidate:
        """The best candidate; ``first`` is the draft of ``options``."""
        self._drafts = {self.options: first, replace(self.options, chunk_numel=first.chunk_numel): first}
        best = self._price(self.options, "the passes' own choice")
        if best.compute_ms >= best.step_ms * (1 - MIN_GAIN):
            return best  # the step is computation, of which every plan of this schedule has as much
        best = self._fill_second_homes(best)
        best = self._place_first_states(best)
        best = self._move_saved(best, SHARES)
        best = self._vary_counts(self._place_states(best), with_shares=False)
        sized = self._best_of(best, self._sizes(best, first))
        best = best if sized is best else self._place_states(sized)
        best = self._divide_exchanges(best, first)
        best = self._vary_counts(self._place_second_homes(best), with_shares=True)
        best = self._place_second_homes(best)
        best = self._move_saved(best, ())
        return self._refill_second_homes(best)

    def _move_saved(self, best: Candidate, shares: Sequence[float]) -> Candidate:
        """Choose for which share of layers saved values go to the host, where something moves as it is.

        Tried are ``shares``, or, without them, numbers of layers around the best.
        """
        draft = self._drafts[best.options]
        num_layers = len(movable_layers(draft.schedule))
        is_decided = self.options.activations != "auto" or bool(self.options.fixed_moves)
        if is_decided or draft.is_resident or not num_layers:
            return best
        numel = draft.chunk_numel  # kept: a pass would search for it again

        def moving(share: float) -> PlanOptions:
            return replace(best.options, chunk_numel=numel, moved_share=min(max(0.0, share), 1.0))

        if shares:
            moved = self._best_of(best, map(moving, shares))
        else:
            moved = self._vary_moved(best, moving, num_layers)
        if moved is best:
            return best
        return self._best_of(moved, [replace(moved.options, chunk_numel=self.options.chunk_numel)])

    def _vary_moved(self, best: Candidate, moving: Callable[[float], PlanOptions], num_layers: int) -> Candidate:
        """Vary the number of layers that move what they save, by an eighth of them and halves of that.

        ``moving`` gives the options of a share.
        """
        step = max(1, num_layers // 8)
        while step:
            num = round(best.options.moved_share * num_layers)
            closer = self._best_of(best, (moving(n / num_layers) for n in (num - step, num + step)))
            if closer is best:
                step = step // 2 if best.options.moved_share else 0
            best = closer
        return best

    def _sizes(self, best: Candidate, first: Draft) -> Iterable[PlanOptions]:
        """Of every octave of chunk sizes the one that moves least, with as many bytes of states."""
        sizes, chosen = first.fitting_numels, decided(first.chunk_numel, "chunk_numel")
        if self.options.chunk_numel is not None or not sizes:
            return
        octaves: dict[int, int] = {}
        for numel in sizes:
            octaves.setdefault(round(math.log2(numel / chosen)), numel)
        for octave in sorted(octaves, key=lambda o: (abs(o), o)):
            numel = octaves[octave]
            num_states, num_homes = best.options.num_resident_states, best.options.num_second_homes
            num_states = num_states if self._is_placed() else num_states * chosen // numel
            num_homes = num_homes if self.options.num_second_homes else math.ceil(num_homes * chosen / numel)
            keeps = best.options.keeps_payloads and num_states > 0
            sized = replace(best.options, chunk_numel=numel, num_second_homes=num_homes)
            yield replace(sized, num_resident_states=num_states, keeps_payloads=keeps)

    def _divide_exchanges(self, best: Candidate, first: Draft) -> Candidate:
        """Choose how many segments a resident plan over several ranks has, of one chunk size or another."""
        draft = self._drafts[best.options]
        if not draft.is_resident or draft.target.world_size == 1:
            return best
        for num in EXCHANGES:
            others = (replace(o, num_exchanges=num) for o in (best.options, *self._sizes(best, first)))
            finer = self._best_of(best, others, WORTH_SEGMENTS)
            if finer is best:
                break
            best = finer
        return best

    def _place_states(self, best: Candidate) -> Candidate:
        """Choose for how many chunks, of the best size, states stand on the device.

        Tried are as many as fit beside all payloads, more at the cost of payloads, and as many as fit. Where one rank
        trains, all are tried with their payloads, then as many without.
        """
        draft = self._drafts[best.options]
        if not self._decides_homes(draft):
            return best
        without_cost, most, alone = _margins(draft)
        keeps = draft.target.world_size == 1
        numel = draft.chunk_numel  # kept: a pass would search for it again

        def with_(num_states: int, *, keeps: bool) -> PlanOptions:
            keeps = keeps and num_states > 0
            return replace(best.options, chunk_numel=numel, num_resident_states=num_states, keeps_payloads=keeps)

        counts = {best.options.num_resident_states, without_cost, (without_cost + most) // 2, most}
        best = self._best_of(best, [with_(k, keeps=keeps) for k in sorted(counts)])
        again = {without_cost, best.options.num_resident_states, alone}
        return self._best_of(best, [with_(k, keeps=False) for k in sorted(again)])

    def _place_first_states(self, best: Candidate) -> Candidate:
        """Try one number of states where updates are waited for and few plans can be tried.

        Shares of moved values would take them all. For GPT-3 on 32 A100 these gained nothing, and states a tenth.
        """
        draft = self._drafts[best.options]
        waits = best.updates_ms >= best.step_ms * MIN_GAIN
        is_short = self._num_actions + len(SHARES) * self.price_of(best).num_actions > self.max_actions
        if not (is_short and waits and self._decides_homes(draft)):
            return best
        num_states, keeps = sum(_margins(draft)[:2]) // 2, draft.target.world_size == 1
        placed = replace(best.options, num_resident_states=num_states, keeps_payloads=keeps)
        return self._if_faster(best, replace(placed, chunk_numel=draft.chunk_numel)) if num_states else best

    def _fill_second_homes(self, best: Candidate) -> Candidate:
        """Choose between no second homes and all that host memory has room for, as the start for all else."""
        if not self._decides_second_homes(best):
            return best
        numel, most = self._drafts[best.options].chunk_numel, self._most_homes(best)
        if not most:
            return best
        return self._if_faster(best, replace(best.options, chunk_numel=numel, num_second_homes=most))

    def _refill_second_homes(self, best: Candidate) -> Candidate:
        """Fill host memory once where the search ended before numbers of homes were varied again.

        A choice behind the first numbers, of states or of a share that is streamed, may have left room on the host.
        """
        if self._num_actions < self.max_actions or not best.options.num_second_homes:
            return best
        if not self._decides_second_homes(best) or (most := self._most_homes(best)) <= best.options.num_second_homes:
            return best
        numel = self._drafts[best.options].chunk_numel
        return self._if_faster(best, replace(best.options, chunk_numel=numel, num_second_homes=most))

    def _place_second_homes(self, best: Candidate) -> Candidate:
        """Choose how many chunks have second homes: those of the best, and numbers around them."""
        if not self._decides_second_homes(best):
            return best
        most, numel = self._most_homes(best), self._drafts[best.options].chunk_numel

        def around(num: int, step: int) -> Iterable[PlanOptions]:
            for more in (step, -step):
                yield replace(best.options, chunk_numel=numel, num_second_homes=min(max(0, num + more), most))

        step = max(1, most // 2)
        for _ in range(NUM_SCALES):
            while (better := self._best_of(best, around(best.options.num_second_homes, step))) is not best:
                best = better
            step = max(1, step // 2)
        return best

    def _decides_second_homes(self, best: Candidate) -> bool:
        """Whether updates are held until backward has ended, and the search decides which begin before."""
        draft = self._drafts[best.options]
        is_held = draft.options.tracks_grad_norm or draft.target.runs_inline
        return is_held and not draft.is_resident and not self.options.num_second_homes

    def _most_homes(self, best: Candidate) -> int:
        """The second homes that host memory has room for."""
        draft = self._drafts[best.options]
        layout = decided(draft.layout, "layout")
        chunks = candidates(layout, decided(draft.liveness, "liveness"), best.options.streamed_share)
        alone_nbytes = layout.nbytes_in(Tier.HOST) - layout.second_home_nbytes(Tier.HOST)
        left_nbytes = draft.target.budget_nbytes(Tier.HOST) - alone_nbytes
        return most_within(tuple(accumulate(map(layout.second_home_nbytes_of, chunks), initial=0)), left_nbytes)

    def _vary_counts(self, best: Candidate, *, with_shares: bool) -> Candidate:
        """Vary the count of resident states around ``best`` (pattern search: Hooke and Jeeves, 1961).

        ``with_shares``: vary the share of streamed states too, alone and against the count, where the step waits for
        updates on the host. Steps begin with half of the states that fit and with the share that keeps host and link
        busy alike; they are halved where none gains.
        """
        draft = self._drafts[best.options]
        if not self._decides_homes(draft):
            return best
        most, numel = max(_margins(draft)), draft.chunk_numel
        waits = best.updates_ms >= best.step_ms * MIN_GAIN
        count, share = max(1, most // 2), self.balanced_share() if with_shares and waits else 0.0
        may_keep = draft.target.world_size == 1

        def around(options: PlanOptions) -> Iterable[PlanOptions]:
            return options_around(replace(options, chunk_numel=numel), count, share, most, may_keep=may_keep)

        for _ in range(NUM_SCALES):
            while (better := self._best_of(best, around(best.options))) is not best:
                best = better
            count, share = max(1, count // 2), share / 2
        return best

    def _decides_homes(self, draft: Draft) -> bool:
        """Whether the search decides where optimizer states stand and are updated."""
        return not draft.is_resident and not self._is_placed()

    def _is_placed(self) -> bool:
        """Whether the caller says where optimizer states stand and are updated."""
        return bool(self.options.num_resident_states or self.options.streamed_share)

    def balanced_share(self) -> float:
        """The share of streamed states that keeps host and link busy alike.

        It is B / (B + 12 U) (Deep Optimizer States, section 4; 12 bytes are Adam's states) where the slower direction
        copies B bytes a second and the host updates U parameters a second.
        """
        rates, states = self.rates, self.options.state_spec
        copied, table = min(law.gb_per_s for law in rates.copies.values()), rates.cpu_update_gparam_per_s
        updated = max(rates.update_gparam_per_s(table, dtype, states) for dtype in table if dtype in FLOAT_DTYPES)
        return copied / (copied + states.nbytes_per_element * updated)

    def _best_of(self, best: Candidate, others: Iterable[PlanOptions], min_gain: float = MIN_GAIN) -> Candidate:
        """The fastest of ``best`` and those of ``others`` that gain so much on it."""
        bar_ms = best.step_ms * (1 - min_gain)
        for options in others:
            if self._num_actions >= self.max_actions:
                break
            if options in self._drafts or options in self._refused:
                continue
            candidate = self._price(options)
            if candidate.step_ms < min(bar_ms, best.step_ms * (1 - MIN_GAIN)):
                best = candidate
        return best

    def _if_faster(self, best: Candidate, options: PlanOptions) -> Candidate:
        """That of ``options`` if it gains enough; it is tried in any case."""
        found = self._price(options)
        return found if found.step_ms < best.step_ms * (1 - MIN_GAIN) else best

    def _price(self, options: PlanOptions, text: str = "") -> Candidate:
        text = text or difference(options, self.options)
        stage(f"planning, candidate {len(self.tried) + 1}")
        try:
            draft = self._drafts.get(options) or self.draft_with(options)
        except BudgetError as error:
            self._refused.add(options)
            candidate = Candidate(options, text, math.inf, 0.0, f"{error.missing_nbytes} bytes missing")
            self.tried.append(candidate)
            return candidate
        self._drafts[options] = draft
        cost, is_new = self._price_of(draft)
        text += ", their payloads too" if _keeps_payloads(draft) else ""
        updates_ms = cost.critical_ms.get(str(Stream.CPU), 0.0)
        candidate = Candidate(options, text, cost.step_ms, cost.compute_ms, f"bound by {cost.bound}", updates_ms)
        if is_new:
            self.tried.append(candidate)
        return candidate

    def price_of(self, candidate: Candidate) -> Price:
        """The price of a candidate that was planned."""
        return self._price_of(self._drafts[candidate.options])[0]

    def _price_of(self, draft: Draft) -> tuple[Price, bool]:
        """The price of a plan, and whether it was simulated: options that differ may give one plan."""
        plan = self.plan_of(draft)
        key = hash((plan.layout, plan.segments, plan.programs, plan.moves))
        is_new = key not in self._prices
        if is_new:
            self._prices[key] = price(plan, self.rates)
            self._num_actions += self._prices[key].num_actions
        return self._prices[key], is_new


def _margins(draft: Draft) -> tuple[int, int, int]:
    """Chunks whose states fit beside all payloads, beside the least slot ranges (and payloads), alone."""
    layout = with_homes(decided(draft.layout, "layout"), Tier.HOST)
    liveness, target = decided(draft.liveness, "liveness"), draft.target
    demand = demand_of(layout, liveness, draft.options.cuts)
    without_cost = most_resident_states(layout, demand, liveness, target, sum(demand.blocks.num_groups))
    alone = most_resident_states(layout, demand, liveness, target)
    if layout.world_size > 1:
        return without_cost, alone, alone
    return without_cost, most_resident_states(layout, demand, liveness, target, keeps_payloads=True), alone


def _keeps_payloads(draft: Draft) -> bool:
    """Whether payloads stay on the device although others move."""
    return not draft.is_resident and any(c.is_resident for c in decided(draft.layout, "layout").chunks)
