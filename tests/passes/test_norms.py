"""Measuring gradients: every plan that does passes the verifier, which refuses what measures or waits too little."""

from dataclasses import replace

import pytest
from hypothesis import given
from schedules import (
    accumulating,
    chain,
    gpt_like,
    mixed,
    param,
    planned,
    planned_somewhere,
    requests,
    target,
    texts,
    without_wait,
)

from chunkc.errors import PlanError
from chunkc.ir.actions import LANDINGS, Op, Stream
from chunkc.ir.plan import Plan, Program
from chunkc.ir.schedule import Schedule
from chunkc.ir.verify import verify
from chunkc.passes import Planned, PlanOptions, Target, measuring_plan

Request = tuple[Schedule, Target, PlanOptions]
MEASURES = PlanOptions(chunk_numel=4096, os_home="host", tracks_grad_norm=True)


def gpt(options: PlanOptions = MEASURES, device_nbytes: int = 200_000) -> Planned:
    return planned_somewhere(gpt_like(2, 64, 500, dtype="float32"), target(device_nbytes), options)


@given(requests())
def test_every_measuring_plan_is_accepted_by_the_verifier(request: Request) -> None:
    found, where, options = request
    plan = planned_somewhere(found, where, replace(options, tracks_grad_norm=True)).plan
    backward, step = plan.program("backward").actions, plan.program("step").actions
    normed = [a.index for a in backward if a.op is Op.NORM]
    assert sorted(normed) == sorted({a.index for a in step if a.op is Op.UPDATE})
    assert [a.op for a in step].count(Op.DECIDE) == 1
    assert [a.op for a in backward].count(Op.SUM) == (where.world_size > 1)


@given(requests())
def test_ranks_add_up_their_norms_behind_whatever_else_they_exchange(request: Request) -> None:
    """All ranks carry out the same collectives in the same order, those that own nothing but padding too."""
    found, where, options = request
    options = replace(options, tracks_grad_norm=True)
    mine = planned_somewhere(found, where, options).plan
    budgets = (mine.memory.device_budget_nbytes, mine.memory.host_budget_nbytes)
    for rank in range(where.world_size):
        other = planned_somewhere(found, target(*budgets, where.world_size, rank), options).plan
        calls = [
            [(a.op, a.target) for name in ("forward", "backward", "step") for a in p.program(name).actions
             if a.stream is Stream.COMM and a.op not in (Op.RELEASE, Op.DROP, Op.NORM)]
            for p in (mine, other)
        ]  # fmt: skip
        assert calls[0] == calls[1]
        if where.world_size > 1:
            assert other.program("backward").actions[-1].op is Op.SUM and calls[0][-1] == (Op.SUM, "")


@pytest.mark.parametrize("rank", range(3))
def test_the_decision_of_several_ranks_waits_for_their_sum(rank: int) -> None:
    """Four chunks in groups of three: rank 0 owns two of them, rank 1 and 2 one and padding."""
    where = target(world_size=3, rank=rank)
    plan = planned(
        chain(4), where, PlanOptions(chunk_numel=64, os_home="host", max_slots=3, tracks_grad_norm=True)
    ).plan
    backward = plan.program("backward")
    norms = {i: a for i, a in enumerate(backward.actions) if a.op is Op.NORM}
    assert sorted(a.index for a in norms.values()) == [[0, 3], [1], [2]][rank]
    assert {a.stream for a in norms.values()} == {Stream.COMM}, "reductions are in order before, the sum behind"
    last = len(backward.actions) - 1
    assert str(backward.actions[last]) == "sum @comm"
    assert str(plan.program("step").actions[0]) == f"decide @compute after b{last}"
    with pytest.raises(PlanError, match=r"`decide @compute`.*reads sums without being ordered after b\d+ `sum @comm"):
        verify(without_wait(plan, "step", 0, f"b{last}"))
    on_compute = tuple(replace(a, stream=Stream.COMPUTE) if a.op is Op.NORM else a for a in backward.actions)
    programs = tuple(replace(p, actions=on_compute) if p is backward else p for p in plan.programs)
    with pytest.raises(PlanError, match=r"`norm c\d @compute.*without being ordered after b\d+ `reduce g\d"):
        verify(replace(plan, programs=programs))


def test_a_rank_without_norms_takes_part() -> None:
    """Two chunks in one group of three: rank 2 owns padding alone."""
    options = PlanOptions(chunk_numel=64, os_home="host", max_slots=3, tracks_grad_norm=True)
    plan = planned(chain(2), target(world_size=3, rank=2), options).plan
    backward, step = plan.program("backward").actions, plan.program("step").actions
    assert not [a for a in backward if a.op is Op.NORM] and backward[-1].op is Op.SUM
    assert [a.op for a in step] == [Op.DECIDE]


@given(accumulating())
def test_every_backward_of_a_step_measures_its_sums(request: Request) -> None:
    """In gradient chunks, each once and behind the last gradient that lands there; the step measures nothing."""
    found, where, options = request
    plan = planned_somewhere(found, where, replace(options, tracks_grad_norm=True)).plan
    beside = plan.layout.grad_chunks()
    updated = sorted({a.index for a in plan.program("step").actions if a.op is Op.UPDATE})
    for actions in (plan.program("backward").actions, plan.program("backward", "later").actions):
        measured = [(i, a.index) for i, a in enumerate(actions) if a.op is Op.NORM]
        assert sorted(chunk for _, chunk in measured) == updated
        for position, chunk in measured:
            landed = [i for i, a in enumerate(actions) if a.op in LANDINGS and a.index == beside[chunk]]
            assert landed and landed[-1] < position
    assert not [a for a in plan.program("step").actions if a.op is Op.NORM]


