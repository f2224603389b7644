"""Acceptance (a): where things lie changes no bit.

Twenty steps at eps=1e-8 under four placements, freed device memory filled with NaN, against the identity plan with the
same segments: equal losses, first gradients, parameters, both moments and buffers, bit by bit.
"""

from __future__ import annotations

import pytest
import torch
from placements import PLACEMENTS, Identities, moved
from rig import GetRig, Rig
from training import PLACEMENT, assert_same_bits

FP32, BF16 = torch.float32, torch.bfloat16
EAGER = [
    *((name, FP32) for name in ("gpt2", "llama", "bert", "albert", "t5", "vit", "mixtral", "resnet", "odd")),
    *((name, BF16) for name in ("gpt2", "t5", "odd")),
    *(
        pytest.param(name, BF16, marks=pytest.mark.slow)
        for name in ("llama", "bert", "albert", "vit", "mixtral", "resnet_bf16")
    ),
]
INDUCTOR = [
    *((name, dtype) for name in ("odd", "gpt2_small") for dtype in (FP32, BF16)),
    *(
        pytest.param(name, dtype, marks=pytest.mark.slow)
        for name in ("gpt2", "llama", "t5", "vit")
        for dtype in (FP32, BF16)
    ),
]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("name", "dtype"), EAGER)
def test_placement_changes_no_bit(
    name: str, dtype: torch.dtype, placement: str, rig_of: GetRig, identities: Identities
) -> None:
    _check(rig_of(name, dtype), placement, identities)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("name", "dtype"), INDUCTOR)
def test_placement_changes_no_bit_under_inductor(
    name: str, dtype: torch.dtype, placement: str, rig_of: GetRig, identities: Identities
) -> None:
    _check(rig_of(name, dtype, "inductor"), placement, identities)


def _check(rig: Rig, placement: str, identities: Identities) -> None:
    found = rig.train(PLACEMENTS[placement](rig), PLACEMENT)
    plan, stats = rig.plan, rig.stats()
    assert (moved(plan) == 0) == (placement == "all_on_device"), "this placement is not what its name says"
    assert stats["h2d_nbytes"] + stats["d2h_nbytes"] == moved(plan)
    assert_same_bits(found, identities.of(rig, plan))


def test_placements_differ(rig_of: GetRig) -> None:
    """Less memory moves more bytes, or the cases above compare one plan with itself."""
    rig = rig_of("llama")
    found = {}
    for name, make in PLACEMENTS.items():
        rig.reset(make(rig))
        found[name] = rig.next_plan
    volumes = {name: moved(plan) for name, plan in found.items()}
    assert volumes["all_on_device"] == 0 < volumes["all_on_host"] < volumes["half_evicted"] <= volumes["smallest"]
    assert len({plan.digest() for plan in found.values()}) == len(found)
    assert len(found["smallest"].segments) > 10
