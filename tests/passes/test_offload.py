"""Saved values that move: what is chosen, when it goes and comes, and that plans keep their budgets."""

from contextlib import suppress
from dataclasses import replace
from itertools import pairwise, product
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedules import layered, planned, planned_somewhere, target

from chunkc.cost.rates import CostRates, cost_rates
from chunkc.cost.simulate import simulate_with
from chunkc.errors import BudgetError
from chunkc.hardware import Hardware
from chunkc.ir.actions import Op
from chunkc.ir.plan import Plan
from chunkc.ir.schedule import Schedule
from chunkc.ir.tiers import Tier
from chunkc.ir.verify import verify
from chunkc.passes import PIPELINE, Draft, PlanOptions, Target, make_fastest_plan, make_fitting_plan, make_plan
from chunkc.passes.pipeline import MOVED_SHARES
from chunkc.passes.search import MIN_GAIN
from chunkc.passes.support.moved_values import choose_moves, movable, movable_layers, piece_starts


def away_by_replay(plan: Plan) -> dict[str, int]:
    """Bytes of moved values that are not on the device, by segment, as the actions say."""
    sizes, away, found = {v.target: v.nbytes for v in plan.moves}, 0, {}
    for program in plan.iteration():
        for action in program.actions:
            if action.op is Op.DISCARD:
                away += sizes[action.target]
            elif action.op is Op.ALLOCATE:
                away -= sizes[action.target]
            elif action.op is Op.RUN:
                found[action.target] = away
    return found


LAYERS = [[4096, 1024, 2048] for _ in range(8)]


def test_without_a_wish_nothing_moves() -> None:
    assert choose_moves(layered(LAYERS), PlanOptions()) == ()
    assert planned(layered(LAYERS), target()).plan.moves == ()


def test_pieces_are_layers_or_parts_of_equal_bytes() -> None:
    assert piece_starts(layered(LAYERS)) == [0, 3, 6, 9, 12, 15, 18, 21]
    assert piece_starts(layered(LAYERS, named=False)) == [0, 3, 6, 9, 12, 15, 18, 21]
    uneven = layered([[10_000], [1, 1, 1], [10_000]], named=False)
    assert piece_starts(uneven)[0] == 0 and len(piece_starts(uneven)) >= 2


def test_a_value_belongs_to_the_piece_that_uses_it_last_and_small_ones_stay() -> None:
    pieces = movable(layered([[4096, 1], [4096, 2048], [4096, 2048]]))
    assert {piece: [v.index for v in values] for piece, values in pieces.items()} == {1: [0, 3], 2: [2, 4, 5]}


def test_what_others_hold_stays() -> None:
    schedule = layered(LAYERS)
    held = tuple(replace(op, used_until=None) if i == 4 else op for i, op in enumerate(schedule.forward.operators))
    schedule = replace(schedule, forward=replace(schedule.forward, operators=held))
    moves = choose_moves(schedule, PlanOptions(moved_share=1.0))
    assert moves and all(move.value.index != 4 for move in moves)


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_values_go_one_piece_later_and_come_one_piece_earlier(share: float) -> None:
    schedule = layered(LAYERS)
    moves = choose_moves(schedule, PlanOptions(moved_share=share))
    groups = sorted({(m.offload_at, m.discard_at, m.allocate_at) for m in moves})
    assert len(groups) == round(share * 6)
    for (offload, discard, allocate), following in pairwise(groups):
        assert offload < discard == following[0]
        own = [m.value for m in moves if m.offload_at == offload]
        ahead = [m.value for m in moves if m.offload_at == following[0]]
        assert allocate == min(v.read_by[0] for v in ahead) < min(v.read_by[0] for v in own)
    last = groups[-1]
    assert last[0] < last[1] <= len(schedule.forward.operators) and last[2] > 0


def test_moving_takes_less_of_the_device_and_more_of_the_host() -> None:
    schedule = layered(LAYERS)
    kept, moved = (planned(schedule, target(), PlanOptions(moved_share=s)).plan for s in (0.0, 1.0))
    saved_nbytes = sum(v.nbytes for v in kept.saved)
    assert kept.memory.nonmodel_nbytes == saved_nbytes
    assert moved.memory.nonmodel_nbytes < saved_nbytes / 2
    assert moved.memory.host_nbytes == kept.memory.host_nbytes + moved.copies_nbytes
    assert moved.moved_nbytes() == 0 and moved.copies_nbytes > saved_nbytes / 2
    ops = [a.op for p in moved.iteration() for a in p.actions]
    assert [ops.count(op) for op in (Op.OFFLOAD, Op.DISCARD, Op.ALLOCATE, Op.RELOAD)] == [len(moved.moves)] * 4


def test_equal_layers_move_alike() -> None:
    moves = choose_moves(layered(LAYERS), PlanOptions(moved_share=1.0))
    inner = [sorted(m.value.index % 3 for m in moves if m.offload_at == at) for at in (6, 9, 12, 15)]
    assert inner == [[0, 1, 2]] * 4


