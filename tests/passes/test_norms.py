"""Measuring gradients: every plan that does passes the verifier, which refuses what measures or waits too little."""

from __future__ import annotations

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
from chunkc.passes import Options, Planned, Target, measuring_plan

Request = tuple[Schedule, Target, Options]
MEASURES = Options(chunk_numel=4096, os_home="host", measures=True)


def gpt(options: Options = MEASURES, device_nbytes: int = 200_000) -> Planned:
    return planned_somewhere(gpt_like(2, 64, 500, dtype="float32"), target(device_nbytes), options)


@given(requests())
def test_every_measuring_plan_is_accepted_by_the_verifier(request: Request) -> None:
    found, where, options = request
    plan = planned_somewhere(found, where, replace(options, measures=True)).plan
    backward, step = plan.program("backward").actions, plan.program("step").actions
    normed = [a.index for a in backward if a.op is Op.NORM]
    assert sorted(normed) == sorted({a.index for a in step if a.op is Op.UPDATE})
    assert [a.op for a in step].count(Op.DECIDE) == 1


@given(accumulating())
def test_every_backward_of_a_step_measures_its_sums(request: Request) -> None:
    """In gradient chunks, each once and behind the last gradient that lands there; the step measures nothing."""
    found, where, options = request
    plan = planned_somewhere(found, where, replace(options, measures=True)).plan
    beside = plan.layout.grad_chunks()
    updated = sorted({a.index for a in plan.program("step").actions if a.op is Op.UPDATE})
    for name in ("backward", "accumulate"):
        actions = plan.program(name).actions
        measured = [(i, a.index) for i, a in enumerate(actions) if a.op is Op.NORM]
        assert sorted(chunk for _, chunk in measured) == updated
        for position, chunk in measured:
            landed = [i for i, a in enumerate(actions) if a.op in LANDINGS and a.index == beside[chunk]]
            assert landed and landed[-1] < position
    assert not [a for a in plan.program("step").actions if a.op is Op.NORM]


def test_a_sum_that_is_measured_too_early_is_refused() -> None:
    """In both backwards, whose actions are the same."""
    plan = planned(chain(3), target(), Options(chunk_numel=64, os_home="host", accumulate=3, measures=True)).plan
    position = next(i for i, a in enumerate(plan.program("backward").actions) if a.op is Op.NORM)

    def swapped(program: Program) -> Program:
        if program.name not in ("backward", "accumulate"):
            return program
        actions = list(program.actions)
        landing, norm = actions[position - 1 : position + 1]
        actions[position - 1 : position + 1] = replace(norm, waits=landing.waits), landing
        return replace(program, actions=tuple(actions))

    with pytest.raises(PlanError, match=r"backward b\d+ `norm c\d.*contribution of micro-batch 1 of 1 .* is lost"):
        verify(replace(plan, programs=tuple(map(swapped, plan.programs))))


@given(mixed())
def test_a_plan_measures_later_with_nothing_else_changed(request: Request) -> None:
    """The same programs, wherever updates run, but for norms, the decision and what waits."""
    result = planned_somewhere(*request)
    plan = measuring_plan(result)
    verify(plan)
    assert plan.measures and not result.plan.measures
    assert (plan.layout, plan.segments, plan.memory) == (
        result.plan.layout,
        result.plan.segments,
        result.plan.memory,
    )
    for program in result.plan.programs:
        others = [a for a in plan.program(program.name).actions if a.op not in (Op.NORM, Op.DECIDE)]
        assert [replace(a, waits=()) for a in others] == [replace(a, waits=()) for a in program.actions]


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
    """Nothing moves; norms, the decision and updates follow each other on one stream, without a wait."""
    plan = planned(gpt_like(1, 64, 500), target(), Options(measures=True)).plan
    assert not [a for p in plan.programs for a in p.actions if a.waits]
    assert plan.measures
