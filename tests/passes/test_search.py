"""The search among whole plans: what it tries, what it keeps, and that ranks choose alike."""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from costs import LINKS, RATES, UNIT_NBYTES, copies, rates
from hypothesis import example, given, settings
from hypothesis import strategies as st
from schedules import PLENTY, chain, target

from chunkc.cost.rates import CopyLaw, CostRates
from chunkc.cost.simulate import price, simulate_with
from chunkc.errors import BudgetError
from chunkc.hardware.usable_memory import Budget
from chunkc.ir.actions import Op, Stream
from chunkc.ir.plan import Plan
from chunkc.ir.schedule import Schedule
from chunkc.ir.tiers import Tier
from chunkc.passes import Draft, PlanOptions, Target, assemble, make_fastest_plan, make_plan
from chunkc.passes.search import Search

NUMEL = 4096
LAYERS = 12
PER_BYTE = CopyLaw(0.0, 64e-6)


def working_chain(num_layers: int = LAYERS, nbytes: int = UNIT_NBYTES) -> Schedule:
    found = chain(num_layers, numel=NUMEL)
    graphs = [replace(g, operators=tuple(replace(o, nbytes=nbytes) for o in g.operators)) for g in found.graphs]
    return replace(found, forward=graphs[0], backward=graphs[1])


def machine(found: CostRates | None, device_nbytes: int, world_size: int = 1, rank: int = 0) -> Target:
    return replace(target(device_nbytes, world_size=world_size, rank=rank), rates=found)


TIGHT = 5 * NUMEL * 4
"""Bytes of device memory: five layers' payloads of twelve."""


def by_latency(latency_us: float) -> CostRates:
    law = CopyLaw(latency_us, 64.0)
    return rates(copies=copies(law), cpu_update_gparam_per_s={"float32": 1e3})


def test_without_rates_the_passes_decide() -> None:
    found = make_fastest_plan(working_chain(), machine(None, TIGHT))
    assert found.plan == make_plan(working_chain(), target(TIGHT)).plan
    assert found.candidates == ()


def test_a_plan_without_moves_is_not_searched() -> None:
    found = make_fastest_plan(working_chain(), machine(RATES, PLENTY))
    assert found.candidates == () and found.plan.moved_nbytes("h2d") == 0  # type: ignore[arg-type]


@pytest.mark.parametrize("latency_us", [1500.0, 5000.0])
def test_the_fastest_of_the_candidates_is_returned_and_never_slower_than_the_passes_plan(latency_us: float) -> None:
    known = by_latency(latency_us)
    found = make_fastest_plan(working_chain(), machine(known, TIGHT))
    best = min(c.step_ms for c in found.candidates)
    assert simulate_with(found.plan, known).step_ms == pytest.approx(best, rel=0.002)
    own = make_plan(working_chain(), target(TIGHT)).plan
    assert found.candidates[0].step_ms == simulate_with(own, known).step_ms >= best
    assert len({c.options.chunk_numel for c in found.candidates}) >= 3


def test_a_step_that_is_computation_alone_is_not_searched() -> None:
    found = make_fastest_plan(working_chain(), machine(by_latency(0.0), TIGHT))
    assert [c.text for c in found.candidates] == ["the passes' own choice"]
    landing_ms = LAYERS * NUMEL * 4 / 256  # on the round rates; and 1 ms for each layer and graph
    assert found.candidates[0].step_ms == pytest.approx(landing_ms + 2 * LAYERS, rel=0.002)


def test_slow_starts_of_copies_ask_for_larger_chunks_than_long_copies_do() -> None:
    by_start, by_bytes = by_latency(3000.0), rates(copies=copies(PER_BYTE))
    large = make_fastest_plan(working_chain(), machine(by_start, TIGHT)).plan.layout.chunk_numel
    small = make_fastest_plan(working_chain(), machine(by_bytes, TIGHT)).plan.layout.chunk_numel
    assert large > small


