"""Order of updates, and the programs beside forward and backward."""

from dataclasses import replace

from hypothesis import given
from schedules import op, param, planned, planned_somewhere, requests, schedule, target

from chunkc.ir.actions import Op
from chunkc.ir.layout import ChunkList
from chunkc.ir.schedule import Schedule
from chunkc.passes import PlanOptions, Target

Request = tuple[Schedule, Target, PlanOptions]


def test_updates_follow_the_first_use_of_the_next_forward() -> None:
    """Chunks are numbered by dtype; forward uses the bfloat16 parameter between the two others."""
    params = [param("a", 64), param("half", 128, dtype="bfloat16"), param("b", 64)]
    found = schedule(params, [op([0]), op([1]), op([2])], [op([0, 1, 2], [0, 1, 2])])
    plan = planned(found, target(), PlanOptions(chunk_numel=64)).plan
    assert [plan.layout.params_of(c) for c in range(3)] == [(0,), (2,), (1,)]
    assert [a.target for a in plan.program("step").actions] == ["c0", "c2", "c1"]


@given(requests())
def test_every_trained_chunk_of_the_rank_is_updated_once_and_restored_alike(request: Request) -> None:
    plan = planned_somewhere(*request).plan
    updated = sorted(a.index for a in plan.program("step").actions if a.op is Op.UPDATE)
    assert updated == [c.index for c in plan.layout.owned() if c.list is ChunkList.TRAINED and c.used_numel]
    pairs = zip(plan.program("step").actions, plan.program("restore").actions, strict=True)
    for update, restore in pairs:
        assert restore == (replace(update, op=Op.RESTORE) if update.op is Op.UPDATE else update)


@given(requests())
def test_abandon_leaves_the_static_residents_alone(request: Request) -> None:
    plan = planned_somewhere(*request).plan
    abandon = plan.program("abandon")
    assert abandon.exit == plan.program("forward").entry == plan.program("step").exit
    assert {a.op for a in abandon.actions} <= {Op.DROP, Op.RELEASE}
    gone = {a.target for a in abandon.actions if a.op is Op.DROP}
    assert gone.isdisjoint(target for target, _ in abandon.exit.resident)
