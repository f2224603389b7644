"""The whole planner: every plan is accepted by the verifier, moves what it says, and depends on its inputs only."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from child_environment import environment
from hypothesis import given
from schedules import (
    PLENTY,
    budgeted,
    chain,
    gpt_like,
    op,
    param,
    planned,
    planned_somewhere,
    requests,
    schedule,
    schedules,
    target,
    texts,
)

from chunkc.errors import BudgetError, PlanError
from chunkc.ir.actions import Op, Stream
from chunkc.ir.layout import ChunkList
from chunkc.ir.plan import Plan
from chunkc.ir.schedule import Schedule
from chunkc.ir.tiers import Tier
from chunkc.ir.verify import verify
from chunkc.passes import PIPELINE, PlanOptions, Target, make_plan

Request = tuple[Schedule, Target, PlanOptions]


@given(requests())
def test_every_plan_is_accepted_by_the_verifier(request: Request) -> None:
    plan = planned_somewhere(*request).plan
    assert plan.memory.device_peak_nbytes <= plan.memory.device_budget_nbytes
    assert plan.memory.host_nbytes == plan.layout.nbytes_in(Tier.HOST) <= plan.memory.host_budget_nbytes


@given(requests())
def test_bytes_moved_equal_an_independent_recount(request: Request) -> None:
    """The note of ``residency`` counts stays; this counts actions, chunk by chunk."""
    found, where, options = request
    mine = planned_somewhere(found, where, options).plan
    budgets = (mine.memory.device_budget_nbytes, mine.memory.host_budget_nbytes)
    all_ranks = 0
    for rank in range(where.world_size):
        plan = planned_somewhere(found, target(*budgets, where.world_size, rank), options).plan
        counted = 0
        for name in ("forward", "backward", "step"):
            for action in plan.program(name).actions:
                if action.op in (Op.FETCH, Op.EVICT):
                    chunk = plan.layout.chunks[action.index]
                    counted += chunk.used_numel * (4 if chunk.dtype == "float32" else 2)
        assert counted == plan.moved_nbytes(Stream.H2D) + plan.moved_nbytes(Stream.D2H)
        all_ranks += counted
    note = next(s.note for s in mine.stages if s.name == "chunk_size")
    assert f" {all_ranks} bytes moved" in note


@given(schedules())
def test_nothing_moves_when_everything_fits(found: Schedule) -> None:
    plan = planned(found, target()).plan
    moves = {Op.FETCH, Op.EVICT, Op.DROP, Op.LOAD, Op.STORE}
    assert not [a for p in plan.programs for a in p.actions if a.op in moves or a.waits]
    assert [s.name for s in plan.segments] == ["fwd.0", "bwd.0"]
    assert all(c.home is Tier.DEVICE for c in plan.layout.chunks if c.list is not ChunkList.UNUSED)
    assert plan.program("forward").entry.resident == plan.program("forward").exit.resident


@given(schedules())
def test_with_plenty_of_memory_least_is_moved(found: Schedule) -> None:
    """One chunk size, states on the host, and budgets from the least that works to plenty."""
    options = PlanOptions(chunk_numel=256, os_home="host")
    try:
        planned(found, target(1), options)
    except BudgetError as error:
        least = error.min_device_nbytes
        plans = [planned(found, target(least + extra), options).plan for extra in (0, 4096, PLENTY)]
        moved = [plan.moved_nbytes(Stream.H2D) + plan.moved_nbytes(Stream.D2H) for plan in plans]
        assert moved[-1] == min(moved)


def test_a_plan_that_does_not_fit_reads_like_this() -> None:
    """Three layers, two slots of one chunk each: fetches ahead, drops in forward, write-backs in backward."""
    result = planned(chain(3), target(2 * 256 + 256), PlanOptions(chunk_numel=64))
    assert texts(result, "forward") == [
        "f0 fetch c0 -> d0 @h2d after s1",
        "f1 fetch c1 -> d1 @h2d after s2",
        "f2 run fwd.0 @compute after f0",
        "f3 drop c0 <- d0 @compute",
        "f4 fetch c2 -> d0 @h2d after f3",
        "f5 run fwd.1 @compute after f1",
        "f6 run fwd.2 @compute after f4",
    ]
    assert texts(result, "backward") == [
        "b0 run bwd.0 @compute",
        "b1 stash c2 of bwd.0 @compute",
        "b2 evict c2 <- d0 @d2h after b1",
        "b3 fetch c0 -> d0 @h2d after b2",
        "b4 run bwd.1 @compute",
        "b5 stash c1 of bwd.1 @compute",
        "b6 evict c1 <- d1 @d2h after b5",
        "b7 run bwd.2 @compute after b3",
        "b8 stash c0 of bwd.2 @compute",
        "b9 evict c0 <- d0 @d2h after b8",
    ]
    assert texts(result, "step") == [
        "s0 update c2 @cpu after b2",
        "s1 update c0 @cpu after b9",
        "s2 update c1 @cpu",  # b6 precedes b9 on its stream
    ]
    assert texts(result, "abandon") == ["t0 drop c1 <- d1 @compute", "t1 drop c2 <- d0 @compute"]


def test_a_plan_that_fits_reads_like_this() -> None:
    result = planned(chain(2), target(2 * 256 + 2 * 768 + 512), PlanOptions(chunk_numel=64))
    assert texts(result, "forward") == ["f0 run fwd.0 @compute"]
    assert texts(result, "backward") == [
        "b0 run bwd.0 @compute",
        "b1 stash c0 of bwd.0 @compute",
        "b2 stash c1 of bwd.0 @compute",
    ]
    assert texts(result, "step") == ["s0 update c0 @compute", "s1 update c1 @compute"]
    assert texts(result, "restore") == ["s0 restore c0 @compute", "s1 restore c1 @compute"]
    assert result.plan.program("step").exit.resident == (("c0", 0), ("c1", 1), ("os0", 2), ("os1", 3))
    assert result.plan.layout.arena_nbytes == 2 * 256 + 2 * 768


@given(requests())
def test_equal_cuts_make_equal_segments(request: Request) -> None:
    found, where, options = request
    evicted = planned_somewhere(found, where, replace(options, os_home="host")).plan
    first, second = (
        tuple(s.first_op for s in evicted.graph_segments(g) if s.first_op) for g in ("forward", "backward")
    )
    identity = planned(found, target(), PlanOptions(cuts=(first, second), os_home="device")).plan
    bounds = [(s.name, s.first_op, s.end_op, s.reads, s.lands) for s in evicted.segments]
    assert [(s.name, s.first_op, s.end_op, s.reads, s.lands) for s in identity.segments] == bounds


@given(requests())
def test_a_layout_serves_another_shape_of_the_model(request: Request) -> None:
    found, where, options = request
    first = planned_somewhere(found, where, options).plan
    smaller = replace(
        found,
        forward=replace(found.forward, operators=tuple(replace(o, live_nbytes=0, live_after_nbytes=0) for o in
                                                       found.forward.operators)),
    )  # fmt: skip
    budgets = target(first.memory.device_budget_nbytes, first.memory.host_budget_nbytes, where.world_size, where.rank)
    second = make_plan(smaller, budgets, options, layout=first.layout).plan
    verify(second)
    assert second.layout == first.layout


def test_a_layout_serves_its_own_schedule_again_where_wide_blocks_shared_ranges() -> None:
    """Three wide blocks, two needed at a time: spans reserved for all take 6 slot ranges, the best plan 5."""
    wide = [param("a", 300), param("b", 257), param("c", 257), param("d", 1)]
    found = schedule(wide, [op([0, 1, 3])], [op([0, 2], [3]), op(), op([2, 1])])
    options = PlanOptions(chunk_numel=256)
    first = planned_somewhere(found, target(1), options).plan
    again = make_plan(found, target(first.memory.device_budget_nbytes), options, layout=first.layout).plan
    verify(again)
    assert again.layout == first.layout


def test_frozen_chunks_move_alone_where_trained_ones_stay_with_their_gradients() -> None:
    """One chunk moves, one slot suffices: updates need no second where every gradient chunk stays."""
    found = schedule([param("trained", 1), param("frozen", 1)], [op([0])], [op((), [0]), op([1])])
    options = PlanOptions(os_home="host", num_resident_states=1, keeps_payloads=True, accumulate=2)
    plan = planned_somewhere(found, target(1), options).plan
    least = plan.memory.device_budget_nbytes
    enough = planned_somewhere(found, target(least + plan.layout.chunk_numel * 4 * 2), options).plan
    assert sorted(c.home.value for c in enough.layout.chunks) == ["device", "device", "host"]


def test_a_larger_shape_that_does_not_fit_beside_the_arena_is_refused() -> None:
    options = PlanOptions(chunk_numel=64)
    first = planned(chain(4), target(4 * 256), options).plan
    with pytest.raises(BudgetError, match="another shape of Model does not fit beside the arena") as caught:
        make_plan(chain(4, live=4096), target(4 * 256), options, layout=first.layout)
    enough = target(caught.value.min_device_nbytes, caught.value.min_host_nbytes)
    verify(make_plan(chain(4, live=4096), enough, options, layout=first.layout).plan)
    less = budgeted(enough, enough.budget_nbytes(Tier.DEVICE) - 1)
    with pytest.raises(BudgetError):
        make_plan(chain(4, live=4096), less, options, layout=first.layout)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_larger_shape_beside_a_resident_layout_is_told_what_it_needs(world_size: int) -> None:
    options = PlanOptions(chunk_numel=64)
    first = planned(chain(4, live=64), target(world_size=world_size), options).plan
    assert all(c.home is Tier.DEVICE for c in first.layout.chunks)
    tight = target(first.memory.device_peak_nbytes, world_size=world_size)
    with pytest.raises(BudgetError, match="beside the arena") as caught:
        make_plan(chain(4, live=4096), tight, options, layout=first.layout)
    error = caught.value
    assert error.missing_nbytes == error.min_device_nbytes - tight.budget_nbytes(Tier.DEVICE) > 0
    enough = budgeted(tight, error.min_device_nbytes)
    verify(make_plan(chain(4, live=4096), enough, options, layout=first.layout).plan)
    less = budgeted(enough, enough.budget_nbytes(Tier.DEVICE) - 1)
    with pytest.raises(BudgetError):
        make_plan(chain(4, live=4096), less, options, layout=first.layout)


def test_a_layout_of_another_model_is_refused() -> None:
    first = planned(chain(4), target()).plan
    with pytest.raises(PlanError, match="parameters differ"):
        make_plan(chain(5), target(), layout=first.layout)
    with pytest.raises(ValueError, match="rank 0 of 1, the target is rank 1 of 2"):
        make_plan(chain(4), target(world_size=2, rank=1), layout=first.layout)


def test_max_slots_limits_the_arena() -> None:
    plans = [planned(chain(8), target(), PlanOptions(chunk_numel=64, max_slots=n)).plan for n in (1, 3, 7)]
    assert [len(p.layout.slots) for p in plans] == [1, 3, 7]
    moved = [p.moved_nbytes(Stream.H2D) for p in plans]
    assert moved == sorted(moved, reverse=True)
    wide = schedule([param("a", 64), param("b", 64)], [op([0, 1])], [op([0, 1], [0, 1])])
    with pytest.raises(ValueError, match="max_slots=1 is too few: an operator needs 2 slots"):
        make_plan(wide, target(), PlanOptions(chunk_numel=64, max_slots=1))


def test_cuts_outside_a_graph_are_refused() -> None:
    with pytest.raises(ValueError, match="cut 3 is not inside the forward graph of 3 operators"):
        make_plan(chain(3), target(), PlanOptions(cuts=((3,), ())))


def digests() -> list[str]:
    return [planned(gpt_like(6, 128, 1000), target(budget)).plan.digest() for budget in (1 << 22, 1 << 23, 1 << 40)]


@pytest.mark.long
def test_plans_do_not_depend_on_hash_seeds() -> None:
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    code += "from test_pipeline import digests; print(digests())"
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    env = environment(PYTHONHASHSEED=seed)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(digests())


def test_a_plan_survives_json() -> None:
    plan = planned(gpt_like(2, 64, 500), target(300_000), PlanOptions(chunk_numel=4096)).plan
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.long
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 8])
def test_175b_is_planned_within_seconds(world_size: int) -> None:
    """96 layers of hidden size 12288 with 13,000 operators on 32 GiB devices."""
    found = gpt_like(96, 12288, ops_per_layer=150)
    assert sum(len(g.operators) for g in found.graphs) > 8_000
    plan = planned(found, target(32 << 30, world_size=world_size)).plan
    assert sum(s.elapsed_ms for s in plan.stages) < 60_000
    assert [s.name for s in plan.stages] == [p.name for p in PIPELINE]
