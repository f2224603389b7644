"""Pass ``evaluate``: forwards without gradients are planned in the training's layout, and verified beside it."""

from dataclasses import replace

import pytest
from hypothesis import given
from schedules import PLENTY, chain, check, op, param, planned, planned_somewhere, requests, schedule, target, texts

from chunkc.errors import BudgetError, PlanError
from chunkc.ir.actions import Stream
from chunkc.ir.layout import Layout
from chunkc.ir.plan import Plan
from chunkc.ir.schedule import GraphSchedule, Schedule
from chunkc.ir.tiers import Tier
from chunkc.ir.verify import verify, verify_beside
from chunkc.passes import PlanOptions, Target, make_evaluation_plan


def forward_of(found: Schedule) -> Schedule:
    return replace(found, backward=GraphSchedule("backward", ()))


def evaluation(found: Schedule, where: Target, layout: Layout) -> Plan:
    return make_evaluation_plan(forward_of(found), where, layout=layout, check=check).plan


@given(requests())
def test_every_evaluation_is_verified_beside_its_training(request: tuple[Schedule, Target, PlanOptions]) -> None:
    training = planned_somewhere(*request).plan
    where = target(training.memory.device_budget_nbytes, PLENTY, training.layout.world_size, training.layout.rank)
    plan = evaluation(request[0], where, training.layout)
    verify(plan)
    verify_beside(plan, training)
    assert plan.memory.device_peak_nbytes <= where.budget_nbytes(Tier.DEVICE)
    assert plan.moved_nbytes(Stream.D2H) == 0
    if any(c.home is Tier.DEVICE for c in training.layout.chunks):
        assert plan.moved_nbytes(Stream.H2D) == 0
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_json(plan.to_json()).digest() == plan.digest()


def test_chunks_pass_through_the_slots_and_leave() -> None:
    training = planned(chain(4, 64), target(768), PlanOptions(chunk_numel=64))
    layout = training.plan.layout
    assert len(layout.slots) == 2
    found = make_evaluation_plan(forward_of(chain(4, 64)), target(768), layout=layout, check=check)
    assert texts(found, "evaluate") == [
        "e0 fetch c0 -> d0 @h2d",
        "e1 fetch c1 -> d1 @h2d",
        "e2 run fwd.0 @compute after e0",
        "e3 drop c0 <- d0 @compute",
        "e4 fetch c2 -> d0 @h2d after e3",
        "e5 run fwd.1 @compute after e1",
        "e6 drop c1 <- d1 @compute",
        "e7 fetch c3 -> d1 @h2d after e6",
        "e8 run fwd.2 @compute after e4",
        "e9 run fwd.3 @compute after e7",
        "e10 drop c2 <- d0 @compute",
        "e11 drop c3 <- d1 @compute",
    ]
    assert found.plan.program("evaluate").entry == found.plan.program("evaluate").exit
    assert found.plan.moved_nbytes(Stream.H2D) == 4 * 256


def test_everything_resident_moves_nothing() -> None:
    training = planned(chain(4, 64), target(), PlanOptions(chunk_numel=64))
    plan = evaluation(chain(4, 64), target(), training.plan.layout)
    assert [str(a) for a in plan.program("evaluate").actions] == ["run fwd.0 @compute"]
    assert plan.program("evaluate").entry == training.plan.program("forward").entry


def test_activations_that_do_not_fit_beside_the_arena_are_refused_with_numbers() -> None:
    layout = planned(chain(4, 64), target(768), PlanOptions(chunk_numel=64)).plan.layout
    with pytest.raises(BudgetError, match=r"it needs 812 bytes of device memory.*gives 768") as caught:
        evaluation(chain(4, 64, live=300), target(768), layout)
    assert (caught.value.missing_nbytes, caught.value.min_device_nbytes) == (44, 812)
    assert evaluation(chain(4, 64, live=300), target(812), layout).memory.device_peak_nbytes == 812


def test_a_parameter_that_training_does_not_use_is_refused_by_name() -> None:
    params = [param("used", 64), param("only_in_evaluation", 64)]
    layout = planned(schedule(params, [op([0])], [op([], [0])]), target()).plan.layout
    with pytest.raises(PlanError, match="'only_in_evaluation' stands in a chunk of unused parameters"):
        evaluation(schedule(params, [op([1])], []), target(), layout)


def test_a_training_iteration_is_no_evaluation() -> None:
    layout = planned(chain(2), target()).plan.layout
    with pytest.raises(ValueError, match="no backward graph, found 2 operators"):
        make_evaluation_plan(chain(2), target(), layout=layout)


def test_plans_of_other_layouts_do_not_stand_beside_each_other() -> None:
    resident, tight = (planned(chain(4, 64), target(n), PlanOptions(chunk_numel=64)).plan for n in (PLENTY, 768))
    plan = evaluation(chain(4, 64), target(), resident.layout)
    verify_beside(plan, resident)
    with pytest.raises(PlanError, match="another layout"):
        verify_beside(plan, tight)