@pytest.mark.long
@settings(max_examples=6)
@example(host_ms=8.0, triple_ms=4.0, num_layers_of_room=13, tracks_grad_norm=False)  # of all 156 cases the farthest off
@given(
    host_ms=st.sampled_from([2.0, 8.0]),
    triple_ms=st.sampled_from([0.25, 1.0, 4.0]),
    num_layers_of_room=st.integers(9, 21),
    tracks_grad_norm=st.booleans(),
)
def test_no_other_count_and_share_is_much_faster(
    host_ms: float, triple_ms: float, num_layers_of_room: int, tracks_grad_norm: bool
) -> None:
    """Against every count of resident triples, with and without their payloads, and seven shares of the others."""
    num_layers, law = 6, CopyLaw(0.0, 12 * NUMEL / triple_ms / 1e6)
    schedule = working_chain(num_layers, nbytes=1_000_000)
    known = rates(
        device_memory_gb_per_s=1.0,
        copies=copies(law),
        cpu_update_gparam_per_s={"float32": NUMEL / host_ms / 1e6},
        gpu_update_gparam_per_s={"float32": 1.0},
    )
    where = machine(known, num_layers_of_room * NUMEL * 4)
    wanted = PlanOptions(chunk_numel=NUMEL, tracks_grad_norm=tracks_grad_norm)
    found = make_fastest_plan(schedule, where, wanted)
    steps_ms = []
    for triples, keeps, sixths in product(range(num_layers + 1), (False, True), range(7)):
        options = replace(wanted, num_resident_states=triples, keeps_payloads=keeps, streamed_share=sixths / 6)
        with suppress(BudgetError):
            steps_ms.append(simulate_with(make_plan(schedule, where, options).plan, known).step_ms)
    assert simulate_with(found.plan, known).step_ms <= 1.15 * min(steps_ms)


def test_payloads_of_resident_states_stay_with_them() -> None:
    known = replace(by_latency(500.0), cpu_update_gparam_per_s={"float32": 2e-4})
    where = machine(known, 14 * NUMEL * 4)
    wanted = PlanOptions(chunk_numel=NUMEL, num_resident_states=2)
    moving, staying = (make_plan(working_chain(), where, replace(wanted, keeps_payloads=k)).plan for k in (False, True))
    moved = [{a.target for p in plan.programs for a in p.actions if a.op is Op.FETCH} for plan in (moving, staying)]
    kept = {f"c{c.index}" for c in staying.layout.chunks if c.home is Tier.DEVICE}
    assert len(kept) == 2 and moved[0] - moved[1] == kept
    assert simulate_with(staying, known).step_ms <= simulate_with(moving, known).step_ms
    assert staying.memory.host_nbytes == moving.memory.host_nbytes - 2 * NUMEL * 4


def test_a_given_chunk_size_is_kept() -> None:
    found = make_fastest_plan(working_chain(), machine(by_latency(3000.0), TIGHT), PlanOptions(chunk_numel=NUMEL))
    assert found.plan.layout.chunk_numel == NUMEL
    assert {c.options.chunk_numel for c in found.candidates} == {NUMEL}


@pytest.mark.long
def test_ranks_choose_alike_though_their_own_chunks_differ() -> None:
    uneven = working_chain()
    known = by_latency(3000.0)
    layouts = [
        make_fastest_plan(uneven, machine(known, 3 * TIGHT, world_size=3, rank=rank)).plan.layout for rank in range(3)
    ]
    assert {layout.chunk_numel for layout in layouts} == {layouts[0].chunk_numel}
    assert [layout.rank for layout in layouts] == [0, 1, 2]


@pytest.mark.parametrize(("times_slower", "divides"), [(16, True), (1, False)])
def test_exchanges_that_nothing_hides_divide_a_resident_plan(times_slower: int, divides: bool) -> None:
    """Gradients of a segment are reduced behind it: where that takes long, more segments are worth compiling."""
    links = replace(LINKS, gpu_gb_per_s=LINKS.gpu_gb_per_s / times_slower)
    schedule, where = working_chain(64, 400 * UNIT_NBYTES), machine(rates(links=links), PLENTY, world_size=2)
    found = make_fastest_plan(schedule, where)
    usual = make_plan(schedule, where, PlanOptions(chunk_numel=found.plan.layout.chunk_numel)).plan
    assert found.plan.moved_nbytes(Stream.H2D) == found.plan.moved_nbytes(Stream.D2H) == 0
    assert any("segments a graph" in c.text for c in found.candidates)
    assert (len(found.plan.segments) > len(usual.segments)) == divides
    if divides:
        usual_ms = min(c.step_ms for c in found.candidates if c.options.num_exchanges == PlanOptions().num_exchanges)
        assert min(c.step_ms for c in found.candidates) < 0.95 * usual_ms