def test_copies_are_part_of_the_host_budget() -> None:
    schedule, options = layered(LAYERS), PlanOptions(moved_share=1.0)
    copies_nbytes = planned(schedule, target(), options).plan.copies_nbytes
    assert planned(schedule, target(host=copies_nbytes), options).plan.memory.host_nbytes == copies_nbytes
    with pytest.raises(BudgetError) as refused:
        planned(schedule, target(host=copies_nbytes - 1), options)
    assert refused.value.min_host_nbytes >= copies_nbytes
    planned_somewhere(schedule, target(host=copies_nbytes - 1), options)


def test_another_shape_finds_room_for_its_copies_or_is_refused() -> None:
    """The second shape saves twice as much as the first, whose layout is kept."""
    small, large = layered(LAYERS), layered([[2 * n for n in sizes] for sizes in LAYERS])
    options = PlanOptions(moved_share=1.0)
    layout = planned(small, target(), options).plan.layout
    copies_nbytes = make_plan(large, target(), options, layout=layout).plan.copies_nbytes
    enough = copies_nbytes + layout.nbytes_in(Tier.HOST)
    plan = make_plan(large, target(host=enough), options, layout=layout).plan
    verify(plan)
    with pytest.raises(BudgetError, match=f"another shape .* moves {copies_nbytes} bytes") as refused:
        make_plan(large, target(host=enough - 1), options, layout=layout)
    assert (refused.value.missing_nbytes, refused.value.min_host_nbytes) == (1, enough)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_plans_of_all_kinds_move(world_size: int, accumulate: int) -> None:
    schedule = layered(LAYERS)
    options = PlanOptions(moved_share=0.5, accumulate=accumulate)
    for device in (1 << 40, 30_000):
        result = planned_somewhere(schedule, target(device=device, world_size=world_size), options).plan
        assert result.moves and away_by_replay(result).items() >= {
            (s.name, s.away_nbytes) for s in result.segments if s.away_nbytes
        }


@given(data=st.data())
def test_random_choices_keep_budgets_and_readers(data: st.DataObject) -> None:
    """The verifier has checked the plan; bytes are replayed from the actions and the values alone."""
    sizes = st.lists(st.integers(0, 5000), min_size=1, max_size=3)
    schedule = layered(data.draw(st.lists(sizes, min_size=1, max_size=6)), named=data.draw(st.booleans()))
    candidates = [v.index for values in movable(schedule).values() for v in values]
    chosen = data.draw(st.lists(st.sampled_from(candidates), unique=True)) if candidates else []
    options = PlanOptions(fixed_moves=tuple(chosen)) if chosen else PlanOptions(moved_share=data.draw(st.floats(0, 1)))
    where = target(device=data.draw(st.integers(1, 40_000)), world_size=data.draw(st.sampled_from([1, 2])))
    plan = planned_somewhere(schedule, where, options).plan
    if chosen:
        assert {v.index for v in plan.moves} == set(chosen)
    away = away_by_replay(plan)
    for segment in plan.segments:
        operators = schedule.graphs[segment.graph == "backward"].operators[segment.first_op : segment.end_op]
        alive = max(op.live_nbytes for op in operators) - away[segment.name]
        assert alive <= segment.nonmodel_nbytes
        assert plan.memory.arena_nbytes + segment.nonmodel_nbytes <= plan.memory.budgets[Tier.DEVICE]


def rates() -> CostRates:
    return cost_rates(Hardware.parse("v100-240g"))


def test_what_does_not_fit_moves_where_that_is_left_open() -> None:
    """With rates or without the least share that fits is taken; who asked for another choice is told."""
    schedule = layered(LAYERS)
    tight = target(device=28_000)
    with pytest.raises(BudgetError):
        make_plan(schedule, tight)
    for where in (tight, replace(tight, rates=rates())):
        fitting = make_fitting_plan(schedule, where)
        assert 0.0 < fitting.moved_share and fitting.plan.moves
        with pytest.raises(BudgetError) as refused:
            make_fitting_plan(schedule, where.with_budget(Tier.HOST, 1000))
        assert "offload" not in str(refused.value)
    with pytest.raises(BudgetError, match="With activations='offload' it fits"):
        make_fitting_plan(schedule, tight, PlanOptions(activations="keep"))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_first_share_that_fits_is_taken(accumulate: int) -> None:
    """Shares that are left out by bytes of single operators would not have fitted."""
    schedule, options = layered(LAYERS), PlanOptions(accumulate=accumulate, in_flight=accumulate)

    found = set[float]()
    for device in range(16_000, 160_000, 2_000):
        for host in (100_000, 1 << 30):
            where = target(device=device, host=host)
            moving = {s: replace(options, moved_share=s) for s in (0.0, *MOVED_SHARES)}
            first = next((s for s, moves in moving.items() if fits(schedule, where, moves)), None)
            if first is None:
                with pytest.raises(BudgetError):
                    make_fitting_plan(schedule, where, options)
            else:
                assert make_fitting_plan(schedule, where, options).moved_share == first
                found.add(first)
    assert len(found) > 2, "shares were needed"


