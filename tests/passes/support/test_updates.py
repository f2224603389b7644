"""Steps with some triples on the device: every plan passes the verifier, and updates and moves what the options say."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from schedules import (
    budgeted,
    chain,
    gpt_like,
    mixed,
    op,
    param,
    planned,
    planned_somewhere,
    schedule,
    target,
    texts,
    without_wait,
)

from chunkc.errors import BudgetError, PlanError
from chunkc.ir.actions import Op, Stream
from chunkc.ir.layout import ChunkList
from chunkc.ir.plan import Plan
from chunkc.ir.schedule import Schedule
from chunkc.ir.tiers import Tier
from chunkc.ir.verify import verify, verify_beside
from chunkc.passes import Planned, PlanOptions, Target, make_evaluation_plan, make_plan
from chunkc.passes.liveness import analyse
from chunkc.passes.os_placement import most_resident_states
from chunkc.passes.support.arena import buffers_of, num_payload_slots, spare_slots, static_states
from chunkc.passes.support.budget import demand_of, with_homes

Request = tuple[Schedule, Target, PlanOptions]
PAYLOAD = GRADIENT = 64 * 4
TRIPLE = 64 * 12
ON_HOST = PlanOptions(chunk_numel=64, os_home="host")


def with_room(request: Request) -> Planned:
    plan = planned_somewhere(*request).plan
    found, where, options = request
    device, host = plan.memory.device_budget_nbytes, plan.memory.host_budget_nbytes
    widest = max((c.nbytes + plan.layout.os_nbytes_of(c) for c in plan.layout.chunks), default=0)
    return planned(found, target(device + 2 * widest, host, where.world_size, where.rank), options)


@given(mixed())
def test_every_plan_is_accepted_by_the_verifier_and_updates_every_chunk_once(request: Request) -> None:
    for plan in (planned_somewhere(*request).plan, with_room(request).plan):
        assert plan.memory.device_peak_nbytes <= plan.memory.device_budget_nbytes
        assert plan.memory.host_nbytes <= plan.memory.host_budget_nbytes
        step = plan.program("step").actions
        updated = sorted(a.index for a in step if a.op is Op.UPDATE)
        assert updated == [c.index for c in plan.layout.owned() if c.list is ChunkList.TRAINED and c.used_numel]
        for stream, home in ((Stream.CPU, Tier.DEVICE), (Stream.H2D, Tier.DEVICE)):
            assert not [
                a for a in step if a.stream is stream and _triple_of(plan, a.index) is home and a.op is not Op.FETCH
            ]
        loaded = [a.target for a in step if a.op is Op.LOAD]
        assert loaded == [a.target for a in step if a.op is Op.STORE] and len(set(loaded)) == len(loaded)


def _triple_of(plan: Plan, chunk: int) -> Tier | None:
    return plan.layout.chunks[chunk].os_home


@given(mixed())
def test_bytes_moved_by_all_ranks_are_those_that_chunk_size_priced(request: Request) -> None:
    found, where, options = request
    mine = planned_somewhere(found, where, options).plan
    budgets = (mine.memory.device_budget_nbytes, mine.memory.host_budget_nbytes)
    moved = 0
    for rank in range(where.world_size):
        plan = planned(found, target(*budgets, where.world_size, rank), options).plan
        moved += plan.moved_nbytes(Stream.H2D) + plan.moved_nbytes(Stream.D2H)
        assert len(plan.layout.slots) == len(mine.layout.slots) and plan.layout.arena_nbytes == mine.layout.arena_nbytes
    note = next(s.note for s in mine.stages if s.name == "chunk_size")
    assert f" {moved} bytes moved" in note


@given(mixed())
def test_named_budgets_work_and_one_byte_less_does_not(request: Request) -> None:
    found, where, options = request
    try:
        make_plan(found, budgeted(where, 0), options)
    except BudgetError as error:
        enough = budgeted(where, error.min_device_nbytes, error.min_host_nbytes)
        assert planned(found, enough, options).plan.memory.device_peak_nbytes <= error.min_device_nbytes
        with pytest.raises(BudgetError) as again:
            make_plan(found, budgeted(enough, error.min_device_nbytes - 1), options)
        if again.value.moment == "host":  # which could hold a triple that has no room on the device now
            assert again.value.min_device_nbytes < error.min_device_nbytes
            assert again.value.missing_nbytes == again.value.min_host_nbytes - error.min_host_nbytes > 0
        else:
            assert again.value.missing_nbytes == 1
            assert again.value.min_device_nbytes == error.min_device_nbytes


@given(mixed(), st.integers(0, 100_000))
def test_a_host_too_small_is_eased_by_the_least_number_of_triples(request: Request, host: int) -> None:
    found, where, options = request
    try:
        plan = planned(found, budgeted(where, host=host), replace(options, num_resident_states=0)).plan
    except BudgetError as error:
        assert error.missing_nbytes > 0
        return
    assert plan.memory.host_nbytes <= host
    staying = [c for c in plan.layout.owned() if c.os_home is Tier.DEVICE and c.home is Tier.HOST]
    if staying:
        assert plan.memory.host_nbytes + max(map(plan.layout.os_nbytes_of, staying)) > host


def test_a_host_too_small_for_two_of_four_triples() -> None:
    """The device has room for one slot, the gradient before it lands, and two triples."""
    where = target(PAYLOAD + GRADIENT + 2 * TRIPLE, host=4 * PAYLOAD + 2 * TRIPLE)
    for options in (ON_HOST, PlanOptions(chunk_numel=64)):
        plan = planned(chain(4), where, options).plan
        assert [c.os_home for c in plan.layout.chunks] == [Tier.DEVICE, Tier.HOST, Tier.DEVICE, Tier.HOST]
        assert plan.memory.host_nbytes == 4 * PAYLOAD + 2 * TRIPLE and plan.memory.device_peak_nbytes == 2048
    with pytest.raises(BudgetError, match=r"1 too few\. At host") as caught:
        make_plan(chain(4), budgeted(where, host=where.budget_nbytes(Tier.HOST) - 1), ON_HOST)
    assert caught.value.min_device_nbytes == where.budget_nbytes(Tier.DEVICE)
    assert caught.value.min_host_nbytes == where.budget_nbytes(Tier.HOST)


def test_a_device_without_room_for_the_segments_is_asked_for_the_triples_too() -> None:
    """Of which the host has room for one of four."""
    where = target(PAYLOAD + GRADIENT - 1, host=4 * PAYLOAD + TRIPLE)
    with pytest.raises(BudgetError, match="optimizer states that stay on the device 2304") as caught:
        make_plan(chain(4), where, ON_HOST)
    needs = (PAYLOAD + GRADIENT + 3 * TRIPLE, 4 * PAYLOAD + TRIPLE)
    assert (caught.value.min_device_nbytes, caught.value.min_host_nbytes) == needs


def test_a_step_with_triples_everywhere_reads_like_this() -> None:
    """Six chunks through ten slots: two triples stay, two of the other four pass through a buffer each."""
    options = replace(ON_HOST, num_resident_states=2, streamed_share=0.5, max_slots=10)
    result = planned(chain(6), target(), options)
    layout = result.plan.layout
    assert num_payload_slots(layout) == 10
    assert static_states(layout) == {0: 10, 4: 11}
    assert [(b.payload, b.states) for b in buffers_of(layout)] == [(6, 12), (2, 13)]
    assert [(s.offset, s.nbytes) for s in layout.slots[12:]] == [(7 * 256, 768), (3 * 256, 768)]
    assert spare_slots(layout) == ((1, None), (0, None))
    assert texts(result, "step") == [
        "s0 update c3 @cpu after b8",
        "s1 update c1 @cpu after b14",
        "s2 fetch c0 -> d1 @h2d after b17",
        "s3 load os2 -> d12 @h2d",
        "s4 fetch c2 -> d6 @h2d",
        "s5 fetch c4 -> d0 @h2d",
        "s6 load os5 -> d13 @h2d",
        "s7 fetch c5 -> d2 @h2d",
        "s8 update c0 @compute after s2",
        "s9 evict c0 <- d1 @d2h after s8",
        "s10 update c2 @compute after s4",
        "s11 evict c2 <- d6 @d2h after s10",
        "s12 store os2 <- d12 @d2h",
        "s13 update c4 @compute after s5",
        "s14 evict c4 <- d0 @d2h after s13",
        "s15 update c5 @compute after s7",
        "s16 evict c5 <- d2 @d2h after s15",
        "s17 store os5 <- d13 @d2h",
    ]
    assert texts(result, "forward")[:4] == [
        "f0 fetch c0 -> d0 @h2d after s14",
        "f1 fetch c1 -> d1 @h2d after s1",
        "f2 fetch c2 -> d2 @h2d after s16",
        "f3 fetch c3 -> d3 @h2d after s17",  # s1 follows s0, which updates c3
    ]


def test_a_chunk_size_is_searched_that_lets_triples_pass_through() -> None:
    """Larger chunks would move fewer bytes, but only because no buffer fits."""
    found = gpt_like(12, 256, 1000)
    plan = planned(found, target(8 << 20), PlanOptions(os_home="host", streamed_share=0.5)).plan
    assert len(buffers_of(plan.layout)) >= 2


def test_copies_both_ways_overlap() -> None:
    """With two buffers the second triple is on its way in before the first is updated, the third before the second."""
    options = replace(ON_HOST, streamed_share=1.0, max_slots=8)
    step = planned(chain(6), target(), options).plan.program("step").actions
    order = [(str(a.op), a.index) for a in step if a.op in (Op.LOAD, Op.UPDATE, Op.STORE)]
    assert order[:7] == [
        ("load", 0), ("load", 1), ("update", 0), ("store", 0), ("load", 2), ("update", 1), ("store", 1),
    ]  # fmt: skip


def test_buffers_are_laid_out_beyond_the_slots_that_are_used_where_there_is_memory() -> None:
    """One chunk at a time needs one slot of 256 bytes; two buffers need eight."""
    one = schedule([param("a", 64)], [op([0])], [op([0], [0])])
    options = replace(ON_HOST, streamed_share=1.0)
    assert num_payload_slots(planned(one, target(), options).plan.layout) == 4
    assert num_payload_slots(planned(chain(2), target(), options).plan.layout) == 8
    small = planned(chain(2), target(7 * PAYLOAD), options).plan
    assert num_payload_slots(small.layout) == 4 and len(buffers_of(small.layout)) == 1
    without = planned(chain(2), target(3 * PAYLOAD), options).plan
    assert not buffers_of(without.layout)
    assert {a.stream for a in without.program("step").actions} == {Stream.CPU}


@pytest.mark.parametrize("options", [
    replace(ON_HOST, num_resident_states=2, streamed_share=0.5, max_slots=8),
    replace(ON_HOST, streamed_share=1.0, max_slots=4),
    replace(ON_HOST, num_resident_states=6, max_slots=2),
    replace(ON_HOST, num_resident_states=3, streamed_share=1.0, max_slots=12),
])  # fmt: skip
@pytest.mark.parametrize("world_size", [1, 2])
def test_no_wait_can_be_left_out(options: PlanOptions, world_size: int) -> None:
    """A reuse of bytes before their last reader is refused, under whichever slot's name."""
    options = replace(options, max_slots=(options.max_slots or 1) * world_size)
    plan = planned(chain(12), target(world_size=world_size), options).plan
    tried = 0
    for program in plan.programs:
        if program.name in ("restore", "abandon", "resume"):
            continue
        for position, action in enumerate(program.actions):
            for wait in action.waits:
                tried += 1
                with pytest.raises(PlanError):
                    verify(without_wait(plan, program.name, position, wait))
    assert tried >= 20


