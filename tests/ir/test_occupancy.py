"""Occupancy of the arena: as the verifier's own replay has it, and the same for all that report it."""

from dataclasses import replace

import pytest
import schedules
from hypothesis import given
from schedules import chain, mixed, planned_somewhere

from chunkc.cost.read import peaks_of
from chunkc.ir.actions import Op, parse
from chunkc.ir.occupancy import Occupancy
from chunkc.ir.plan import TRANSITIONS, Plan, Program
from chunkc.ir.schedule import Schedule
from chunkc.ir.verify import replayed_programs
from chunkc.ir.verify.happens_before import HappensBefore
from chunkc.ir.verify.replay import Facts, Machine
from chunkc.ir.verify.training import EFFECTS, begin, finish
from chunkc.passes import PlanOptions, Target
from chunkc.report.memory_curve import Kind, memory_curve
from chunkc.report.moments import moments
from chunkc.report.text import full_text
from chunkc.runtime.execution.moment_text import moment_text

NUMEL = 64
CHUNK_NBYTES = 4 * NUMEL


def two_ranks(num_replicas: int = 1, accumulate: int = 1, rank: int = 1) -> Plan:
    where = replace(schedules.target(3 * 2 * CHUNK_NBYTES, world_size=2, rank=rank), num_replicas=num_replicas)
    options = PlanOptions(chunk_numel=NUMEL, accumulate=accumulate)
    return planned_somewhere(chain(6, numel=2 * NUMEL), where, options).plan


SHARED = {
    "two ranks": two_ranks(),
    "the first of two ranks": two_ranks(rank=0),
    "two nodes of two ranks": two_ranks(num_replicas=2),
    "micro-batches": two_ranks(accumulate=4),
}


def disagreements(plan: Plan) -> list[str]:
    """Actions behind which the arena does not hold what the verifier's replay has in it."""
    programs = replayed_programs(plan)
    machine, order = Machine(Facts(plan), programs[0].entry), HappensBefore()
    occupancy = Occupancy.of(plan.layout, programs[0].entry.resident)
    found = []
    for program in programs:
        if program.role in ("resume", "reduce_all"):
            order.join()
        order.begin(program)
        begin(machine, program)
        for position, action in enumerate(program.actions):
            EFFECTS[action.op](machine, order.issue(program, position, ""))
            occupancy.apply(action)
            used_nbytes = sum(plan.layout.slots[slot].nbytes for slot in machine.occupant)
            if (occupancy.slot_of, occupancy.used_nbytes) != (machine.slot_of, used_nbytes):
                found.append(f"{program.name} {program.label(position)} {action}")
        finish(machine, program)
        if program.role in TRANSITIONS | {"evaluate"}:
            order.join()
    return found


@pytest.mark.parametrize("name", SHARED)
def test_it_holds_what_the_verifier_has_there(name: str) -> None:
    assert disagreements(SHARED[name]) == []


@given(request=mixed())
def test_it_holds_what_the_verifier_has_there_in_any_plan(request: tuple[Schedule, Target, PlanOptions]) -> None:
    assert disagreements(planned_somewhere(*request).plan) == []


def used_before_runs(plan: Plan, program: Program) -> list[int]:
    """Bytes of the slots that the verifier's replay finds taken before each segment of ``program``."""
    machine, order, found = Machine(Facts(plan), program.entry), HappensBefore(), []
    order.begin(program)
    begin(machine, program)
    for position, action in enumerate(program.actions):
        if action.op is Op.RUN:
            found.append(sum(plan.layout.slots[slot].nbytes for slot in machine.occupant))
        EFFECTS[action.op](machine, order.issue(program, position, ""))
    return found


@pytest.mark.parametrize("name", SHARED)
def test_reports_curve_simulation_and_error_count_the_chunks_of_other_ranks(name: str) -> None:
    plan = SHARED[name]
    forward = plan.program("forward")
    assert any(a.op is Op.GATHER for a in forward.actions)
    wanted = used_before_runs(plan, forward)
    assert max(wanted) > max(len(s.reads) for s in plan.segments) * CHUNK_NBYTES, "chunks of both ranks"
    assert [m.used_nbytes for m in moments(plan, forward)] == wanted
    runs = [position for position, action in enumerate(forward.actions) if action.op is Op.RUN]
    assert [curve_nbytes(plan, position) for position in runs] == wanted
    for position, nbytes in zip(runs, wanted, strict=True):
        assert f"bytes, {nbytes} of them in use" in moment_text(plan, forward, position)
    assert peaks_of(plan).arena_used_nbytes == max(
        m.used_nbytes for p in plan.programs if p.is_repeated for m in moments(plan, p)
    )


def curve_nbytes(plan: Plan, position: int) -> int:
    """What the curve has in the arena while action ``position`` of the iteration is carried out."""
    curve = memory_curve(plan, None)
    piece = next(i for i, end in enumerate(curve.edges[1:]) if end > position)
    in_arena = (Kind.STATES, Kind.PARAMETERS, Kind.GRADIENTS, Kind.GROUPS)
    return sum(curve.nbytes[kind][piece] for kind in in_arena)


def test_groups_count_as_gathered_until_their_remote_chunks_leave() -> None:
    layout = SHARED["two ranks"].layout
    occupancy = Occupancy.of(layout, [("c1", 1), ("c3", 3)])
    found = []
    for text in ("gather g1 @comm", "gather g0 @comm", "reduce g0 @comm", "release g1 @comm", "release g0 @comm"):
        occupancy.apply(parse(text))
        found.append((occupancy.gathered(), occupancy.used_nbytes))
    assert found == [((1,), 768), ((0, 1), 1024), ((0, 1), 1024), ((0,), 768), ((), 512)]


def test_a_group_that_is_opened_does_not_count_as_gathered() -> None:
    occupancy = Occupancy.of(SHARED["two ranks"].layout, [("c1", 1), ("c3", 3)])
    found = []
    for text in ("open c0 -> d0 @h2d", "release g0 @comm", "gather g0 @comm"):
        occupancy.apply(parse(text))
        found.append((occupancy.gathered(), occupancy.used_nbytes))
    assert found == [((), 768), ((), 512), ((0,), 768)]


def test_the_text_names_the_chunks_of_other_ranks() -> None:
    lines = [line for line in full_text(SHARED["two ranks"]).splitlines() if line.startswith("  # moment fwd.")]
    assert lines[0].endswith("resident c0-3 in d0-3; gathered g0 g1")