def test_the_table_of_candidates_says_why() -> None:
    found = make_fastest_plan(working_chain(), machine(by_latency(1500.0), TIGHT))
    assert len(found.candidates) > 1 and found.candidates[0].text == "the passes' own choice"
    assert all(c.outcome.startswith("bound by") or c.outcome.endswith("missing") for c in found.candidates)
    note = found.plan.stages[-1].note
    assert found.plan.stages[-1].name == "search" and f"of {len(found.candidates)} plans simulated" in note


def searching(draft_with: Callable[[PlanOptions], Draft]) -> Search:
    return Search(draft_with, assemble, by_latency(3000.0), PlanOptions())


def test_a_candidate_that_does_not_fit_is_listed_and_passed_over() -> None:
    first = make_plan(working_chain(), target(TIGHT)).drafts[-1][1]

    def refuse(options: PlanOptions) -> Draft:
        raise BudgetError("no", moment="", tensors=(), missing_nbytes=7, min_device_nbytes=0, min_host_nbytes=0)

    search = searching(refuse)
    best = search.run(first)
    assert best.options == PlanOptions() and math.isfinite(best.step_ms)
    assert {(c.step_ms, c.outcome) for c in search.tried[1:]} == {(math.inf, "7 bytes missing")}
    assert len(search.tried) == len({c.options for c in search.tried}), "each is tried once"


def test_a_large_model_stops_the_search() -> None:
    first = make_plan(working_chain(), target(TIGHT)).drafts[-1][1]
    search = replace(searching(lambda options: first), max_actions=1)
    search.run(first)
    assert len(search.tried) == 1


def test_options_that_give_one_plan_are_simulated_once() -> None:
    first = make_plan(working_chain(), target(TIGHT)).drafts[-1][1]
    asked = list[PlanOptions]()

    def draft_with(options: PlanOptions) -> Draft:
        asked.append(options)
        return first

    num_actions = price(assemble(first), by_latency(3000.0)).num_actions
    search = replace(searching(draft_with), max_actions=num_actions + 1)
    best = search.run(first)
    assert len(asked) > 2 and len(search.tried) == 1, "they take nothing from what may be simulated"
    assert best.options == PlanOptions()


def test_of_a_large_model_whose_updates_are_held_second_homes_are_tried_all_the_same() -> None:
    known = slow_host(16e-6)
    found = make_fastest_plan(
        working_chain(), machine(known, TIGHT), PlanOptions(chunk_numel=NUMEL, tracks_grad_norm=True), max_actions=1
    )
    assert [c.options.num_second_homes for c in found.candidates] == [0, LAYERS]
    assert sum(c.has_second_home for c in found.plan.layout.chunks) == LAYERS
    assert found.candidates[1].step_ms < 0.9 * found.candidates[0].step_ms


def test_of_a_large_model_that_waits_for_updates_states_on_the_device_are_tried_all_the_same() -> None:
    where, wanted = machine(slow_host(16e-6), 17 * NUMEL * 4), PlanOptions(chunk_numel=NUMEL)
    found = make_fastest_plan(working_chain(), where, wanted, max_actions=1)
    own, placed = found.candidates
    assert own.options.num_resident_states == 0 < placed.options.num_resident_states
    assert placed.step_ms < 0.9 * own.step_ms and found.plan.layout.nbytes_in(Tier.DEVICE) > 0
    fast = make_fastest_plan(working_chain(), machine(by_latency(3000.0), 17 * NUMEL * 4), wanted, max_actions=1)
    assert [c.options.num_resident_states for c in fast.candidates] == [0], "no update is waited for"