@given(mixed())
@example((chain(6), target(), replace(ON_HOST, num_resident_states=2, streamed_share=0.5, max_slots=8)))
def test_another_shape_keeps_homes_and_arena_and_so_does_an_evaluation(request: Request) -> None:
    found, where, options = request
    first = with_room(request).plan
    budgets = target(first.memory.device_budget_nbytes, first.memory.host_budget_nbytes, where.world_size, where.rank)
    operators = tuple(replace(o, live_nbytes=0, live_after_nbytes=0) for o in found.forward.operators)
    smaller = replace(found, forward=replace(found.forward, operators=operators))
    second = make_plan(smaller, budgets, options, layout=first.layout).plan
    verify(second)
    assert second.layout == first.layout
    forward = replace(smaller, backward=replace(found.backward, operators=()))
    evaluation = make_evaluation_plan(forward, budgets, replace(options, cuts=None), layout=first.layout).plan
    verify(evaluation)
    verify_beside(evaluation, first)


@given(mixed())
def test_the_margin_in_triples_is_used_to_the_last(request: Request) -> None:
    found, where, options = request
    plan = planned_somewhere(found, where, replace(options, os_home="host")).plan
    chosen = replace(options, os_home="host", chunk_numel=plan.layout.chunk_numel)
    budgets = target(plan.memory.device_budget_nbytes, 1 << 50, where.world_size, where.rank)
    liveness, layout = analyse(found), with_homes(plan.layout, Tier.HOST)
    demand = demand_of(layout, liveness, options.cuts)
    most = most_resident_states(layout, demand, liveness, budgets)
    count = sum(c.list is ChunkList.TRAINED for c in plan.layout.owned())
    assert 0 <= most <= count
    planned(found, budgets, replace(chosen, num_resident_states=most))
    if most < count:
        with pytest.raises(BudgetError):
            make_plan(found, budgets, replace(chosen, num_resident_states=most + 1))


