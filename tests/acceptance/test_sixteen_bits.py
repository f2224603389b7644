"""Acceptance (c): bf16 with an fp32 master is as good as plain PyTorch doing the same work in bf16.

The plain loop (``train_plain_16``) computes in bf16, steps fp32 masters by torch.optim.AdamW and rounds them back.
"""

from __future__ import annotations

import pytest
import torch
from equalities import check_sixteen_bits
from plan_runner import GetRunner
from training import GetPlain

MODELS = ("gpt2", "odd", *(pytest.param(n, marks=pytest.mark.slow) for n in ("llama", "bert", "albert", "t5", "vit")))
INDUCTOR = [pytest.param(n, marks=pytest.mark.slow) for n in ("odd", "gpt2", "llama", "t5", "vit")]


@pytest.mark.parametrize("name", MODELS)
def test_bf16_is_as_good_as_plain_bf16(
    name: str, runner_of: GetRunner, plain_of: GetPlain, plain_16_of: GetPlain
) -> None:
    check_sixteen_bits(runner_of(name, torch.bfloat16), plain_of, plain_16_of)


@pytest.mark.parametrize("name", INDUCTOR)
def test_bf16_is_as_good_as_plain_bf16_under_inductor(
    name: str, runner_of: GetRunner, plain_of: GetPlain, plain_16_of: GetPlain
) -> None:
    check_sixteen_bits(runner_of(name, torch.bfloat16, "inductor"), plain_of, plain_16_of)
