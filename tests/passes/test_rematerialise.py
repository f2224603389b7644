"""The choice of an activation budget: what is tried, what wins, and when trying stops."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from costs import RATES, UNIT_NBYTES
from schedules import chain, target

from chunkc.cost.simulate import price
from chunkc.errors import BudgetError
from chunkc.files import KeptDocuments
from chunkc.ir.plan import MovedValue
from chunkc.ir.schedule import Schedule
from chunkc.ir.tiers import Tier
from chunkc.passes import Planned, PlanOptions, make_fastest_plan, rematerialise
from chunkc.passes.rematerialise import (
    KEEP_ALL,
    RECOMPUTE_ALL,
    BudgetChoice,
    KeptFirst,
    Priced,
    choose_among,
    choose_budget,
)
from chunkc.passes.search import MIN_GAIN

NUMEL = 4096
LAYERS = 8
ENDS = (RECOMPUTE_ALL, KEEP_ALL)
CHUNK_NBYTES = NUMEL * 4
ROOM_NBYTES = 5 * CHUNK_NBYTES


def schedule_with(budget: float, kept_nbytes: int, extra_units: float) -> Schedule:
    """Layers that take 1 ms. The budget's share of ``kept_nbytes`` of activations stays, or 15 %; what goes makes
    backward longer, by ``extra_units`` milliseconds for all of it."""
    found = chain(LAYERS, numel=NUMEL, live=int(kept_nbytes * max(budget, 0.15)))
    again = int(UNIT_NBYTES * extra_units * (1 - budget) / LAYERS)
    forward = [replace(o, nbytes=UNIT_NBYTES) for o in found.forward.operators]
    backward = [replace(o, nbytes=UNIT_NBYTES + again) for o in found.backward.operators]
    return replace(
        found,
        forward=replace(found.forward, operators=tuple(forward)),
        backward=replace(found.backward, operators=tuple(backward)),
    )


def plan_of(schedule: Schedule) -> Planned:
    return make_fastest_plan(schedule, replace(target(ROOM_NBYTES), rates=RATES))


def unpriced_plan_of(schedule: Schedule) -> Planned:
    return replace(plan_of(schedule), price=None)


def choose(kept_nbytes: int, extra_units: float) -> tuple[float, list[float], list[float]]:
    choice = choose_budget(lambda b: schedule_with(b, kept_nbytes, extra_units), plan_of, RATES)
    return choice.budget, [c.budget for c in choice.candidates], [c.step_ms for c in choice.candidates]


@pytest.mark.long
def test_activations_that_push_payloads_out_are_computed_again_where_that_is_cheap() -> None:
    budget, tried, step_ms = choose(4 * CHUNK_NBYTES, extra_units=1)
    assert budget < KEEP_ALL
    assert step_ms[tried.index(budget)] == min(step_ms) < step_ms[0]


@pytest.mark.long
def test_they_are_kept_where_computing_again_takes_longer_than_copying() -> None:
    budget, tried, step_ms = choose(CHUNK_NBYTES, extra_units=10_000)
    assert budget == KEEP_ALL and tried[:4] == [KEEP_ALL, RECOMPUTE_ALL, 0.5, 0.75]
    assert step_ms[0] == min(step_ms)


@pytest.mark.long
def test_of_steps_that_are_as_long_the_one_that_moves_least_is_taken() -> None:
    moved = MovedValue(index=0, nbytes=1, made_by=0, used_until=0, read_by=(0, 0))

    def choose_where(moving: Sequence[float]) -> float:
        schedules = {budget: schedule_with(budget, 400, extra_units=0) for budget in (0.0, 0.25, 0.5, 0.75, 1.0)}
        moves = {schedules[budget].digest() for budget in moving}

        def plan_with(schedule: Schedule) -> Planned:
            planned = plan_of(schedule)
            return replace(planned, plan=replace(planned.plan, moves=(moved,) if schedule.digest() in moves else ()))

        return choose_budget(lambda b: schedules[b], plan_with, RATES).budget

    assert choose_where([]) == KEEP_ALL
    assert choose_where([KEEP_ALL]) == 0.75
    assert choose_where([KEEP_ALL, 0.75, 0.25]) == 0.5
    assert choose_where([*rematerialise.BUDGETS, KEEP_ALL]) == KEEP_ALL


@pytest.mark.long
def test_a_model_that_fits_with_recomputation_only_is_planned_with_it() -> None:
    budget, _, step_ms = choose(6 * CHUNK_NBYTES, extra_units=1)
    assert math.isinf(step_ms[0])
    assert budget < KEEP_ALL and math.isfinite(min(step_ms))


def test_where_nothing_fits_the_choice_needs_least_device_memory() -> None:
    budget, tried, step_ms = choose(100 * CHUNK_NBYTES, extra_units=1)
    assert budget == RECOMPUTE_ALL and tried == [KEEP_ALL, RECOMPUTE_ALL]
    assert all(math.isinf(ms) for ms in step_ms)


def test_where_host_memory_misses_everything_is_kept() -> None:
    small = target(ROOM_NBYTES, host=CHUNK_NBYTES)
    choice = choose_budget(
        lambda b: schedule_with(b, CHUNK_NBYTES, 1), lambda schedule: make_fastest_plan(schedule, small), None
    )
    assert choice.budget == KEEP_ALL and not any(c.fits for c in choice.candidates)


def test_where_the_host_is_too_small_that_is_said_and_no_lack_of_device_memory() -> None:
    """Kept activations miss device memory too, but with more of it the host would still be too small."""

    def plan_with(schedule: Schedule) -> Planned:
        return make_fastest_plan(schedule, replace(target(ROOM_NBYTES, CHUNK_NBYTES), rates=RATES))

    choice = choose_budget(lambda b: schedule_with(b, 6 * CHUNK_NBYTES, 1), plan_with, RATES)
    kept, again = choice.candidates
    assert kept.least_nbytes > ROOM_NBYTES and again.least_nbytes == 0
    assert choice.budget == RECOMPUTE_ALL and not (kept.fits or again.fits)


@pytest.mark.parametrize(("again_gib", "wanted"), [(40, RECOMPUTE_ALL), (95, KEEP_ALL), (120, KEEP_ALL)])
def test_where_the_host_alone_is_too_small_the_least_of_it_is_needed(again_gib: int, wanted: float) -> None:
    """Values that move, which need it too, are computed again where that saves a tenth of it."""
    needed_gib = iter((100, again_gib))

    def plan_with(_: Schedule) -> Planned:
        host_nbytes = next(needed_gib) << 30
        facts = {"missing_nbytes": 1, "min_device_nbytes": 1, "min_host_nbytes": host_nbytes}
        raise BudgetError("too small", moment=Tier.HOST, tensors=(), **facts)

    choice = choose_budget(lambda b: schedule_with(b, CHUNK_NBYTES, 1), plan_with, RATES)
    assert choice.budget == wanted and not any(c.fits for c in choice.candidates)


@pytest.mark.parametrize(("kept_chunks", "wanted"), [(4, 1.0), (5, 0.75), (6, 0.5), (12, 0.25), (20, 0.0)])
def test_without_rates_as_much_is_kept_as_fits(kept_chunks: int, wanted: float) -> None:
    choice = choose_budget(lambda b: schedule_with(b, kept_chunks * CHUNK_NBYTES, 1), plan_without_rates, None)
    assert choice.budget == wanted
    assert [c.fits for c in choice.candidates] == [False] * (len(choice.candidates) - 1) + [True]


def plan_without_rates(schedule: Schedule) -> Planned:
    return make_fastest_plan(schedule, target(ROOM_NBYTES))


@pytest.mark.parametrize(("kept_chunks", "wanted"), [(4, 1.0), (5, 0.5), (12, 0.0), (20, 0.0), (100, 0.0)])
def test_of_large_graphs_few_budgets_are_tried(
    kept_chunks: int, wanted: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rematerialise, "MANY_OPERATORS", LAYERS)
    choice = choose_budget(lambda b: schedule_with(b, kept_chunks * CHUNK_NBYTES, 1), plan_without_rates, None)
    assert choice.budget == wanted and len(choice.candidates) <= 3
    assert len({c.budget for c in choice.candidates}) == len(choice.candidates)


def test_a_step_that_is_computation_alone_is_left_as_it_is() -> None:
    slow = replace(RATES, device_memory_gb_per_s=RATES.device_memory_gb_per_s / 10_000)
    choice = choose_budget(lambda b: schedule_with(b, CHUNK_NBYTES, 1), unpriced_plan_of, slow)
    assert [c.budget for c in choice.candidates] == [KEEP_ALL]


@pytest.mark.long
def test_a_plan_that_settles_the_choice_is_made_in_one_run_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as the schedule, the target, the options and the code stay the same."""
    monkeypatch.delenv("CHUNKC_CACHE", raising=False)
    slow = replace(RATES, device_memory_gb_per_s=RATES.device_memory_gb_per_s / 10_000)
    code, made = tmp_path / "code.py", list[Schedule]()
    code.write_text("")
    wanted = KeptFirst(KeptDocuments(tmp_path), replace(target(ROOM_NBYTES), rates=slow), PlanOptions(), code)

    def plan_with(schedule: Schedule) -> Planned:
        made.append(schedule)
        return unpriced_plan_of(schedule)

    def choose_with(kept: KeptFirst, kept_nbytes: int = CHUNK_NBYTES) -> BudgetChoice:
        return choose_budget(lambda b: schedule_with(b, kept_nbytes, 1), plan_with, slow, kept=kept)

    first, second = choose_with(wanted), choose_with(wanted)
    assert first == second and first.note == second.note and len(made) == 1
    choose_with(replace(wanted, options=PlanOptions(accumulate=2)))
    choose_with(replace(wanted, target=target(ROOM_NBYTES)))
    choose_with(wanted, kept_nbytes=2 * CHUNK_NBYTES)
    code.write_text("# another version")
    choose_with(wanted)
    assert len(made) == 5