def test_places_that_are_kept_leave_a_smaller_margin() -> None:
    plan = planned(chain(8), target(4 * PAYLOAD + 3 * TRIPLE), ON_HOST).plan
    liveness = analyse(chain(8))
    demand = demand_of(plan.layout, liveness, None)
    where = target(4 * PAYLOAD + 3 * TRIPLE)
    assert [most_resident_states(plan.layout, demand, liveness, where, n) for n in (None, 1, 4, 5, 100)] == [
        3,
        3,
        2,
        2,
        0,
    ]


def test_half_of_a_large_model_is_streamed() -> None:
    found = gpt_like(12, 256, 1000)
    plan = planned(found, target(16 << 20), PlanOptions(os_home="host", streamed_share=0.5)).plan
    step = plan.program("step").actions
    loaded = [plan.layout.chunks[a.index] for a in step if a.op is Op.LOAD]
    updates = sum(a.op is Op.UPDATE for a in step)
    assert abs(len(loaded) - updates / 2) <= 0.5
    streamed = sum(c.used_numel * (2 + 12) for c in loaded)
    without = planned(found, target(16 << 20), PlanOptions(os_home="host", chunk_numel=plan.layout.chunk_numel))
    for stream in (Stream.H2D, Stream.D2H):
        assert plan.moved_nbytes(stream) == without.plan.moved_nbytes(stream) + streamed
