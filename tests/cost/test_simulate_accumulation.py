"""Iterations of several micro-batches in the simulator: worked out by hand, and what is taken of many of them."""

from dataclasses import replace

import pytest
from costs import LINKS, RATES, rates, with_work
from schedules import chain, planned, target

from chunkc.cost import simulate_with
from chunkc.cost.simulate import flops_of, price
from chunkc.ir.actions import Op, Stream
from chunkc.ir.plan import Plan
from chunkc.passes import PlanOptions

HOST = PlanOptions(chunk_numel=64, os_home="host", max_slots=3)
RESIDENT = PlanOptions(chunk_numel=64, os_home="device")


def plan_with(num: int, options: PlanOptions) -> Plan:
    return with_work(planned(chain(3), target(), replace(options, accumulate=num)).plan, 3)


def test_a_resident_step_by_hand() -> None:
    """One segment a graph, of 3 ms; three gradients land, each in 1 ms, or 1.5 ms where one is added to; three updates
    on the device, of 1 ms each. Nothing else takes time."""
    for num, step_ms in ((2, 2 * 6 + 3 + 4.5 + 3), (4, 4 * 6 + 3 + 3 * 4.5 + 3)):
        timeline = simulate_with(plan_with(num, RESIDENT), RATES)
        assert timeline.step_ms == pytest.approx(step_ms)
        assert timeline.stream(Stream.COMPUTE).busy_ms == pytest.approx(step_ms)


@pytest.mark.parametrize("num", [2, 3, 5])
def test_every_action_of_every_micro_batch_is_simulated(num: int) -> None:
    plan = plan_with(num, HOST)
    timeline = simulate_with(plan, RATES)
    labels = [s.label for s in timeline.slices]
    assert sorted(labels) == sorted(label for _, label, _ in plan.labelled()) and len(set(labels)) == len(labels)
    for stream in (Stream.H2D, Stream.D2H):
        assert timeline.stream(stream).nbytes == plan.moved_nbytes(stream)
    assert {s.program for s in timeline.slices} == {"forward", "backward", "accumulate", "step"}


def test_counts_are_those_of_all_micro_batches() -> None:
    plan = replace(plan_with(4, HOST), num_tokens=10, num_samples=2)
    timeline = simulate_with(plan, RATES)
    assert (timeline.num_tokens, timeline.num_samples) == (40, 8)
    one, four = (flops_of(plan), timeline.flops)
    assert (four.model, four.hardware, four.patrickstar) == (
        4 * one.model,
        4 * one.hardware,
        4 * (one.patrickstar or 0),
    )
    assert four.patrickstar


@pytest.mark.parametrize("options", [HOST, RESIDENT, replace(HOST, streamed_share=0.5)])
def test_the_price_of_many_micro_batches_is_that_of_the_simulation(options: PlanOptions) -> None:
    plan = plan_with(9, options)
    timeline, found = simulate_with(plan, RATES), price(plan, RATES)
    assert found.step_ms == pytest.approx(timeline.step_ms, rel=0.01)
    assert found.compute_ms == pytest.approx(timeline.stream(Stream.COMPUTE).alone_ms)
    assert found.num_actions == sum(price(replace(plan, accumulate=num), RATES).num_actions for num in (2, 3))


@pytest.mark.parametrize("rank", range(2))
@pytest.mark.parametrize("options", [replace(HOST, max_slots=4), RESIDENT], ids=["moving", "resident"])
def test_micro_batches_of_several_ranks_are_simulated(options: PlanOptions, rank: int) -> None:
    """The sums are reduced in every one of them, or in the last; the link moves what the plan says."""
    options = replace(options, accumulate=3, tracks_grad_norm=True)
    plan = with_work(planned(chain(3), target(world_size=2, rank=rank), options).plan, 3)
    timeline = simulate_with(plan, rates(links=LINKS))
    reduces = [a for _, _, a in plan.labelled() if a.op is Op.REDUCE]
    sums = [a for _, _, a in plan.labelled() if a.op is Op.SUM]
    num_times = 1 if plan.defers_reduction else 3
    assert plan.defers_reduction == (options.os_home == "device")
    assert len(reduces) == num_times * len({a.target for a in reduces}) and len(sums) == num_times
    assert timeline.stream(Stream.COMM).nbytes == plan.moved_nbytes(Stream.COMM) + num_times * 16
    assert timeline.stream(Stream.COMM).busy_ms > 0


@pytest.mark.parametrize("options", [replace(HOST, max_slots=4), RESIDENT], ids=["moving", "resident"])
def test_the_price_of_many_micro_batches_on_ranks_is_that_of_the_simulation(options: PlanOptions) -> None:
    """One more micro-batch costs what the one before it did, with exchanges or without."""
    plan = with_work(planned(chain(3), target(world_size=2), replace(options, accumulate=9)).plan, 3)
    machine = rates(links=LINKS)
    assert price(plan, machine).step_ms == pytest.approx(simulate_with(plan, machine).step_ms, rel=0.01)