def test_budgets_of_one_schedule_are_planned_once() -> None:
    schedule, made = schedule_with(KEEP_ALL, 100 * CHUNK_NBYTES, 1), list[Schedule]()

    def plan_with(given: Schedule) -> Planned:
        made.append(given)
        return plan_of(given)

    choice = choose_budget(lambda _: schedule, plan_with, None)
    assert [c.budget for c in choice.candidates] == [KEEP_ALL, *rematerialise.BUDGETS]
    assert len({c.outcome for c in choice.candidates}) == len(made) == 1


@pytest.mark.long
def test_what_was_priced_before_is_not_planned_again() -> None:
    """A first look at the ends leaves its prices to the choice; where the least of memory misses, it ends there."""
    made, priced = list[Schedule](), Priced()

    def schedule(budget: float) -> Schedule:
        return schedule_with(budget, 4 * CHUNK_NBYTES, 1)

    def plan_with(given: Schedule) -> Planned:
        made.append(given)
        return plan_of(given)

    look = choose_among(ENDS, schedule, plan_with, RATES, priced)
    assert [c.budget for c in look.candidates] == [RECOMPUTE_ALL, KEEP_ALL] and len(made) == 2
    again = choose_budget(schedule, plan_with, RATES, priced=priced)
    assert again == choose_budget(schedule, plan_of, RATES) and set(look.candidates) < set(again.candidates)
    assert len(made) == len({s.digest() for s in made})
    too_much = choose_among(ENDS, lambda b: schedule_with(b, 100 * CHUNK_NBYTES, 1), plan_with, RATES, Priced())
    assert [c.budget for c in too_much.candidates] == list(ENDS) and not too_much.best.fits
    small = target(ROOM_NBYTES, host=CHUNK_NBYTES)
    no_host = choose_among(ENDS, schedule, lambda given: make_fastest_plan(given, small), RATES, Priced())
    assert [c.budget for c in no_host.candidates] == [RECOMPUTE_ALL] and not no_host.best.fits


