"""Case 10 on a GPU: results do not depend on when anything happens.

Streams are delayed at random and freed memory is NaN; results are those of the synchronous mode to the bit.
"""

from dataclasses import replace

import pytest
import torch
from machines import Machine
from placements import MakeSetup, all_on_host, half_evicted, smallest
from plan_runner import GetRunner, PlanRunner
from training import PLACEMENT, Trained, assert_same_bits

from chunkc.ir.actions import Stream
from chunkc.runtime.devices.debug_settings import DebugSettings

pytestmark = pytest.mark.gpu
SYNCHRONOUS = DebugSettings(poison=True, synchronous=True)
RECIPE = replace(PLACEMENT, num_steps=4)
SETUPS: dict[str, MakeSetup] = {"smallest": smallest, "half_evicted": half_evicted, "all_on_host": all_on_host}
SEEDS = [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 100))]
DELAY_MS = 0.5


@pytest.fixture(scope="module")
def wanted(runner_of: GetRunner) -> dict[str, Trained]:
    runner = runner_of("odd")
    return {name: runner.train(replace(make(runner), settings=SYNCHRONOUS), RECIPE) for name, make in SETUPS.items()}


def delayed(runner: PlanRunner, make: MakeSetup, seed: int, max_delay_ms: float = DELAY_MS) -> Trained:
    settings = DebugSettings(poison=True, max_delay_ms=max_delay_ms, seed=seed)
    return runner.train(replace(make(runner), settings=settings), RECIPE)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("placement", SETUPS)
def test_delays_change_no_bit(placement: str, seed: int, runner_of: GetRunner, wanted: dict[str, Trained]) -> None:
    assert_same_bits(delayed(runner_of("odd"), SETUPS[placement], seed), wanted[placement])


@pytest.mark.parametrize("seed", range(2))
def test_delays_change_no_bit_of_a_model_with_spanning_gradients(seed: int, runner_of: GetRunner) -> None:
    runner = runner_of("bert")
    found = delayed(runner, smallest, seed, 0.1)
    assert max(p.num_chunks for p in runner.plan.layout.placements) > 3
    assert_same_bits(found, runner.train(replace(smallest(runner), settings=SYNCHRONOUS), RECIPE))


@pytest.mark.parametrize("seed", range(2))
def test_delays_change_no_bit_under_inductor(seed: int, runner_of: GetRunner) -> None:
    runner = runner_of("odd", torch.bfloat16, "inductor")
    found = delayed(runner, half_evicted, seed)
    assert_same_bits(found, runner.train(replace(half_evicted(runner), settings=SYNCHRONOUS), RECIPE))


def test_without_delays_nothing_is_different(runner_of: GetRunner, wanted: dict[str, Trained]) -> None:
    runner = runner_of("odd")
    for _ in range(3):
        assert_same_bits(
            runner.train(replace(half_evicted(runner), settings=DebugSettings()), RECIPE), wanted["half_evicted"]
        )


@pytest.mark.parametrize("waits", [True, False], ids=["with its wait", "without its wait"])
def test_a_slot_that_is_reused_too_early_is_seen(waits: bool, machine: Machine) -> None:
    """A copy into a slot that a late reader has not read yet: right behind the reader, wrong beside it."""
    device = machine.make_device(1 << 20, 1 << 20, DebugSettings(max_delay_ms=40.0, seed=3))
    device.reserve(1 << 16)
    arena, home = device.allocate_arena(1 << 16), device.allocate_home(1 << 16)
    seen = machine.put(torch.zeros(1 << 16, dtype=torch.uint8))
    num_wrong = 0
    for value in range(1, 11):
        arena.fill_(value)
        home.fill_(100 + value)
        device.synchronize()
        read = device.launch(Stream.D2H, "read", (), lambda: seen.copy_(arena, non_blocking=True))
        behind = (read,) if waits else ()
        device.launch(Stream.H2D, "overwrite", behind, lambda: arena.copy_(home, non_blocking=True))
        device.synchronize()
        num_wrong += int((seen != value).any())
    assert (num_wrong == 0) == waits, f"{num_wrong} of 10 reads saw what was written after them"
    device.close()