def test_host_memory_that_later_choices_leave_is_filled_where_the_search_has_ended() -> None:
    """States that go to the device leave room, and no more numbers of second homes would be tried."""
    roomy, host = machine(slow_host(16e-6), 17 * NUMEL * 4), Budget(13 * 16 * NUMEL)
    where = replace(roomy, budgets={**roomy.budgets, Tier.HOST: host})
    options = PlanOptions(chunk_numel=NUMEL, tracks_grad_norm=True)
    found = make_fastest_plan(working_chain(), where, options, max_actions=2500)
    *others, last = found.candidates
    assert last.options.num_second_homes > max(c.options.num_second_homes for c in others)
    assert last.step_ms < 0.9 * min(c.step_ms for c in others)
    layout = found.plan.layout
    assert sum(c.has_second_home for c in layout.chunks) == last.options.num_second_homes
    left_nbytes = host.nbytes - layout.nbytes_in(Tier.HOST)
    assert left_nbytes < min(layout.second_home_nbytes_of(c) for c in layout.chunks if c.has_second_home)


def test_a_share_of_the_states_is_streamed_only_where_the_step_waits_for_updates() -> None:
    known, wanted = by_latency(3000.0), PlanOptions(chunk_numel=NUMEL)
    found = make_fastest_plan(working_chain(), machine(known, TIGHT), wanted)
    assert len(found.candidates) > 1 and {c.options.streamed_share for c in found.candidates} == {0.0}
    waiting = make_fastest_plan(working_chain(), machine(slow_host(16e-6), TIGHT), wanted)
    assert max(c.updates_ms for c in waiting.candidates) > 0
    assert max(c.options.streamed_share for c in waiting.candidates) > 0


# --- where optimizer states are updated -------------------------------------------------------------------------------


def slow_host(gparam_per_s: float, **changes: Any) -> CostRates:
    fast = CopyLaw(0.0, 64.0)
    return rates(
        copies=copies(fast),
        cpu_update_gparam_per_s={"float32": gparam_per_s},
        gpu_update_gparam_per_s={"float32": 64.0},
        **changes,
    )


def num_host_updates(plan: Plan) -> int:
    return sum(a.op is Op.UPDATE and a.stream is Stream.CPU for a in plan.program("step").actions)


def test_a_slow_host_updates_less() -> None:
    wanted = PlanOptions(chunk_numel=NUMEL)
    roomy = 20 * NUMEL * 4
    found = make_fastest_plan(working_chain(), machine(slow_host(16e-6), roomy), wanted)
    fast = make_fastest_plan(working_chain(), machine(slow_host(1e3), roomy), wanted)
    on_host = [
        sum(a.op is Op.UPDATE and a.stream is Stream.CPU for a in p.plan.program("step").actions) for p in (found, fast)
    ]
    assert on_host[0] < LAYERS == on_host[1]
    own = found.candidates[0].step_ms
    assert simulate_with(found.plan, slow_host(16e-6)).step_ms < 0.9 * own


def test_given_placements_are_kept() -> None:
    wanted = PlanOptions(chunk_numel=NUMEL, num_resident_states=1)
    found = make_fastest_plan(working_chain(), machine(slow_host(16e-6), 20 * NUMEL * 4), wanted)
    assert {(c.options.num_resident_states, c.options.streamed_share) for c in found.candidates} == {(1, 0.0)}
    streamed = PlanOptions(chunk_numel=NUMEL, streamed_share=1.0)
    found = make_fastest_plan(working_chain(), machine(slow_host(16e-6), 20 * NUMEL * 4), streamed)
    assert {(c.options.num_resident_states, c.options.streamed_share) for c in found.candidates} == {(0, 1.0)}


def test_streamed_and_host_updates_balance_where_copies_and_host_are_as_slow() -> None:
    """B / (B + 12 U) by hand: 12 bytes at 12 GB/s take as long as one parameter at 1 Gparam/s."""
    known = rates(copies=copies(CopyLaw(0.0, 12.0), CopyLaw(0.0, 24.0)), cpu_update_gparam_per_s={"float32": 1.0})
    first = make_plan(working_chain(), target(TIGHT)).drafts[-1][1]
    assert Search(lambda options: first, assemble, known, PlanOptions()).balanced_share() == pytest.approx(0.5)
