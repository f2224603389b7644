"""Micro-batches that exchange nothing until the last one of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedules import (
    chain,
    check,
    op,
    param,
    planned,
    planned_somewhere,
    program_named,
    requests,
    schedule,
    target,
    texts,
)

from chunkc.errors import PlanError
from chunkc.ir.actions import Op, Stream
from chunkc.ir.layout import ChunkList
from chunkc.ir.plan import Plan, Program
from chunkc.ir.schedule import Schedule
from chunkc.ir.verify import verify
from chunkc.passes import PlanOptions, Target, make_plan

RESIDENT = PlanOptions(chunk_numel=64, os_home="device", accumulate=3)


def test_programs_without_exchanges_skip_the_labels_of_exchanges() -> None:
    """Two layers in one group; this is rank 0 of two."""
    result = planned(chain(2), target(world_size=2), RESIDENT)
    assert texts(result, "forward_again") == ["f1 run fwd.0 @compute after f0 b6 s0"]
    assert texts(result, "accumulate_unreduced") == [
        "b1 run bwd.0 @compute",
        "b2 add c2 of bwd.0 @compute",
        "b3 add c3 of bwd.0 @compute after b0 f0",
    ]
    assert texts(result, "backward_unreduced")[:3] == [
        "b0 open c3 -> d3 @h2d after f0",
        "b1 run bwd.0 @compute",
        "b2 stash c2 of bwd.0 @compute",
    ]
    assert texts(result, "accumulate_last")[2:] == [
        "b3 add c3 of bwd.0 @compute after b0 f0",
        "b4 reduce g1 @comm after b3",
        "b5 release g1 @comm",
        "b6 release g0 @compute",
    ]
    assert texts(result, "reduce_all") == ["t0 reduce g1 @comm", "t1 release g1 @comm", "t2 release g0 @comm"]
    unreduced = program_named(result.plan, "backward_unreduced").exit
    assert unreduced.phase == "unreduced" and {"c1", "c3"} <= {t for t, _ in unreduced.resident}


@pytest.mark.parametrize("accumulate", [2, 3, 5])
def test_a_step_gathers_and_reduces_every_group_once(accumulate: int) -> None:
    plan = planned(chain(6), target(world_size=2), replace(RESIDENT, accumulate=accumulate)).plan
    between = ["forward_again", "accumulate_unreduced"] * (accumulate - 2)
    names = ["forward", "backward_unreduced", *between, "forward_again", "accumulate_last", "step"]
    assert [p.name for p in plan.iteration()] == names
    exchanges = [(str(a.op), a.target) for _, _, a in plan.labelled() if a.op in (Op.GATHER, Op.REDUCE)]
    grads = sorted({c.index // 2 for c in plan.layout.chunks if c.list is ChunkList.GRAD})
    assert len(exchanges) == 6 and {("reduce", f"g{g}") for g in grads} < set(exchanges)
    payload = sum(c.nbytes for c in plan.layout.chunks if c.list is ChunkList.TRAINED)
    assert plan.moved_nbytes(Stream.COMM) == 2 * payload // 2


@pytest.mark.parametrize(
    ("where", "options"),
    [
        (target(world_size=2), replace(RESIDENT, accumulate=1)),
        (target(world_size=2), replace(RESIDENT, os_home="host")),
        (target(), RESIDENT),
    ],
    ids=["one micro-batch", "chunks move", "one rank"],
)
def test_other_plans_do_not_defer(where: Target, options: PlanOptions) -> None:
    assert not planned(chain(4), where, options).plan.defers_reduction


def test_a_graph_that_trains_less_than_others_does_not_defer() -> None:
    """Its last backward would not reduce what theirs have left."""
    layers, where = chain(4), target(world_size=2)
    layout = planned(layers, where, RESIDENT).plan.layout
    other = schedule(layers.params, [op([i]) for i in range(4)], [op([3], [3]), op([2], [2]), op([1], [1]), op([0])])
    assert not make_plan(other, where, RESIDENT, layout=layout, check=check).plan.defers_reduction


@given(requests(), st.integers(2, 4), st.booleans())
def test_resident_plans_of_ranks_defer_and_verify(
    request: tuple[Schedule, Target, PlanOptions], accumulate: int, tracks_grad_norm: bool
) -> None:
    """Whatever the schedule: `planned_somewhere` verifies, and the programs take no memory that others do not."""
    found, where, options = request
    options = replace(options, accumulate=accumulate, tracks_grad_norm=tracks_grad_norm)
    plan = planned_somewhere(found, where, options).plan
    layout = plan.layout
    trained = {p.param for p in layout.placements if p.num_chunks and layout.chunks[p.chunk].list is ChunkList.TRAINED}
    is_resident = all(c.home == "device" and c.os_home in (None, "device") for c in layout.owned())
    if where.world_size > 1 and is_resident and trained:
        assert plan.defers_reduction == (not plan.trained_elsewhere)
    if plan.defers_reduction:
        exchanges = {a.op for p in plan.programs if not p.reduces for a in p.actions if a.stream is Stream.COMM}
        assert not exchanges and {p.exit.phase for p in plan.programs if not p.reduces} == {"unreduced"}
        norms = [a for p in plan.programs if p.role == "backward" for a in p.actions if a.op in (Op.NORM, Op.SUM)]
        assert tracks_grad_norm or not norms
    assert Plan.from_json(plan.to_json()) == plan


def test_what_a_left_out_exchange_ordered_stays_ordered() -> None:
    """A stash waits for the opening of its slot by way of an exchange that variants leave out."""
    params = [param("a", 200), param("b", 64), param("c", 200)]
    backward = [op([0]), op([1, 0], [0]), op([0]), op([2, 2], [2]), op([0, 1], [1])]
    found = schedule(params, [op([i]) for i in range(3)], backward)
    options = PlanOptions(chunk_numel=256, os_home="device", accumulate=3, tracks_grad_norm=True)
    assert planned(found, target(world_size=2), options).plan.defers_reduction


def without(plan: Plan, program: str, op: Op) -> Plan:
    """``plan`` with the first action of a kind left out of a program."""

    found = program_named(plan, program)
    at = next(i for i, a in enumerate(found.actions) if a.op is op)
    actions, numbers = ((*each[:at], *each[at + 1 :]) for each in (found.actions, found.numbers))
    return changed(plan, replace(found, actions=actions, numbers=numbers))


def changed(plan: Plan, program: Program) -> Plan:
    return replace(plan, programs=tuple(program if p.key == program.key else p for p in plan.programs))


@pytest.mark.parametrize(
    ("program", "op", "message"),
    [
        ("reduce_all", Op.REDUCE, "not reduced"),
        ("reduce_all", Op.RELEASE, "beyond the declared exit state"),
        ("accumulate_last", Op.REDUCE, "they must match"),
        ("backward_unreduced", Op.OPEN, "they must match"),
    ],
)
def test_a_plan_that_leaves_something_out_is_refused(program: str, op: Op, message: str) -> None:
    plan = planned(chain(4), target(world_size=2), RESIDENT).plan
    with pytest.raises(PlanError, match=message):
        verify(without(plan, program, op))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda again, twin: replace(twin, position="later", reduces=False), "forward_again has .*; they must match"),
        (lambda again, twin: replace(again, numbers=()), "forward_again f0 .*waits for f0, which does not come before"),
        (lambda again, twin: replace(again, numbers=again.numbers[1:]), r"forward_again cannot have the labels \("),
        (
            lambda again, twin: replace(again, numbers=tuple(n + 1 for n in again.numbers)),
            r"forward_again f\d `run fwd.0 .* does not match `run fwd.0 .*, f\d of forward",
        ),
        (lambda again, twin: replace(again, entry=twin.entry), "forward_again leads from cold to unreduced, not from"),
        (lambda again, twin: replace(again, reduces=True), "a plan has the programs .*, forward_again, .*; found"),
    ],
)
def test_a_variant_that_differs_in_more_than_exchanges_is_refused(
    change: Callable[[Program, Program], Program], message: str
) -> None:
    plan = planned(chain(4), target(world_size=2), RESIDENT).plan
    again = program_named(plan, "forward_again")
    other = change(again, plan.program("forward"))
    with pytest.raises(PlanError, match=message):
        verify(replace(plan, programs=tuple(other if p is again else p for p in plan.programs)))


def test_a_gather_in_place_of_a_run_is_refused() -> None:
    """A gather over groups that stand there already, in one program alone."""
    plan = planned(chain(4), target(world_size=2), RESIDENT).plan
    again, gather = program_named(plan, "forward_again"), plan.program("forward").actions[0]
    assert gather.op is Op.GATHER
    with pytest.raises(PlanError, match=r"forward_again .*gather g0.* gather has no place in program forward_again"):
        verify(changed(plan, replace(again, actions=(replace(gather, waits=()), *again.actions[1:]))))
