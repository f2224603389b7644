"""Acceptance (c): bf16 with an fp32 master is as good as plain PyTorch doing the same work in bf16.

The plain loop (``train_plain_16``) computes in bf16, steps fp32 masters by torch.optim.AdamW and rounds them back.
"""

from __future__ import annotations

import pytest
import torch
from placements import smallest
from rig import GetRig, Rig
from training import SEMANTICS, GetPlain, Trained, assert_same_gradients, largest_error, largest_loss_error

GRADIENT_TOLERANCE = 2.0**-7
ERROR_RATIO = 1.5
MODELS = ("gpt2", "llama", "t5", "vit", "odd")
INDUCTOR = ("odd", "gpt2_small", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt2", "llama", "t5", "vit")))


@pytest.mark.parametrize("name", [*MODELS, *(pytest.param(n, marks=pytest.mark.slow) for n in ("bert", "albert"))])
def test_bf16_is_as_good_as_plain_bf16(
    name: str, rig_of: GetRig, plain_of: GetPlain, plain_16_of: GetPlain
) -> None:
    _check(rig_of(name, torch.bfloat16), plain_of(name, SEMANTICS), plain_16_of(name, SEMANTICS))


@pytest.mark.parametrize("name", INDUCTOR)
def test_bf16_is_as_good_as_plain_bf16_under_inductor(
    name: str, rig_of: GetRig, plain_of: GetPlain, plain_16_of: GetPlain
) -> None:
    _check(rig_of(name, torch.bfloat16, "inductor"), plain_of(name, SEMANTICS), plain_16_of(name, SEMANTICS))


def _check(rig: Rig, exact: Trained, plain: Trained) -> None:
    found = rig.train(smallest(rig), SEMANTICS)
    gradients = {n: g.float() for n, g in found.gradients.items()}
    assert all(g.dtype is torch.bfloat16 for g in found.gradients.values())
    assert_same_gradients(gradients, plain.gradients, GRADIENT_TOLERANCE)
    error, allowed = largest_error(found.params, exact.params), largest_error(plain.params, exact.params)
    assert 0 < error <= ERROR_RATIO * allowed, f"parameters are off by {error:.3g}, plain bf16 by {allowed:.3g}"
    error = largest_loss_error(found.losses, exact.losses)
    allowed = largest_loss_error(plain.losses, exact.losses)
    assert error <= ERROR_RATIO * allowed, f"losses are off by {error:.3g}, plain bf16 by {allowed:.3g}"
