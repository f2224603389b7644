"""Copies start as early as their slots allow, in order of need; segments merge where nothing stands between."""

from hypothesis import given
from schedules import chain, op, param, planned, planned_somewhere, requests, schedule, target

from chunkc.ir.actions import Op
from chunkc.ir.plan import Program
from chunkc.ir.schedule import Schedule
from chunkc.passes import PlanOptions, Target

Request = tuple[Schedule, Target, PlanOptions]


def lead(program: Program, chunk: str) -> int:
    actions = [str(a) for a in program.actions]
    at = next(i for i, text in enumerate(actions) if text.startswith(f"fetch {chunk} "))
    user = next(i for i, a in enumerate(program.actions) if a.op is Op.RUN and program.label(at) in a.waits)
    return sum(a.op is Op.RUN for a in program.actions[at:user])


def test_a_fetch_runs_ahead_by_the_slots_that_there_are() -> None:
    for num_slots in (2, 3, 4):
        options = PlanOptions(chunk_numel=64, os_home="host", max_slots=num_slots)
        forward = planned(chain(8), target(), options).plan.program("forward")
        assert [lead(forward, f"c{i}") for i in range(8)] == [*range(num_slots), *[num_slots - 1] * (8 - num_slots)]


@given(requests())
def test_fetches_are_issued_in_order_of_need(request: Request) -> None:
    """Along the copy stream, the runs that first use what is fetched never go backwards."""
    plan = planned_somewhere(*request).plan
    for name in ("forward", "backward"):
        needed: list[int] = []
        actions = plan.program(name).actions
        for position, action in enumerate(actions):
            if action.op is Op.FETCH:
                unit_runs = [
                    i
                    for i, later in enumerate(actions)
                    if i > position and later.op is Op.RUN
                    and action.index in plan.layout.chunks_of(
                        plan.segment(later.target).reads + plan.segment(later.target).lands
                    )
                ]  # fmt: skip
                if unit_runs:
                    needed.append(unit_runs[0])
        if plan.layout.world_size == 1 and all(p.num_chunks < 2 for p in plan.layout.placements):
            assert needed == sorted(needed)


def test_segments_merge_where_no_action_stands_between() -> None:
    """a and b stay resident: one segment, though no operator needs both; c needs a place and a cut."""
    params = [param(name, 64) for name in "abc"]
    found = schedule(params, [op([0]), op([1]), op([0]), op([1]), op([2])], [op([2]), op([0, 1, 2], [0, 1, 2])])
    plan = planned(found, target(), PlanOptions(chunk_numel=64, os_home="host")).plan
    assert [(s.name, s.first_op, s.end_op) for s in plan.segments] == [
        ("fwd.0", 0, 1), ("fwd.1", 1, 4), ("fwd.2", 4, 5), ("bwd.0", 0, 2),
    ]  # fmt: skip


def test_segments_merge_up_to_the_last_byte_of_the_budget() -> None:
    """Merged, x's gradient (256 bytes) is alive beside the 1000 live bytes of the operator that reads b."""
    params = [param("x", 64), param("y", 64), param("b", 128)]
    backward = [op([0], [0]), op([2], live=1000), op([1, 2], [1, 2])]
    found = schedule(params, [op([0, 1]), op([2])], backward)
    options = PlanOptions(chunk_numel=128, os_home="host")
    bounds = []
    for cap in (1255, 1256):
        plan = planned(found, target(2 * 512 + cap), options).plan
        bounds.append([(s.first_op, s.end_op, s.live_nbytes) for s in plan.graph_segments("backward")])
    assert bounds == [[(0, 1, 256), (1, 3, 1000)], [(0, 3, 1256)]]


def test_copies_of_one_iteration_do_not_pile_up_behind_the_next_use() -> None:
    """A unit is not fetched again before its last stay has ended, even where a slot is free earlier."""
    params = [param("small", 64), param("large", 180), param("other", 64)]
    found = schedule(params, [op([0]), op([1]), op([0]), op([2])], [op([2], [2]), op([0], [0]), op([1], [1])])
    for extra in range(3):
        plan = planned(found, target((3 + extra) * 256 + 720), PlanOptions(chunk_numel=64, os_home="host")).plan
        standing: set[str] = set()
        for action in plan.program("forward").actions:
            if action.op is Op.FETCH:
                assert action.target not in standing
                standing.add(action.target)
            elif action.op in (Op.DROP, Op.EVICT):
                standing.remove(action.target)