def fits(schedule: Schedule, where: Target, options: PlanOptions) -> bool:
    with suppress(BudgetError):
        make_plan(schedule, where, options)
        return True
    return False


@pytest.mark.parametrize("wish", ["keep", "recompute"])
def test_offloading_is_advised_exactly_where_it_fits(wish: Literal["keep", "recompute"]) -> None:
    """It moves all that can move, for which the host may lack memory where less would do."""
    schedule, found = layered(LAYERS), set[bool]()
    for device, host in product(range(28_000, 60_000, 2_000), (20_000, 30_000, 40_000, 1 << 30)):
        where, keeps = target(device=device, host=host), PlanOptions(activations=wish)
        if not fits(schedule, where, keeps):
            helps = fits(schedule, where, PlanOptions(activations="offload", moved_share=1.0))
            with pytest.raises(BudgetError) as refused:
                make_fitting_plan(schedule, where, keeps)
            assert ("With activations='offload' it fits" in str(refused.value)) == helps
            found.add(helps)
    assert found == {False, True}


def test_other_passes_are_asked_as_they_are() -> None:
    """Bytes of single operators are those of the planner's own passes: none is left out for others, or runs twice."""
    seen = list[float]()

    class Counting:
        name, requires, provides, conflicts = "counting", frozenset[str](), frozenset[str](), frozenset[str]()

        def __call__(self, draft: Draft) -> Draft:
            seen.append(draft.options.moved_share)
            return draft

    passes = [Counting(), *PIPELINE]
    fitting = make_fitting_plan(layered(LAYERS), target(device=28_000), passes=passes)
    assert seen == [s for s in (0.0, *MOVED_SHARES) if s <= fitting.moved_share] and len(seen) > 1


def test_the_least_budget_is_that_of_values_that_move() -> None:
    """What the error names works, and one byte less does not; where moving takes more, it is that of keeping."""
    schedule = layered(LAYERS)
    with pytest.raises(BudgetError) as refused:
        make_fitting_plan(schedule, target(device=1))
    nbytes, host_nbytes = refused.value.min_device_nbytes, refused.value.min_host_nbytes
    fitting = make_fitting_plan(schedule, target(device=nbytes, host=host_nbytes)).plan
    assert fitting.moves and fitting.memory.device_peak_nbytes == nbytes
    with pytest.raises(BudgetError):
        make_fitting_plan(schedule, target(device=nbytes - 1, host=host_nbytes))
    assert nbytes < least_of(schedule)
    single = layered([[4096]])
    with pytest.raises(BudgetError) as alone:
        make_fitting_plan(single, target(device=1))
    assert alone.value.min_device_nbytes == least_of(single)


def least_of(schedule: Schedule) -> int:
    with pytest.raises(BudgetError) as kept:
        make_plan(schedule, target(device=1))
    return kept.value.min_device_nbytes


def test_the_search_moves_what_gains_time() -> None:
    """Saved values that crowd payloads out of the device are moved where links are idle, and stay where they fit."""
    schedule = layered([[4 << 20] * 3 for _ in range(8)], numel=1 << 20)
    crowded = replace(target(device=80 << 20), rates=rates())
    found = make_fastest_plan(schedule, crowded)
    assert len({c.options.moved_share for c in found.candidates}) > 1, "shares were tried"
    best_ms = min(c.step_ms for c in found.candidates)
    assert found.plan.moves and best_ms < 0.9 * found.candidates[0].step_ms
    assert min(c.step_ms for c in found.candidates if c.options.moved_share == found.moved_share) <= best_ms * 1.01
    assert simulate_with(found.plan, rates()).step_ms <= best_ms * 1.01
    roomy = make_fastest_plan(schedule, replace(target(), rates=rates()))
    assert roomy.moved_share == 0.0 and not roomy.plan.moves


@pytest.mark.parametrize("device", [130 << 20, 150 << 20, 170 << 20])
def test_one_layer_more_or_less_that_moves_is_no_faster(device: int) -> None:
    """Shares are tried down to single layers, around the best of those that are far apart."""
    schedule, num_layers = layered([[4 << 20] * 3 for _ in range(18)], numel=1 << 20), 16
    assert len(movable_layers(schedule)) == num_layers
    crowded = replace(target(device=device), rates=rates())
    best = min(make_fastest_plan(schedule, crowded).candidates, key=lambda c: c.step_ms)
    num = round(best.options.moved_share * num_layers)
    assert 0 < num < num_layers
    for other in (num - 1, num + 1):
        try:
            plan = make_plan(schedule, crowded, replace(best.options, moved_share=other / num_layers)).plan
        except BudgetError:
            continue
        assert simulate_with(plan, rates()).step_ms >= best.step_ms * (1 - MIN_GAIN)
