"""What adding up gradients in a dtype of one's choice takes, and what is refused."""

import pytest
import torch
from torch import nn

import chunkc
from chunkc.compiler.validation import reduction_nbytes
from chunkc.distributed.data_group import STAGING_NBYTES
from chunkc.hardware import Hardware

GPUS, EMULATED = Hardware.parse("2xa100-40g-512g"), Hardware.parse("2xemulated-1g-4g")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int32], ids=str)
def test_other_dtypes_than_float32_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(chunkc.ChunkcError, match=r"give torch\.float32, or None"):
        reduction_nbytes(dtype, EMULATED, 2, 1)


def test_only_several_gpus_need_memory_for_sums_in_float32() -> None:
    """Hosts add them up beside the device, and one rank has nothing to add."""
    assert reduction_nbytes(None, GPUS, 2, 1) == 0
    assert reduction_nbytes(torch.float32, GPUS, 1, 1) == 0
    assert reduction_nbytes(torch.float32, EMULATED, 2, 1) == 0
    assert reduction_nbytes(torch.float32, GPUS, 2, 1) == STAGING_NBYTES


def test_sums_in_float32_between_nodes_are_refused_on_gpus() -> None:
    with pytest.raises(chunkc.ChunkcError, match="is not built for shard='node' on GPUs"):
        reduction_nbytes(torch.float32, Hardware.parse("2x2xa100-40g-512g"), 4, 2)
    assert reduction_nbytes(torch.float32, Hardware.parse("2x2xemulated-1g-4g"), 4, 2) == 0


def test_a_plan_leaves_room_for_the_sums() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).square().mean()

    with torch.device("meta"):
        model, inputs = Model(), (torch.empty(2, 8),)
    budgets = [
        chunkc.plan(model, GPUS, example_inputs=inputs, reduce_dtype=wanted).memory.device_budget_nbytes
        for wanted in (None, torch.float32)
    ]
    assert budgets[0] - budgets[1] == STAGING_NBYTES
