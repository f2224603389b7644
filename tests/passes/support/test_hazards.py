"""Waits: sufficient (the verifier), none to spare, and the same in every iteration."""

import pytest
from hypothesis import given
from schedules import chain, planned, planned_somewhere, requests, target, without_wait

from chunkc.errors import PlanError
from chunkc.ir.actions import Op, Stream, parse
from chunkc.ir.plan import Role
from chunkc.ir.schedule import Schedule
from chunkc.ir.verify import verify
from chunkc.passes import PlanOptions, Target
from chunkc.passes.support.draft import ActionAccess, decided
from chunkc.passes.support.hazards import Analysis, synchronise
from chunkc.passes.support.updates import on_host, step_accesses


def item(text: str, reads: str = "", writes: str = "") -> ActionAccess:
    return ActionAccess(parse(text), tuple(reads.split()), tuple(writes.split()))


@given(requests())
def test_third_and_later_iterations_wait_as_the_second(request: tuple[Schedule, Target, PlanOptions]) -> None:
    draft = planned_somewhere(*request).drafts[-1][1]
    forward, backward = decided(draft.accesses, "actions")
    layout, liveness = decided(draft.layout, "layout"), decided(draft.liveness, "liveness")
    step = step_accesses(layout, liveness, 0.0, on_host(layout, liveness, 0.0))
    cycle: tuple[tuple[Role, tuple[ActionAccess, ...]], ...] = (
        ("forward", forward),
        ("backward", backward),
        ("step", step),
    )
    analysis = Analysis()
    rounds = [[analysis.run(role, items) for role, items in cycle] for _ in range(4)]
    assert rounds[1] == rounds[2] == rounds[3]


@pytest.mark.parametrize("num_slots", [1, 2, 3, 5])
@pytest.mark.parametrize("world_size", [1, 2])
def test_no_wait_can_be_left_out(num_slots: int, world_size: int) -> None:
    options = PlanOptions(chunk_numel=64, os_home="host", max_slots=num_slots * world_size)
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
    backward = [item("run bwd.0 @compute", "d0"), item("drop c1 <- d0 @compute", "", "d0")]
    actions = synchronise(forward, backward, [], [], {})
    assert [a.waits for a in actions[0]] == [("b1",), ("f0",), (), ("f2",)]
    assert [a.waits for a in actions[1]] == [("f3",), ()]


def test_a_hazard_against_the_last_run_of_the_same_program_gets_a_label_that_implies_it() -> None:
    """d0 is freed in forward and filled in the next: no label names that drop, but bwd.0 follows it in its queue."""
    forward = [item("fetch c0 -> d0 @h2d", "h0", "d0"), item("run fwd.0 @compute", "d0"),
               item("drop c0 <- d0 @compute", "", "d0")]  # fmt: skip
    actions = synchronise(forward, [item("run bwd.0 @compute")], [], [], {})
    assert [a.waits for a in actions[0]] == [("b0",), ("f0",), ()]


def test_a_hazard_that_no_label_can_name_is_an_error() -> None:
    forward = [item("fetch c0 -> d0 @h2d", "h0", "d0"), item("run fwd.0 @compute", "d0"),
               item("drop c0 <- d0 @compute", "", "d0")]  # fmt: skip
    with pytest.raises(PlanError, match="no label can order an action after forward 2"):
        synchronise(forward, [], [], [], {})


def test_updates_do_not_hold_back_what_they_do_not_touch() -> None:
    """A fetch of the next forward waits for no later update than that of its own chunk, and not twice."""
    plan = planned(chain(6), target(), PlanOptions(chunk_numel=64, os_home="host", max_slots=3)).plan
    fetches = [a for a in plan.program("forward").actions if a.op is Op.FETCH]
    order = [a.index for a in plan.program("step").actions]
    assert order == [5, 3, 1, 0, 2, 4]
    known = -1
    for fetch in fetches:
        own = order.index(fetch.index)
        assert [w for w in fetch.waits if w[0] == "s"] == ([f"s{own}"] if own > known else [])
        known = max(known, own)
    assert all(a.stream is Stream.CPU for a in plan.program("step").actions)


SHARED = {"d0": ("d0", "d9"), "d1": ("d1", "d9"), "d9": ("d0", "d1", "d9")}


def test_what_touches_the_same_bytes_waits_under_whichever_name() -> None:
    """d9 lies over d0 and d1: it is filled when both are free, and each is filled when d9 is."""
    forward = [item("fetch c0 -> d0 @h2d", "h0", "d0"), item("fetch c1 -> d1 @h2d", "h1", "d1"),
               item("run fwd.0 @compute", "d0 d1")]  # fmt: skip
    backward = [item("evict c0 <- d0 @d2h", "", "d0 h0"), item("run bwd.0 @compute", "d1")]
    step = [item("load os0 -> d9 @h2d", "o0", "d9"), item("store os0 <- d9 @d2h", "", "d9 o0"),
            item("fetch c2 -> d1 @h2d", "h2", "d1"), item("drop c2 <- d1 @compute", "", "d1")]  # fmt: skip
    actions = synchronise(forward, backward, step, [], SHARED)
    assert [a.waits for a in actions[2]] == [("b0", "b1"), ("s0",), ("s1",), ("s2",)]
    assert [a.waits for a in actions[0]] == [(), ("s3",), ("f1",)]  # s2 precedes f0 on its stream, and waited for s1


def test_a_user_of_some_bytes_does_not_hide_the_users_of_others() -> None:
    """d0 is written after d9 and before d1: the one that wrote d9's other half still counts for d1."""
    analysis = Analysis(SHARED)
    analysis.run("step", [item("store os0 <- d9 @d2h", "", "d9")])
    found = analysis.run("forward", [item("fetch c0 -> d0 @h2d", "", "d0"), item("run fwd.0 @compute", "", "d1")])
    assert [a.waits for a in found] == [("s0",), ("s0",)]
