"""Bytes through an iteration: by hand on one plan, and against the verifier's figures and slots on all."""

import random
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
import schedules
from costs import COPY, RATES, copies, rates, with_work
from plans import SPECS, chain, evicting
from schedules import planned

from chunkc.cost import Timeline, simulate_with
from chunkc.cost.rates import CopyLaw, CostRates
from chunkc.errors import ChunkcError
from chunkc.ir.actions import FROM_SLOT, TO_SLOT
from chunkc.ir.plan import Plan
from chunkc.ir.schedule import GraphSchedule
from chunkc.passes import PlanOptions, make_evaluation_plan
from chunkc.report.frame import clock_of
from chunkc.report.memory_curve import Kind, MemoryCurve, memory_curve

PLANS = {name: with_work(spec.build(), 3) for name, spec in SPECS.items()} | {"chain": with_work(chain(9).build(), 2)}


def random_rates(seed: int) -> CostRates:
    """Copies, collectives and updates between much faster and much slower than the round rates."""
    draw = random.Random(seed)
    laws = [CopyLaw(draw.uniform(0, 2e3), COPY.gb_per_s * 2 ** draw.uniform(-3, 3)) for _ in range(2)]
    update = {"float32": 32e-6 * 2 ** draw.uniform(-3, 3)}
    return rates(copies=copies(*laws), cpu_update_gparam_per_s=update, compute_launch_us=draw.uniform(0, 900))


def simulated(plan: Plan, seed: int) -> Timeline:
    return simulate_with(plan, RATES if seed == 0 else random_rates(seed))


def spans(curve: MemoryCurve, kind: Kind) -> list[tuple[float, float, int]]:
    found: list[tuple[float, float, int]] = []
    for (start, end), nbytes in zip(pairwise(curve.edges), curve.nbytes[kind], strict=True):
        if nbytes and found and found[-1][1:] == (start, nbytes):
            found[-1] = (found[-1][0], end, nbytes)
        elif nbytes:
            found.append((start, end, nbytes))
    return found


def area(curve: MemoryCurve, kind: Kind) -> float:
    return sum((end - start) * nbytes for start, end, nbytes in spans(curve, kind))


def test_the_order_of_actions_by_hand() -> None:
    """c0 stays for actions 0 to 4, c1 for 2 to 12, c2 for 5 to 9, c0 again for 13 to 18; a stash ends param16."""
    curve = memory_curve(PLANS["evicting"], None)
    assert not curve.in_ms and curve.edges[-1] == 22
    assert spans(curve, Kind.PARAMETERS) == [(0, 2, 256), (2, 9, 512), (9, 12, 256), (13, 16, 256)]
    assert spans(curve, Kind.GRADIENTS) == [(9, 10, 256), (12, 13, 256), (16, 19, 256)]
    assert spans(curve, Kind.NONMODEL) == [(1, 18, 1000)]
    assert spans(curve, Kind.UNUSED)[-1] == (19, 22, 512)
    assert curve.kinds() == (Kind.PARAMETERS, Kind.GRADIENTS, Kind.UNUSED, Kind.NONMODEL)


def test_in_milliseconds_by_hand() -> None:
    """The window begins with fwd.0; c0 came 1 ms before, at the end of the window, behind the update of 2 ms."""
    plan = PLANS["evicting"]
    timeline = simulated(plan, 0)
    curve, (clock, period) = memory_curve(plan, timeline), clock_of(plan, timeline)
    assert clock["f1"] == (0.0, 3.0) and clock["f0"] == (-1.0, 0.0) and period == timeline.step_ms == 29.0
    parameters = spans(curve, Kind.PARAMETERS)
    assert parameters[0][0] == 0.0 and parameters[-1] == (28.0, 29.0, 256)
    assert spans(curve, Kind.GRADIENTS)[-1][1] == clock["b11"][1]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", PLANS)
