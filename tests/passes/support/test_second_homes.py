"""Second homes: which chunks get one, what begins when, and plans that compute what they should in any interleaving."""

from dataclasses import replace

import pytest
from costs import copies, rates, with_work
from interleave import find_wrong
from reference import ACCUMULATING, SEQUENCE
from schedules import chain, planned, target

from chunkc.cost.rates import CopyLaw, CostRates
from chunkc.cost.simulate import price
from chunkc.ir.actions import Op, Stream
from chunkc.ir.plan import Plan
from chunkc.passes import PlanOptions
from chunkc.passes.support.draft import Target

NUMEL = 64
NBYTES = NUMEL * 4
LAYERS = 6
HOST = PlanOptions(chunk_numel=NUMEL, os_home="host", max_slots=3)


def plan_with(num: int, where: Target | None = None, **options: object) -> Plan:
    where = target() if where is None else where
    return planned(chain(LAYERS), where, replace(HOST, num_second_homes=num, **options)).plan  # type: ignore[arg-type]


def with_homes(plan: Plan) -> list[int]:
    return [c.index for c in plan.layout.chunks if c.has_second_home]


def begun(plan: Plan, position: str = "first") -> list[int]:
    return [a.index for a in plan.program("backward", position).actions if a.op is Op.BEGIN]  # type: ignore[arg-type]


@pytest.mark.parametrize("num", range(LAYERS + 2))
def test_chunks_whose_gradients_land_first_have_second_homes(num: int) -> None:
    plan = plan_with(num)
    assert begun(plan) == list(reversed(range(LAYERS)))[:num] and sorted(begun(plan)) == with_homes(plan)
    assert plan.memory.host_nbytes - plan_with(0).memory.host_nbytes == 4 * NBYTES * min(num, LAYERS)


def test_an_update_begins_when_its_gradient_is_home() -> None:
    backward = plan_with(LAYERS).program("backward")
    evicts = {a.target: label for label, a in backward.labelled() if a.op is Op.EVICT}
    for _, action in backward.labelled():
        assert action.op is not Op.BEGIN or action.waits == (evicts[action.target],)


@pytest.mark.parametrize("spare", [0, 4 * NBYTES - 1, 4 * NBYTES, 9 * NBYTES])
def test_host_memory_bounds_them(spare: int) -> None:
    """16 bytes an element in fp32: fewer are made, and nothing is refused."""
    needed = plan_with(0).memory.host_nbytes
    plan = plan_with(LAYERS, target(host=needed + spare))
    assert len(with_homes(plan)) == spare // (4 * NBYTES)


def test_all_ranks_choose_the_same_groups() -> None:
    groups = []
    for rank in range(3):
        plan = plan_with(1, target(world_size=3, rank=rank))
        groups.append({plan.layout.group_of(c).index for c in with_homes(plan)})
    assert groups[0] == groups[1] == groups[2] and len(groups[0]) == 1


@pytest.mark.long(but="{'tracks_grad_norm': True}-6")
@pytest.mark.parametrize("num", [1, 3, LAYERS])
@pytest.mark.parametrize(
    "options", [{}, {"tracks_grad_norm": True}, {"streamed_share": 0.5}, {"accumulate": 2}], ids=str
)
def test_plans_compute_the_reference_in_every_interleaving(num: int, options: dict[str, object]) -> None:
    plan = plan_with(num, **options)
    assert begun(plan)
    assert find_wrong(plan, range(12), ACCUMULATING if plan.accumulate > 1 else SEQUENCE) == []


def test_a_begin_that_does_not_wait_is_found() -> None:
    """The oracle sees what the verifier refuses."""
    plan = plan_with(2)
    backward = plan.program("backward")
    early = tuple(replace(a, waits=()) if a.op is Op.BEGIN else a for a in backward.actions)
    broken = replace(plan, programs=tuple(replace(p, actions=early) if p is backward else p for p in plan.programs))
    assert find_wrong(broken, range(40)) != []


def test_micro_batches_before_the_last_begin_nothing() -> None:
    plan = plan_with(LAYERS, accumulate=3)
    by_program = [[a.index for a in p.actions if a.op is Op.BEGIN] for p in plan.iteration() if p.role == "backward"]
    assert by_program[:2] == [[], []] and len(by_program[2]) == LAYERS


def slow_host() -> CostRates:
    """An update takes as long as two segments."""
    return rates(copies=copies(CopyLaw(0.0, 64.0)), cpu_update_gparam_per_s={"float32": 8e-6})


def test_updates_that_began_leave_a_step_of_computing() -> None:
    """Simulated, with a decision; the last ones to land have too little of backward left."""
    times = [price(with_work(plan_with(num, tracks_grad_norm=True), 4), slow_host()).step_ms for num in (0, 2, 4, 6)]
    assert times[0] > times[1] > times[2] and min(times) < 0.9 * times[0], times


def test_updates_on_the_host_come_in_order_of_first_use_whether_begun_or_not() -> None:
    step = plan_with(3, tracks_grad_norm=True).program("step").actions
    assert [a.index for a in step if a.stream is Stream.CPU] == list(range(LAYERS))
