"""Acceptance (a): where things lie changes no bit.

Twenty steps at eps=1e-8 under four placements, freed device memory filled with NaN, against the identity plan with the
same segments: equal losses, first gradients, parameters, both moments and buffers, bit by bit.
"""

from __future__ import annotations

import pytest
import torch
from placements import PLACEMENTS, Identities, check_placement, moved
from plan_runner import GetRunner

FP32, BF16 = torch.float32, torch.bfloat16
SOME = ("resnet",)
OTHERS = ("llama", "t5", "vit", "bert", "albert", "mixtral", "resnet")
SLOW = pytest.mark.slow

EAGER = [
    *((name, FP32, placement) for name in ("gpt2", "odd") for placement in PLACEMENTS),
    *((name, BF16, "smallest") for name in ("gpt2", "odd")),
    *((name, FP32, "smallest") for name in SOME),
    *(
        pytest.param(name, FP32, placement, marks=SLOW)
        for name in OTHERS
        for placement in PLACEMENTS
        if name not in SOME or placement != "smallest"
    ),
    *(
        pytest.param(name, BF16, placement, marks=SLOW)
        for name in ("gpt2", "odd")
        for placement in PLACEMENTS
        if placement != "smallest"
    ),
    *(
        pytest.param(name, BF16, placement, marks=SLOW)
        for name in ("llama", "t5", "vit", "bert", "albert", "mixtral", "resnet_bf16")
        for placement in PLACEMENTS
    ),
]
INDUCTOR = [
    *(("odd", FP32, placement) for placement in PLACEMENTS),
    *(pytest.param("odd", BF16, placement, marks=SLOW) for placement in PLACEMENTS),
    *(
        pytest.param(name, dtype, placement, marks=SLOW)
        for name in ("gpt2", "llama", "t5", "vit")
        for dtype in (FP32, BF16)
        for placement in PLACEMENTS
    ),
]


@pytest.mark.long(but="odd-dtype7-all_on_device")
@pytest.mark.parametrize(("name", "dtype", "placement"), EAGER)
def test_placement_changes_no_bit(
    name: str, dtype: torch.dtype, placement: str, runner_of: GetRunner, identities: Identities
) -> None:
    check_placement(runner_of(name, dtype), placement, identities)


@pytest.mark.long(but="odd-dtype3-all_on_device")
@pytest.mark.parametrize(("name", "dtype", "placement"), INDUCTOR)
def test_placement_changes_no_bit_under_inductor(
    name: str, dtype: torch.dtype, placement: str, runner_of: GetRunner, identities: Identities
) -> None:
    check_placement(runner_of(name, dtype, "inductor"), placement, identities)


@pytest.mark.long
def test_placements_differ(runner_of: GetRunner) -> None:
    """Less memory moves more bytes, or the cases above compare one plan with itself."""
    runner = runner_of("llama")
    found = {}
    for name, make in PLACEMENTS.items():
        runner.reset(make(runner))
        found[name] = runner.next_plan
    volumes = {name: moved(plan) for name, plan in found.items()}
    assert volumes["all_on_device"] == 0 < volumes["all_on_host"] < volumes["half_evicted"] <= volumes["smallest"]
    assert len({plan.digest() for plan in found.values()}) == len(found)
    assert len(found["smallest"].segments) > 10
