"""Acceptance (a) with optimizer states in several places: some always on the device, some streamed through it in the
step, some on the host. Bits are those of the identity plan, whichever are where, and whenever anything happens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from placements import MIXED, Identities, check_mixed
from plan_runner import GetRunner
from training import PLACEMENT, assert_same_bits

from chunkc.runtime.devices.debug_settings import DebugSettings

FP32, BF16 = torch.float32, torch.bfloat16
SHORT = replace(PLACEMENT, num_steps=4)
SLOW = pytest.mark.slow
CASES = [
    *(("odd", FP32, placement) for placement in MIXED),
    *(("odd", BF16, placement) for placement in ("some_resident", "all_streamed", "some_of_each")),
    ("gpt2", BF16, "some_of_each"),
    pytest.param("gpt2", FP32, "some_of_each", marks=SLOW),
    *(
        pytest.param(name, dtype, placement, marks=SLOW)
        for name in ("odd", "llama", "t5", "bert")
        for dtype in (FP32, BF16)
        for placement in MIXED
    ),
]


@pytest.mark.long(but="odd-dtype11-some_resident")
@pytest.mark.parametrize(("name", "dtype", "placement"), CASES)
def test_mixed_placement_changes_no_bit(
    name: str, dtype: torch.dtype, placement: str, runner_of: GetRunner, identities: Identities
) -> None:
    check_mixed(runner_of(name, dtype), placement, identities, SHORT)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=SLOW) for seed in (1, 2, 3))])
@pytest.mark.parametrize("placement", ["some_of_each", "all_streamed"])
def test_delays_change_no_bit(placement: str, seed: int, runner_of: GetRunner) -> None:
    """Every stream pauses at random before and after each piece of work."""
    runner, recipe = runner_of("odd"), SHORT
    setup = MIXED[placement](runner)
    synchronous = DebugSettings(poison=True, synchronous=True)
    wanted = runner.train(replace(setup, settings=synchronous), recipe)
    settings = DebugSettings(poison=True, max_delay_ms=0.5, seed=seed)
    assert_same_bits(runner.train(replace(setup, settings=settings), recipe), wanted)
