"""Lower bounds of a step: the chain by hand, and no simulated step below any of them."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from costs import RATES, rates, with_work
from schedules import PLENTY, chain, layered, op, param, planned, planned_somewhere, schedule, target

from chunkc.cost.simulate import simulate_with
from chunkc.passes import PlanOptions

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import step_bounds

        yield step_bounds
        sys.modules.pop("step_bounds", None)


def test_the_chain_through_the_first_layer_by_hand(script: ModuleType) -> None:
    plan = with_work(planned_somewhere(chain(6, 512), target(2048, world_size=2), PlanOptions()).plan, {})
    assert [s.reads for s in plan.segments if s.graph == "forward"] == [(i,) for i in range(6)]
    # of 512 elements a rank receives 1024 bytes, in 4 ms, and updates 256, in 4 ms on the device, 8 ms on the host
    assert script.exchange_ms(plan, RATES) == pytest.approx(4 + 4 + 4)
    assert script.exchange_ms(with_work(plan, 3), RATES) == pytest.approx(4 + 4 + 4 + 3 * 12)
    slow_device = rates(gpu_update_gparam_per_s={"float32": 1e-6})
    assert script.exchange_ms(plan, slow_device) == pytest.approx(4 + 8 + 4)


@pytest.mark.parametrize(("large", "longest_ms"), [(1024, 10 + 8 + 8 + 8), (512, 12 + 4 + 4 + 4)])
def test_only_operators_between_reader_and_maker_count(script: ModuleType, large: int, longest_ms: float) -> None:
    """Work of 1 ms each; the parameter of ``large`` elements is read second, and its gradient made next to last."""
    params = [param(f"layers.{i}.weight", large if i == 1 else 512) for i in range(6)]
    layers = range(6)
    found = schedule(params, [op([i]) for i in layers], [op([i], [i]) for i in reversed(layers)])
    plan = planned_somewhere(found, target(2048, world_size=2), PlanOptions(chunk_numel=256)).plan
    assert [s.reads for s in plan.segments if s.graph == "forward"] == [(i,) for i in layers]
    assert script.exchange_ms(with_work(plan, 1), RATES) == pytest.approx(longest_ms)


def test_one_rank_exchanges_nothing(script: ModuleType) -> None:
    assert script.exchange_ms(planned(chain(4), target()).plan, RATES) == 0


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("device", [2048, 16384, 1 << 20])
def test_no_step_is_below_a_bound(script: ModuleType, world_size: int, device: int) -> None:
    found = planned_somewhere(chain(6, 512), target(device, world_size=world_size), PlanOptions())
    plan = with_work(found.plan, 2)
    timeline = simulate_with(plan, RATES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "cost_rates", lambda hw: RATES)
        step = script.Step.of(timeline, plan, None)
    assert step.excess >= -1e-9 and step.bounds_ms[step.largest_bound] == max(step.bounds_ms.values())
    assert (step.bounds_ms["exchange"] > 0) is (world_size > 1)
    assert step.num_second_homes <= step.num_updated_below <= len(plan.layout.chunks)
    assert step.host_left_nbytes == plan.memory.host_budget_nbytes - plan.memory.host_nbytes >= 0
    assert script.Step(replace(timeline, step_ms=2.0), {"compute": 1.0}).excess == 1.0


def test_the_round_trip_of_two_layers_by_hand(script: ModuleType) -> None:
    """Work of 1 ms each; two of four layers move 512 bytes, 2 ms each way, and parameters stay."""
    plan = with_work(planned(layered([[512]] * 4), target(), PlanOptions(fixed_moves=(0, 1))).plan, 1)
    # the first value is made in 1, both are away in 4 and back in 4; the last segment reads the first one, lands 64
    # elements in 1, and 256 are updated in 4
    assert plan.moves[0].is_made_in(plan.segments[0]) and plan.moves[0].is_used_in(plan.segments[-1])
    assert script.round_trip_ms(plan, RATES) == pytest.approx(1 + 4 + 4 + 1 + 1 + 4)


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("work", [0, 1, 8, 64])
@pytest.mark.parametrize("device", [40_000, 60_000, PLENTY])
def test_no_step_is_below_its_round_trip(script: ModuleType, share: float, work: int, device: int) -> None:
    options = PlanOptions(moved_share=share, activations="offload")
    plan = with_work(planned(layered([[4096, 1024]] * 8), target(device), options).plan, work)
    assert plan.moves
    assert 0 < script.round_trip_ms(plan, RATES) <= simulate_with(plan, RATES).step_ms * (1 + 1e-9)


def test_what_stays_makes_no_round_trip(script: ModuleType) -> None:
    assert script.round_trip_ms(planned(layered([[512]] * 4), target()).plan, RATES) == 0
