"""The kernel of attention by GPU, dtype, width of heads, mask, dropout and version, as PyTorch's rules have it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from chunkc.capture.attention.kernels import AttentionCall, AttentionKernel, KernelSupport, choose_kernel
from chunkc.errors import CaptureError

CUDNN, FLASH, EFFICIENT, MATH = AttentionKernel
V100, T4, A100, RTX4090, H100, B200, RTX5090 = (7, 0), (7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)
NEW, OLD = KernelSupport((2, 15), 92600), KernelSupport((2, 11), 91900)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def call(
    dtype: torch.dtype = BF16, width: int = 64, *, heads: tuple[int, int] = (4, 4), tokens: tuple[int, int] = (96, 96)
) -> AttentionCall:
    """Attention of 2 samples, with ``heads`` and ``tokens`` of queries and of keys."""
    query = torch.empty(2, heads[0], tokens[0], width, dtype=dtype, device="meta", requires_grad=True)
    key = torch.empty(2, heads[1], tokens[1], width, dtype=dtype, device="meta", requires_grad=True)
    return AttentionCall(query, key, key)


def masked(dtype: torch.dtype = BF16, width: int = 64, **facts: Any) -> AttentionCall:
    return replace(call(dtype, width), mask=torch.empty(96, 96, dtype=dtype, device="meta", **facts))


CASES = {
    "16 bits on an A100": (call(), A100, FLASH),
    "fp16 on a V100": (call(FP16), V100, EFFICIENT),
    "fp16 on a T4": (call(FP16), T4, EFFICIENT),
    "bf16 on a V100": (call(), V100, MATH),
    "cuDNN on an H100": (call(), H100, CUDNN),
    "cuDNN on a B200": (call(), B200, CUDNN),
    "a desktop GPU": (call(), RTX5090, FLASH),
    "fp32": (call(FP32), A100, EFFICIENT),
    "fp32 on a V100": (call(FP32), V100, EFFICIENT),
    "fp64": (call(torch.float64), A100, MATH),
    "a mask": (masked(), A100, EFFICIENT),
    "a mask on an H100": (masked(), H100, CUDNN),
    "a mask that is trained": (masked(requires_grad=True), H100, EFFICIENT),
    "dropout": (replace(call(), dropout=0.1), A100, FLASH),
    "dropout that cuDNN has": (replace(call(), dropout=0.125), H100, CUDNN),
    "dropout that cuDNN rounds": (replace(call(), dropout=0.1), H100, FLASH),
    "odd heads": (call(width=20), A100, FLASH),
    "odd heads on an H100": (call(width=20), H100, FLASH),
    "odd heads in fp16 on a V100": (call(FP16, 20), V100, MATH),
    "odd heads in fp32 on a V100": (call(FP32, 21), V100, EFFICIENT),
    "odd heads with a mask": (masked(width=20), A100, MATH),
    "fp32 heads of four": (call(FP32, 20), A100, EFFICIENT),
    "wide heads": (call(width=256), A100, FLASH),
    "wide heads on an H100": (call(width=256), H100, CUDNN),
    "wide heads that cuDNN lacks": (call(width=160), H100, FLASH),
    "too wide heads": (call(width=264), A100, EFFICIENT),
    "heads without backward on a 4090": (call(width=208), RTX4090, EFFICIENT),
    "wide heads on a 4090": (call(width=256), RTX4090, FLASH),
    "wide heads with dropout on a 4090": (replace(call(width=256), dropout=0.1), RTX4090, EFFICIENT),
    "causal": (replace(call(), is_causal=True), A100, FLASH),
    "causal, not square": (replace(call(tokens=(64, 96)), is_causal=True), A100, EFFICIENT),
    "not square": (call(tokens=(64, 96)), A100, FLASH),
    "one key": (call(tokens=(96, 1)), H100, FLASH),
    "groups": (replace(call(heads=(4, 2)), is_grouped=True), A100, FLASH),
    "groups that do not divide": (replace(call(heads=(4, 3)), is_grouped=True), A100, MATH),
    "groups on a V100": (replace(call(FP16, heads=(4, 2)), is_grouped=True), V100, EFFICIENT),
    "groups that nobody told of": (call(heads=(4, 2)), A100, MATH),
    "one head of keys": (call(heads=(4, 1)), A100, FLASH),
}


@pytest.mark.parametrize("case", CASES)
def test_the_kernel_is_the_one_that_torch_takes(case: str) -> None:
    attention, gpu, kernel = CASES[case]
    assert choose_kernel(attention, gpu, NEW) is kernel


OLDER = {
    "dropout that cuDNN rounds": CUDNN,
    "wide heads on an H100": FLASH,
    "groups on a V100": MATH,
    "one head of keys": MATH,
}


@pytest.mark.parametrize("case", CASES)
def test_the_oldest_torch_differs_where_rules_came_later(case: str) -> None:
    attention, gpu, kernel = CASES[case]
    assert choose_kernel(attention, gpu, OLD) is OLDER.get(case, kernel)


@pytest.mark.parametrize(
    "support",
    [
        replace(NEW, is_deterministic=True),
        replace(NEW, cudnn_version=91000),
        replace(NEW, prefers_cudnn=False),
        replace(NEW, enabled=frozenset({FLASH, EFFICIENT, MATH})),
    ],
)
def test_flash_follows_where_cudnn_is_out(support: KernelSupport) -> None:
    assert choose_kernel(call(), H100, support) is FLASH


def test_cudnn_of_cuda_12_is_preferred_on_fewer_gpus() -> None:
    support = replace(NEW, cuda_major=12)
    assert choose_kernel(call(), (10, 3), support) is CUDNN
    assert choose_kernel(call(), (10, 1), support) is FLASH
    assert choose_kernel(call(), (10, 1), NEW) is CUDNN


def test_shapes_that_no_fused_kernel_takes() -> None:
    flat = AttentionCall(*(torch.empty(8, 16, 64, dtype=BF16, device="meta") for _ in range(3)))
    assert choose_kernel(flat, A100, NEW) is MATH
    query = torch.empty(2, 4, 64, 96, dtype=BF16, device="meta").transpose(-1, -2)
    assert choose_kernel(AttentionCall(query, query, query), A100, NEW) is MATH
    odd = torch.empty(1 + 2 * 4 * 96 * 64, dtype=FP32, device="meta")[1:].view(2, 4, 96, 64)
    assert choose_kernel(AttentionCall(odd, odd, odd), A100, NEW) is MATH
    assert choose_kernel(AttentionCall(odd, odd, odd), A100, OLD) is EFFICIENT


def test_what_the_model_switches_off_is_not_taken() -> None:
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        assert choose_kernel(call(), A100, KernelSupport.current()) is EFFICIENT
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(CaptureError, match="no kernel of attention"):
        choose_kernel(call(FP32), A100, KernelSupport.current())
    assert KernelSupport.current().enabled == frozenset(AttentionKernel)


def test_determinism_is_that_of_the_process() -> None:
    assert not KernelSupport.current().is_deterministic
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert not KernelSupport.current().is_deterministic
        torch.use_deterministic_algorithms(True)
        assert KernelSupport.current().is_deterministic
    finally:
        torch.use_deterministic_algorithms(False)
