"""Acceptance (b), (c) and case 2 on a GPU: training is that of plain PyTorch on the same GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from equalities import check_semantics, check_sixteen_bits, train_same_partition
from machines import Machine
from models import CASES
from placements import coarse, smallest
from rig import GetRig, Setup
from training import SEMANTICS, GetPlain, assert_same_semantics

from chunkc.passes import Options

pytestmark = pytest.mark.gpu
SLOW = pytest.mark.slow
DROPOUT = replace(SEMANTICS, num_steps=8, seed=11)
MODELS = ("gpt2", "llama", "t5", "vit", "resnet", "odd")
OTHERS = [pytest.param(name, marks=SLOW) for name in ("bert", "albert")]


@pytest.mark.parametrize("name", [*MODELS, *OTHERS])
def test_trains_as_plain_pytorch(name: str, rig_of: GetRig, plain_of: GetPlain) -> None:
    """Everything evicted, updates on the host."""
    rig = rig_of(name)
    check_semantics(rig, plain_of(name, SEMANTICS), smallest(rig))


@pytest.mark.parametrize("name", ["odd", "gpt2_small", *(pytest.param(n, marks=SLOW) for n in ("llama", "t5", "vit"))])
def test_trains_as_plain_pytorch_under_inductor(name: str, rig_of: GetRig, plain_of: GetPlain) -> None:
    rig = rig_of(name, torch.float32, "inductor")
    check_semantics(rig, plain_of(name, SEMANTICS), coarse(rig))


@pytest.mark.parametrize("name", ["odd", "llama", "resnet"])
def test_updates_on_the_device_are_torchs(name: str, rig_of: GetRig, plain_of: GetPlain) -> None:
    """Everything resident: the kernels update, and nothing moves."""
    rig = rig_of(name)
    found = rig.train(Setup(Options(os_home="device")), SEMANTICS)
    assert rig.stats()["h2d_nbytes"] == 0
    assert_same_semantics(found, plain_of(name, SEMANTICS))


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_bf16_is_as_good_as_plain_bf16(backend: str, rig_of: GetRig, plain_of: GetPlain, plain_16_of: GetPlain) -> None:
    check_sixteen_bits(rig_of("odd", torch.bfloat16, backend), plain_of, plain_16_of)


@pytest.mark.parametrize("name", ["gpt2", *(pytest.param(n, marks=SLOW) for n in ("llama", "t5", "vit"))])
def test_models_in_bf16_are_as_good_as_plain_bf16(
    name: str, rig_of: GetRig, plain_of: GetPlain, plain_16_of: GetPlain
) -> None:
    check_sixteen_bits(rig_of(name, torch.bfloat16), plain_of, plain_16_of)


@pytest.mark.parametrize(
    ("name", "backend"), [("gpt2_dropout", "eager"), ("gpt2_checkpointed", "eager"), ("odd_dropout", "inductor")]
)
def test_masks_are_those_of_torch_compile(name: str, backend: str, rig_of: GetRig, machine: Machine) -> None:
    """The same seed, the same partition: the device's generator gives segments the masks that it gives whole graphs."""
    rig = rig_of(name, backend=backend)
    found = rig.train(smallest(rig), DROPOUT)
    wanted = train_same_partition(CASES[name], backend, DROPOUT, machine)
    assert_same_semantics(found, wanted)
    if backend == "eager":
        assert found.losses[0] == wanted.losses[0]