def test_the_peak_is_the_plans_and_the_budget_holds_at_every_moment(name: str, seed: int) -> None:
    plan = PLANS[name]
    timeline = simulated(plan, seed)
    for curve in (memory_curve(plan, timeline), memory_curve(plan, None)):
        assert curve.peak_nbytes == timeline.peaks.device_nbytes == plan.memory.device_peak_nbytes
        assert max(curve.total_nbytes) <= curve.budget_nbytes == plan.memory.device_budget_nbytes
        assert all(nbytes >= 0 for kind in Kind for nbytes in curve.nbytes[kind])
        assert all(a < b for a, b in pairwise(curve.edges)) and curve.edges[0] == 0.0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", PLANS)
def test_areas_are_those_of_the_slots(name: str, seed: int) -> None:
    """Bytes times time in slots, from each copy to the action that frees what it brought, around the cycle."""
    plan = PLANS[name]
    timeline = simulated(plan, seed)
    clock, period = clock_of(plan, timeline)
    events = defaultdict(list)
    for program in plan.iteration():
        for label, action in program.labelled():
            if action.op in TO_SLOT | FROM_SLOT:
                events[action.target].append((action.op in TO_SLOT, clock[label]))
    expected = 0.0
    for target, found in events.items():
        chunk = plan.layout.chunks[int(target.lstrip("cos"))]
        times = found if found[0][0] else [*found[1:], (False, tuple(t + period for t in found[0][1]))]
        held = sum(end[1] - start[0] for (_, start), (_, end) in zip(times[::2], times[1::2], strict=True))
        expected += held * (plan.layout.os_nbytes_of(chunk) if target[0] == "o" else chunk.nbytes)
    for target, _ in plan.cold.resident:
        chunk = plan.layout.chunks[int(target.lstrip("cos"))]
        if target not in events:
            expected += period * (plan.layout.os_nbytes_of(chunk) if target[0] == "o" else chunk.nbytes)
    curve = memory_curve(plan, timeline)
    own = sum(area(curve, kind) for kind in (Kind.STATES, Kind.PARAMETERS, Kind.GRADIENTS))
    assert own == pytest.approx(expected, rel=1e-4)


def test_gathered_chunks_of_other_ranks_are_a_kind_of_their_own() -> None:
    curve = memory_curve(PLANS["distributed"], None)
    assert max(curve.nbytes[Kind.GROUPS]) == 256 and max(curve.nbytes[Kind.PARAMETERS]) == 256


def test_residents_change_between_parameters_and_gradients() -> None:
    plan = PLANS["resident"]
    curve = memory_curve(plan, simulated(plan, 0))
    held = {kind: curve.nbytes[kind] for kind in (Kind.PARAMETERS, Kind.GRADIENTS)}
    assert all(sum(pair) == 512 for pair in zip(*held.values(), strict=True))
    assert set(held[Kind.GRADIENTS]) >= {0, 512} and set(curve.nbytes[Kind.STATES]) == {1536}


def test_an_evaluation_has_a_curve() -> None:
    numel, device = 16 << 10, schedules.target(192 << 10)
    layout = planned(schedules.chain(4, numel), device, PlanOptions(chunk_numel=numel)).plan.layout
    forward = replace(schedules.chain(4, numel), backward=GraphSchedule("backward", ()))
    plan = make_evaluation_plan(forward, device, layout=layout).plan
    curve = memory_curve(plan, None)
    assert curve.peak_nbytes == plan.memory.device_peak_nbytes
    held = [nbytes // layout.chunks[0].nbytes for nbytes in curve.nbytes[Kind.PARAMETERS]]
    assert held[0] == held[-1] == 1 and max(held) == 2  # while the first fetch and the last drop are under way
    assert not any(curve.nbytes[Kind.GRADIENTS])


def test_a_timeline_of_another_plan_is_refused() -> None:
    plan = evicting().build()
    with pytest.raises(ChunkcError, match="simulate this plan"):
        memory_curve(replace(plan, model="Other"), simulate_with(plan, RATES))