def test_a_search_says_what_its_plan_costs() -> None:
    planned = plan_of(schedule_with(KEEP_ALL, 4 * CHUNK_NBYTES, 1))
    assert planned.price is not None and planned.price == price(planned.plan, RATES)


@pytest.mark.long
def test_a_choice_among_several_is_made_each_time(tmp_path: Path) -> None:
    kept = KeptFirst(KeptDocuments(tmp_path / "kept"), target(ROOM_NBYTES), PlanOptions(), Path(__file__))
    choice = choose_budget(lambda b: schedule_with(b, 4 * CHUNK_NBYTES, 1), plan_of, RATES, kept=kept)
    assert len(choice.candidates) > 1 and not (tmp_path / "kept").exists()


@pytest.mark.long(but="100")
@pytest.mark.parametrize("kept_chunks", [3, 100])
def test_the_note_has_every_candidate(kept_chunks: int) -> None:
    choice = choose_budget(lambda b: schedule_with(b, kept_chunks * CHUNK_NBYTES, 1), plan_of, RATES)
    assert choice.note.startswith(f"{choice.budget:g} of the layers keep")
    assert all(f"{c.budget:g}: " in choice.note for c in choice.candidates)


@pytest.mark.long
@pytest.mark.parametrize(("kept_chunks", "extra_units"), [(4, 4), (12, 40)])
def test_the_choice_is_as_fast_as_the_best_of_a_fine_grid(kept_chunks: int, extra_units: float) -> None:
    """And never slower than either end."""

    def step_ms(budget: float) -> float:
        try:
            planned = plan_of(schedule_with(budget, kept_chunks * CHUNK_NBYTES, extra_units))
            return price(planned.plan, RATES).step_ms
        except BudgetError:
            return math.inf

    grid = [step_ms(i / 16) for i in range(17)]
    chosen_ms = step_ms(choose(kept_chunks * CHUNK_NBYTES, extra_units)[0])
    assert chosen_ms <= 1.01 * min(grid)
    assert chosen_ms <= min(grid[0], grid[-1]) * (1 + MIN_GAIN)


