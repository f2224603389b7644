"""Waits: sufficient (the verifier), none to spare, and the same in every iteration."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from schedules import chain, planned, planned_somewhere, requests, target

from chunkc.errors import PlanError
from chunkc.ir.actions import Op, Stream, parse
from chunkc.ir.plan import Plan, Role
from chunkc.ir.schedule import Schedule
from chunkc.ir.verify import verify
from chunkc.passes import Options, Target
from chunkc.passes.draft import Item, decided
from chunkc.passes.hazards import Analysis, synchronise
from chunkc.passes.step import step_items


def item(text: str, reads: str = "", writes: str = "") -> Item:
    return Item(parse(text), tuple(reads.split()), tuple(writes.split()))


def without_wait(plan: Plan, program: str, position: int, wait: str) -> Plan:
    """``plan`` with one wait less; in ``step`` also in ``restore``, whose labels must agree."""
    names = {program, "restore"} if program == "step" else {program}
    programs = []
    for found in plan.programs:
        if found.name in names:
            action = found.actions[position]
            less = replace(action, waits=tuple(w for w in action.waits if w != wait))
            found = replace(found, actions=(*found.actions[:position], less, *found.actions[position + 1 :]))
        programs.append(found)
    return replace(plan, programs=tuple(programs))


@given(requests())
def test_third_and_later_iterations_wait_as_the_second(request: tuple[Schedule, Target, Options]) -> None:
    draft = planned_somewhere(*request).drafts[-1][1]
    forward, backward = decided(draft.items, "items")
    step = step_items(
        decided(draft.layout, "layout"), decided(draft.liveness, "liveness"), decided(draft.os_home, "home")
    )
    cycle: tuple[tuple[Role, tuple[Item, ...]], ...] = (("forward", forward), ("backward", backward), ("step", step))
    analysis = Analysis()
    rounds = [[analysis.run(role, items) for role, items in cycle] for _ in range(4)]
    assert rounds[1] == rounds[2] == rounds[3]


@pytest.mark.parametrize("num_slots", [1, 2, 3, 5])
@pytest.mark.parametrize("world_size", [1, 2])
def test_no_wait_can_be_left_out(num_slots: int, world_size: int) -> None:
    options = Options(chunk_numel=64, os_home="host", max_slots=num_slots * world_size)
    plan = planned(chain(6), target(world_size=world_size), options).plan
    tried = 0
    for program in plan.programs:
        if program.name == "restore":
            continue
        for position, action in enumerate(program.actions):
            for wait in action.waits:
                tried += 1
                with pytest.raises(PlanError):
                    verify(without_wait(plan, program.name, position, wait))
    assert tried >= 12


def test_read_after_write_write_after_read_and_write_after_write() -> None:
    forward = [
        item("fetch c0 -> d0 @h2d", "h0", "d0"),
        item("run fwd.0 @compute", "d0"),
        item("drop c0 <- d0 @compute", "", "d0"),
        item("fetch c1 -> d0 @h2d", "h1", "d0"),
    ]
    actions = synchronise(forward, [item("run bwd.0 @compute", "d0"), item("drop c1 <- d0 @compute", "", "d0")], [], [])
    assert [a.waits for a in actions[0]] == [("b1",), ("f0",), (), ("f2",)]
    assert [a.waits for a in actions[1]] == [("f3",), ()]


def test_a_hazard_against_the_last_run_of_the_same_program_gets_a_label_that_implies_it() -> None:
    """d0 is freed in forward and filled in the next: no label names that drop, but bwd.0 follows it in its queue."""
    forward = [item("fetch c0 -> d0 @h2d", "h0", "d0"), item("run fwd.0 @compute", "d0"),
               item("drop c0 <- d0 @compute", "", "d0")]  # fmt: skip
    actions = synchronise(forward, [item("run bwd.0 @compute")], [], [])
    assert [a.waits for a in actions[0]] == [("b0",), ("f0",), ()]


def test_a_hazard_that_no_label_can_name_is_an_error() -> None:
    forward = [item("fetch c0 -> d0 @h2d", "h0", "d0"), item("run fwd.0 @compute", "d0"),
               item("drop c0 <- d0 @compute", "", "d0")]  # fmt: skip
    with pytest.raises(PlanError, match="no label can order an action after forward 2"):
        synchronise(forward, [], [], [])


def test_updates_do_not_hold_back_what_they_do_not_touch() -> None:
    """The first fetch of the next forward waits for one update only, that of its own chunk."""
    plan = planned(chain(6), target(), Options(chunk_numel=64, os_home="host", max_slots=3)).plan
    fetches = [a for a in plan.program("forward").actions if a.op is Op.FETCH]
    order = [a.index for a in plan.program("step").actions]
    for fetch in fetches:
        assert [w for w in fetch.waits if w[0] == "s"] == [f"s{order.index(fetch.index)}"]
    assert all(a.stream is Stream.CPU for a in plan.program("step").actions)
