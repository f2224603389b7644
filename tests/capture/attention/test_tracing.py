"""Attention planned for a GPU is traced as its kernel there, with what that saves; elsewhere as what runs."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import chunkc
from chunkc.capture.attention.kernels import Capability
from chunkc.compiler.plan_ahead import capture_ahead
from chunkc.ir.schedule import Operator, Schedule

BATCH, HEADS, TOKENS, SIZE = 2, 4, 100, 16
V100, A100, H100 = (7, 0), (8, 0), (9, 0)
FP16, BF16 = torch.float16, torch.bfloat16


class Attention(nn.Module):
    def __init__(
        self,
        dropout: float = 0.0,
        *,
        by_name: bool = True,
        checkpointed: bool = False,
        masked: bool = False,
        size: int = SIZE,
    ) -> None:
        super().__init__()
        self.width = HEADS * size
        self.inner, self.outer = nn.Linear(self.width, 3 * self.width), nn.Linear(self.width, self.width)
        self.dropout, self.by_name, self.checkpointed, self.masked = dropout, by_name, checkpointed, masked

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.inner(x).view(BATCH, TOKENS, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril() if self.masked else None
        attend: Any = partial(F.scaled_dot_product_attention, *heads.unbind(0))
        y = attend(dropout_p=self.dropout, attn_mask=mask) if self.by_name else attend(mask, self.dropout)
        return self.outer(y.transpose(1, 2).reshape(BATCH, TOKENS, -1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(self.attend, x, use_reentrant=False) if self.checkpointed else self.attend(x)
        assert isinstance(y, torch.Tensor)
        return y.pow(2).mean()


def schedule_of(model: Attention, gpu: Capability | None, dtype: torch.dtype | None = None) -> Schedule:
    inputs = (torch.ones(BATCH, TOKENS, model.width),)
    return capture_ahead(model, dtype, inputs, "eager", gpu=gpu).schedule


def attending(schedule: Schedule) -> list[Operator]:
    return [op for graph in schedule.graphs for op in graph.operators if "scaled_dot_product" in op.target]


KERNELS = [
    pytest.param(Attention(), A100, BF16, "flash_attention", id="flash"),
    pytest.param(Attention(0.1), A100, BF16, "flash_attention", id="dropout"),
    pytest.param(Attention(0.1, by_name=False), A100, BF16, "flash_attention", id="by-position"),
    pytest.param(Attention(), H100, BF16, "cudnn_attention", id="cudnn"),
    pytest.param(Attention(0.1), V100, FP16, "efficient_attention", id="v100"),
    pytest.param(Attention(masked=True), A100, BF16, "efficient_attention", id="mask"),
    pytest.param(Attention(0.1), A100, None, "efficient_attention", id="fp32"),
]


@pytest.mark.parametrize(("model", "gpu", "dtype", "kernel"), KERNELS)
def test_forward_and_backward_are_operators_of_the_gpu(
    model: Attention, gpu: Capability, dtype: torch.dtype | None, kernel: str
) -> None:
    name = f"aten._scaled_dot_product_{kernel}"
    forward, backward = attending(schedule_of(model, gpu, dtype))
    assert (forward.target, backward.target) == (f"{name}.default", f"{name}_backward.default")
    product = 2 * BATCH * HEADS * TOKENS**2 * SIZE
    assert (forward.flops, backward.flops) == (2 * product, 5 * product)
    assert backward.workspace_nbytes > BATCH * HEADS * TOKENS * SIZE * 4, "fp32 sums of the queries' gradient"


@pytest.mark.parametrize(
    ("gpu", "dtype", "sums", "seeds"),
    [(A100, BF16, TOKENS, 16 + 8), (H100, BF16, TOKENS, 8 + 8), (V100, FP16, 128, 8 + 8)],
)
def test_a_kernel_saves_its_result_row_sums_and_seeds(
    gpu: Capability, dtype: torch.dtype, sums: int, seeds: int
) -> None:
    """The result in 16 bits, for the product behind it too; fp32 log-sum-exp, in whole blocks of 32 rows by one."""
    (forward, _) = attending(schedule_of(Attention(0.125), gpu, dtype))
    assert forward.saved_nbytes == 2 * BATCH * HEADS * TOKENS * SIZE + 4 * BATCH * HEADS * sums + seeds


def test_without_a_kernel_the_matrices_are_traced() -> None:
    schedule = schedule_of(Attention(), V100, BF16)
    assert not attending(schedule)
    saved_nbytes = sum(op.saved_nbytes for op in schedule.forward.operators)
    assert saved_nbytes > 4 * BATCH * HEADS * TOKENS**2, "fp32 weights of queries x keys"


def test_odd_heads_are_padded_for_flash_attention() -> None:
    """From 20 elements to 24: the result that is saved has them too."""
    forward, backward = attending(schedule_of(Attention(size=20), A100, BF16))
    assert "flash_attention" in forward.target
    product = 2 * BATCH * HEADS * TOKENS**2 * 24
    assert (forward.flops, backward.flops) == (2 * product, 5 * product)


class Restricted(Attention):
    def attend(self, x: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            return super().attend(x)


def test_kernels_that_the_model_switches_off_are_not_traced() -> None:
    forward, backward = attending(schedule_of(Restricted(), A100, BF16))
    assert "efficient" in forward.target and "efficient" in backward.target


def test_a_checkpointed_region_has_the_kernel_twice() -> None:
    schedule = schedule_of(Attention(checkpointed=True), A100, BF16)
    assert ["backward" in op.target for op in attending(schedule)] == [False, False, True]
    with_dropout = schedule_of(Attention(0.1, checkpointed=True), A100, BF16)
    largest = max(op.live_nbytes for graph in with_dropout.graphs for op in graph.operators)
    without = max(op.live_nbytes for graph in schedule.graphs for op in graph.operators)
    assert largest < without + 2**14, "matrices of queries x keys are traced"


def test_elsewhere_it_is_traced_as_it_runs() -> None:
    assert not attending(schedule_of(Attention(0.1), None))
    assert all("for_cpu" in op.target for op in attending(schedule_of(Attention(), None)))


@pytest.mark.long
def test_plans_take_it_from_the_machine() -> None:
    def planned(dropout: float, hw: str) -> int:
        inputs = (torch.ones(BATCH, TOKENS, HEADS * SIZE),)
        plan = chunkc.plan(Attention(dropout), hw, example_inputs=inputs, dtype=torch.float32, backend="eager")
        return plan.memory.nonmodel_nbytes

    assert planned(0.1, "a100-64g") == planned(0.0, "a100-64g")
    assert planned(0.1, "emulated-64m-64m") > planned(0.0, "emulated-64m-64m")
