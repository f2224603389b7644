"""Who is resident: clean units are dropped, dirty ones written once, and blocks move in one piece."""

from hypothesis import given
from schedules import chain, op, param, planned, planned_somewhere, requests, schedule, target

from chunkc.ir.actions import Op
from chunkc.ir.schedule import Schedule
from chunkc.ir.tiers import Tier
from chunkc.passes import PlanOptions, Target

Request = tuple[Schedule, Target, PlanOptions]


@given(requests())
def test_only_chunks_with_gradients_are_written_back(request: Request) -> None:
    plan = planned_somewhere(*request).plan
    dirty: set[int] = set()
    for action in (a for name in ("forward", "backward") for a in plan.program(name).actions):
        if action.op is Op.STASH:
            dirty.add(action.index)
        elif action.op is Op.EVICT:
            dirty.remove(action.index)  # a KeyError here is a clean chunk that was copied back
        elif action.op is Op.DROP:
            assert action.index not in dirty
    moving = {c.index for c in plan.layout.owned() if c.home is Tier.HOST}
    assert not dirty & moving


def test_forward_keeps_what_backward_needs_first() -> None:
    plan = planned(chain(5), target(), PlanOptions(chunk_numel=64, os_home="host", max_slots=3)).plan
    assert [name for name, _ in plan.program("forward").exit.resident] == ["c2", "c3", "c4"]
    fetched = [a.target for a in plan.program("backward").actions if a.op is Op.FETCH]
    assert fetched == ["c1", "c0"]


def test_a_block_moves_in_one_piece_into_adjacent_slots() -> None:
    """``large`` spans three chunks; ``small`` must leave the range that the block takes."""
    params = [param("small", 64), param("large", 180)]
    found = schedule(params, [op([0]), op([1])], [op([1], [1]), op([0], [0])])
    plan = planned(found, target(3 * 256 + 720), PlanOptions(chunk_numel=64)).plan
    fetches = [(a.target, a.slot) for a in plan.program("forward").actions if a.op is Op.FETCH]
    assert fetches == [("c0", 0), ("c1", 0), ("c2", 1), ("c3", 2)]
    evicted = [a.target for a in plan.program("backward").actions if a.op is Op.EVICT]
    assert evicted == ["c1", "c2", "c3", "c0"]


def test_frozen_chunks_are_never_written() -> None:
    params = [param(f"p{i}", 64) for i in range(4)]
    found = schedule(params, [op([i]) for i in range(4)], [op([3], [3]), op([2]), op([1]), op([0])])
    plan = planned(found, target(), PlanOptions(chunk_numel=64, os_home="host", max_slots=2)).plan
    written = {a.target for a in plan.program("backward").actions if a.op is Op.EVICT}
    assert written == {"c0"} and plan.layout.params_of(0) == (3,)
