"""Case 10: results do not depend on when anything happens.

Freed and fresh device memory is filled with NaN and every stream pauses at random before and after each piece of work;
the results are those of the synchronous mode, in which every action runs at its launch, bit by bit.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from accumulating import tightest, train_runner
from placements import half_evicted, smallest
from plan_runner import GetRunner, PlanRunner, Setup
from training import PLACEMENT, Trained, assert_same_bits

from chunkc.ir.actions import Stream
from chunkc.runtime.devices.debug_settings import DebugSettings

SYNCHRONOUS = DebugSettings(poison=True, synchronous=True)
RECIPE = replace(PLACEMENT, num_steps=4)
MAX_DELAY_MS = 1.0
FEW, MANY = range(10), range(10, 100)
FIRST = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]


@pytest.fixture(scope="module")
def odd(runner_of: GetRunner) -> tuple[PlanRunner, Setup, Trained]:
    """The hand-written model under its smallest budget, and its synchronous run."""
    runner = runner_of("odd")
    setup = smallest(runner)
    return runner, setup, runner.train(replace(setup, settings=SYNCHRONOUS), RECIPE)


def _check(odd: tuple[PlanRunner, Setup, Trained], seed: int) -> None:
    runner, setup, wanted = odd
    settings = DebugSettings(poison=True, max_delay_ms=MAX_DELAY_MS, seed=seed)
    assert_same_bits(runner.train(replace(setup, settings=settings), RECIPE), wanted)


@pytest.mark.long(but="5")
@pytest.mark.parametrize("seed", FEW)
def test_delays_change_no_bit(odd: tuple[PlanRunner, Setup, Trained], seed: int) -> None:
    _check(odd, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", MANY)
def test_many_delays_change_no_bit(odd: tuple[PlanRunner, Setup, Trained], seed: int) -> None:
    _check(odd, seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", FIRST)
def test_delays_change_no_bit_of_a_model_with_spanning_gradients(seed: int, runner_of: GetRunner) -> None:
    """An embedding over many chunks, whose gradient lands piece by piece while later pieces are still fetched."""
    runner = runner_of("bert")
    setup, settings = smallest(runner), DebugSettings(poison=True, max_delay_ms=0.2, seed=seed)
    found = runner.train(replace(setup, settings=settings), RECIPE)
    assert max(p.num_chunks for p in runner.plan.layout.placements) > 3
    assert_same_bits(found, runner.train(replace(setup, settings=SYNCHRONOUS), RECIPE))


@pytest.mark.long
@pytest.mark.parametrize("seed", FIRST)
def test_delays_change_no_bit_under_inductor(seed: int, runner_of: GetRunner) -> None:
    runner = runner_of("odd", backend="inductor")
    setup, settings = half_evicted(runner), DebugSettings(poison=True, max_delay_ms=MAX_DELAY_MS, seed=seed)
    found = runner.train(replace(setup, settings=settings), RECIPE)
    assert_same_bits(found, runner.train(replace(setup, settings=SYNCHRONOUS), RECIPE))


@pytest.mark.long
@pytest.mark.parametrize("seed", FIRST)
def test_delays_change_no_bit_of_a_sum_of_micro_batches(seed: int, runner_of: GetRunner) -> None:
    """Gradient chunks go home and come back beside the next forward."""
    runner = runner_of("odd")
    setup, settings = tightest(runner, 3), DebugSettings(poison=True, max_delay_ms=MAX_DELAY_MS, seed=seed)
    found, _ = train_runner(runner, replace(setup, settings=settings), RECIPE)
    wanted, _ = train_runner(runner, replace(setup, settings=SYNCHRONOUS), RECIPE)
    assert_same_bits(found, wanted)


@pytest.mark.long
def test_updates_overlap_the_next_forward(runner_of: GetRunner) -> None:
    """With slow streams ``step()`` returns before its updates have run, or the delays above delay nothing."""
    runner = runner_of("odd")
    runner.reset(replace(smallest(runner), settings=DebugSettings(max_delay_ms=4.0, seed=1)))
    device, pending = runner.compiled.runtime.device, []

    def observe() -> None:
        mark = device.launch(Stream.CPU, "mark", (), lambda: None)
        pending.append(not mark.done())

    runner.run_steps(RECIPE, lambda *_: observe())
    assert any(pending)