def test_a_sum_that_is_measured_too_early_is_refused() -> None:
    plan = planned(
        chain(3), target(), PlanOptions(chunk_numel=64, os_home="host", accumulate=3, tracks_grad_norm=True)
    ).plan
    position = next(i for i, a in enumerate(plan.program("backward").actions) if a.op is Op.NORM)

    def swapped(program: Program) -> Program:
        if program.role != "backward":
            return program
        actions = list(program.actions)
        landing, norm = actions[position - 1 : position + 1]
        actions[position - 1 : position + 1] = replace(norm, waits=landing.waits), landing
        return replace(program, actions=tuple(actions))

    with pytest.raises(PlanError, match=r"backward b\d+ `norm c\d.*contribution of micro-batch 1 of 1 .* is lost"):
        verify(replace(plan, programs=tuple(map(swapped, plan.programs))))


@given(mixed())
def test_a_plan_measures_later_with_nothing_else_changed(request: Request) -> None:
    """The same programs, wherever updates run, but for norms, the decision, what waits, and the order of updates on
    the host, which the decision releases all at once."""
    result = planned_somewhere(*request)
    plan = measuring_plan(result)
    verify(plan)
    assert plan.tracks_grad_norm and not result.plan.tracks_grad_norm
    assert (plan.layout, plan.segments, plan.memory) == (
        result.plan.layout,
        result.plan.segments,
        result.plan.memory,
    )
    for program in result.plan.programs:
        others = [a for a in plan.program(*program.key).actions if a.op not in (Op.NORM, Op.SUM, Op.DECIDE)]
        mine, wanted = ([replace(a, waits=()) for a in actions] for actions in (others, program.actions))
        for on_host in (True, False):
            found, same = ([a for a in actions if (a.stream is Stream.CPU) is on_host] for actions in (mine, wanted))
            assert sorted(map(str, found)) == sorted(map(str, same)) if on_host else found == same


def test_a_chunk_is_measured_when_its_last_gradient_has_landed() -> None:
    """On the compute stream, behind the stash, without a wait; its eviction waits for that."""
    result = gpt()
    actions = list(result.plan.program("backward").labelled())
    for position, (label, action) in enumerate(actions):
        if action.op is Op.NORM:
            _, before = actions[position - 1]
            assert (before.op, before.target, action.waits) == (Op.STASH, action.target, ())
            evict = next(a for _, a in actions[position:] if a.op is Op.EVICT and a.target == action.target)
            assert label in evict.waits
    first = texts(result, "step")[0]
    assert first == "s0 decide @compute"


def test_only_updates_wait_for_the_decision() -> None:
    plan = gpt().plan
    waiting = [a.op for a in plan.program("step").actions if "s0" in a.waits]
    assert waiting and set(waiting) == {Op.UPDATE}
    assert all(a.stream is Stream.CPU for a in plan.program("step").actions if a.op is Op.UPDATE)


def without(plan: Plan, program: str, op: Op) -> Plan:
    """``plan`` with the last ``op`` of a program replaced by one of another chunk's: its own is not done."""
    programs = []
    for found in plan.programs:
        if found.name == program:
            chosen = [i for i, a in enumerate(found.actions) if a.op is op]
            other = replace(found.actions[chosen[0]], waits=found.actions[chosen[-1]].waits)
            actions = (*found.actions[: chosen[-1]], other, *found.actions[chosen[-1] + 1 :])
            found = replace(found, actions=actions)
        programs.append(found)
    return replace(plan, programs=tuple(programs))


def test_a_norm_that_is_missing_is_refused() -> None:
    with pytest.raises(PlanError, match=r"norm c\d+ @compute`.*(enters the norm twice|not on the device|stale)"):
        verify(without(gpt().plan, "backward", Op.NORM))


def test_an_update_that_does_not_wait_is_refused() -> None:
    plan = gpt().plan
    step = plan.program("step").actions
    position = next(i for i, a in enumerate(step) if "s0" in a.waits)
    with pytest.raises(PlanError, match=r"update c\d+.*reads decision without being ordered after s0 `decide"):
        verify(without_wait(plan, "step", position, "s0"))


def test_a_decision_follows_updates_of_what_no_graph_touches() -> None:
    """They read the one before, and nothing that comes in between waits for them but this."""
    base = chain(3)
    found = replace(base, params=(*base.params, param("elsewhere", 64)), also_trained=(3,))
    plan = planned(found, target(), replace(MEASURES, chunk_numel=64, max_slots=2)).plan
    updates = {label for label, a in plan.program("step").labelled() if str(a).startswith("update c3 @cpu")}
    backward = plan.program("backward").actions
    [(position, wait)] = [(i, w) for i, a in enumerate(backward) for w in a.waits if w in updates]
    with pytest.raises(
        PlanError, match=r"decide @compute.*writes decision without being ordered after s\d+ `update c3"
    ):
        verify(without_wait(plan, "backward", position, wait))


def test_resident_plans_measure_too() -> None:
    plan = planned(gpt_like(1, 64, 500), target(), PlanOptions(tracks_grad_norm=True)).plan
    assert not [a for p in plan.programs for a in p.actions if a.waits]
    assert plan.tracks_grad_norm
