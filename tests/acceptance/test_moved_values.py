"""Saved values that go to host memory and come back change no bit, whatever else moves and runs in between."""

from __future__ import annotations

from dataclasses import replace

import pytest
from placements import smallest
from plan_runner import GetRunner, PlanRunner, Setup, cuts_of
from training import PLACEMENT, Recipe, Trained, assert_same_bits

from chunkc.ir.actions import Op
from chunkc.passes import PlanOptions
from chunkc.runtime.devices.debug_settings import DebugSettings

RECIPE = replace(PLACEMENT, num_steps=4)
DELAYED = DebugSettings(poison=True, max_delay_ms=0.5, seed=3)


def train_both(runner: PlanRunner, moved: Setup, recipe: Recipe = RECIPE) -> tuple[Trained, Trained]:
    """A run that moves, and the one that keeps with the same segments, both in the order found."""
    found = runner.train(moved, recipe)
    plan = runner.plan
    assert plan.moves and any(a.op is Op.RELOAD for p in plan.iteration() for a in p.actions)
    runner.plans["moved"] = plan
    options = replace(moved.options, moved_share=0.0, fixed_moves=(), cuts=cuts_of(plan))
    options = replace(options, chunk_numel=plan.layout.chunk_numel)
    kept = runner.train(replace(moved, options=options, device_nbytes=1 << 30), recipe)
    assert not runner.plan.moves
    return found, kept


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("gpt2_dropout", "eager"),
        ("odd", "eager"),
        ("odd", "inductor"),
        *(pytest.param(n, "eager", marks=pytest.mark.slow) for n in ("llama", "t5", "vit", "bert", "albert", "resnet")),
        pytest.param("gpt2", "inductor", marks=pytest.mark.slow),
    ],
)
def test_moving_changes_no_bit(name: str, backend: str, runner_of: GetRunner) -> None:
    runner = runner_of(name, backend=backend)
    moved = Setup(PlanOptions(moved_share=1.0, os_home="host"), settings=DELAYED)
    found, kept = train_both(runner, moved)
    assert_same_bits(found, kept)
    stats = runner.stats()
    assert stats["host_syncs"] == 0 if "host_syncs" in stats else True


def test_mixtures_with_chunks_that_move_change_no_bit(runner_of: GetRunner) -> None:
    """Some values move, others stay, at the least device budget, where payloads come and go too."""
    runner = runner_of("gpt2")
    runner.reset(Setup())
    values = [i for i, v in enumerate(runner.captured.schedule.saved_values()) if v.used_until >= 0]
    options = PlanOptions(fixed_moves=tuple(values[::2]))
    device_nbytes, _ = runner.smallest(options)
    found, kept = train_both(runner, Setup(options, device_nbytes=device_nbytes))
    assert_same_bits(found, kept)
    assert runner.plans["moved"].memory.device_peak_nbytes < smallest(runner).device_nbytes


def test_micro_batches_share_the_copies(runner_of: GetRunner) -> None:
    runner = runner_of("gpt2")
    options = PlanOptions(moved_share=1.0, accumulate=2)
    found, kept = train_both(runner, Setup(options, settings=DELAYED), replace(RECIPE, num_steps=2))
    assert_same_bits(found, kept)


def test_measured_memory_falls_as_planned(runner_of: GetRunner) -> None:
    runner = runner_of("gpt2")
    runner.train(Setup(PlanOptions(moved_share=1.0)), replace(RECIPE, num_steps=2))
    stats, plan = runner.stats(), runner.plan
    assert stats["peak_nbytes"] <= plan.memory.device_peak_nbytes + 2**20 if "peak_nbytes" in stats else True
    assert plan.copies_nbytes > 0