@pytest.mark.long
def test_only_the_best_budget_so_far_is_kept() -> None:
    """So that what is chosen is not partitioned again, and no more than two pairs of graphs are alive."""
    kept = set[float]()

    def made(budget: float) -> Schedule:
        kept.add(budget)
        assert len(kept) <= 2
        return schedule_with(budget, 6 * CHUNK_NBYTES, 1)

    choice = choose_budget(made, plan_of, RATES, forget=kept.discard)
    assert len(choice.candidates) > 2 and choice.budget < KEEP_ALL
    assert kept == {choice.budget}


@pytest.mark.long
def test_beside_a_second_budget_that_is_nearly_as_fast_others_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps have more than one dip where moved values take over from computed ones."""
    known_ms = {0.0: 3867, 0.5: 3451, 0.5625: 3420, 0.625: 3369, 0.6875: 3440, 0.75: 3518, 1.0: 3439}

    def tried(slower_below_1_ms: float) -> BudgetChoice:
        budgets = list[float]()

        def schedule(budget: float) -> Schedule:
            budgets.append(budget)
            return schedule_with(budget, CHUNK_NBYTES, 10_000)

        def priced(*_: object) -> SimpleNamespace:
            step_ms = known_ms.get(budgets[-1], 3560) + slower_below_1_ms * (budgets[-1] < KEEP_ALL)
            return SimpleNamespace(step_ms=step_ms, compute_ms=3150 + 500 * (1 - budgets[-1]), bound="compute")

        monkeypatch.setattr(rematerialise, "price", priced)
        return choose_budget(schedule, unpriced_plan_of, RATES)

    near, far = tried(0), tried(100)
    assert near.budget == 0.625 and len(near.candidates) <= 10
    assert far.budget == KEEP_ALL and min(c.budget for c in far.candidates if c.budget > 0.5) >= 0.75


@pytest.mark.long
def test_jagged_steps_are_not_followed_into_every_dip(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets = list[float]()

    def schedule(budget: float) -> Schedule:
        budgets.append(budget)
        return schedule_with(budget, CHUNK_NBYTES, 10_000)

    def priced(*_: object) -> SimpleNamespace:
        noise_ms = round(budgets[-1] * 128) * 7919 % 17
        return SimpleNamespace(step_ms=3400 + noise_ms, compute_ms=2500 + 500 * (1 - budgets[-1]), bound="compute")

    monkeypatch.setattr(rematerialise, "price", priced)
    choice = choose_budget(schedule, unpriced_plan_of, RATES)
    assert 5 <= len(choice.candidates) <= 12
