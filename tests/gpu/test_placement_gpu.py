"""Acceptance (a) on a GPU: where things lie changes no bit, against identity runs with equal arithmetic of updates."""

from dataclasses import replace

import pytest
import torch
from placements import MIXED, PLACEMENTS, Identities, check_mixed, check_placement, half_evicted, smallest
from plan_runner import GetRunner, Setup
from training import PLACEMENT, assert_same_bits

from chunkc.passes import PlanOptions

pytestmark = pytest.mark.gpu
FP32, BF16 = torch.float32, torch.bfloat16
SLOW = pytest.mark.slow
SHORT = replace(PLACEMENT, num_steps=6)

EAGER = [
    *(("odd", dtype, placement) for dtype in (FP32, BF16) for placement in PLACEMENTS),
    *(("llama", FP32, placement) for placement in PLACEMENTS),
    *(("gpt2", BF16, placement) for placement in ("smallest", "all_on_device")),
    *((name, FP32, "smallest") for name in ("t5", "vit", "bert", "albert", "resnet")),
    *(
        pytest.param(name, dtype, placement, marks=SLOW)
        for name in ("t5", "vit", "bert", "albert")
        for dtype in (FP32, BF16)
        for placement in PLACEMENTS
    ),
]
INDUCTOR = [
    ("odd", FP32, "half_evicted"),
    ("odd", FP32, "all_on_device"),
    ("odd", BF16, "smallest"),
    *(
        pytest.param(name, dtype, placement, marks=SLOW)
        for name in ("odd", "gpt2", "llama")
        for dtype in (FP32, BF16)
        for placement in PLACEMENTS
    ),
]


@pytest.mark.parametrize(("name", "dtype", "placement"), EAGER)
def test_placement_changes_no_bit(
    name: str, dtype: torch.dtype, placement: str, runner_of: GetRunner, identities: Identities
) -> None:
    check_placement(runner_of(name, dtype), placement, identities)


@pytest.mark.parametrize(("name", "dtype", "placement"), INDUCTOR)
def test_placement_changes_no_bit_under_inductor(
    name: str, dtype: torch.dtype, placement: str, runner_of: GetRunner, identities: Identities
) -> None:
    check_placement(runner_of(name, dtype, "inductor"), placement, identities)


@pytest.mark.parametrize("dtype", (FP32, BF16))
@pytest.mark.parametrize("placement", MIXED)
def test_mixed_placement_changes_no_bit(
    placement: str, dtype: torch.dtype, runner_of: GetRunner, identities: Identities
) -> None:
    """All updates with the host's arithmetic: those on the device move through its slots all the same."""
    check_mixed(runner_of("odd", dtype), placement, identities, SHORT)


@pytest.mark.parametrize("dtype", (FP32, BF16))
def test_the_same_run_gives_the_same_bits(dtype: torch.dtype, runner_of: GetRunner) -> None:
    """Updates by kernels, and by the host: torch's kernels must repeat themselves for the comparisons above."""
    runner = runner_of("odd", dtype)
    for setup in (Setup(PlanOptions(os_home="device")), half_evicted(runner)):
        assert_same_bits(runner.train(setup, SHORT), runner.train(setup, SHORT))


def test_one_wrong_bit_is_found(runner_of: GetRunner) -> None:
    runner = runner_of("odd")
    setup = smallest(runner)
    with pytest.raises(AssertionError, match="differ"):
        assert_same_bits(runner.train(setup, replace(SHORT, lr=SHORT.lr * (1 + 1e-6))), runner.train(setup, SHORT))
