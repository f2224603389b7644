"""The kernel of attention by GPU, dtype, width of heads, mask, dropout and version, as PyTorch's rules have it."""

from dataclasses import replace

import pytest
import torch
from attention_calls import BF16, FP32, call, calls
from torch.nn.attention import SDPBackend, sdpa_kernel

from chunkc.capture.attention.kernels import AttentionCall, AttentionKernel, Capability, KernelSupport, choose_kernel
from chunkc.errors import CaptureError

CUDNN, FLASH, EFFICIENT, MATH = AttentionKernel
V100, T4, A100, RTX4090, H100, B200, RTX5090 = (7, 0), (7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)
NEW, OLD = KernelSupport((2, 15), 92600), KernelSupport((2, 11), 91900)
CALLS = calls()
ON_A100 = {
    "bf16": FLASH,
    "fp16": FLASH,
    "fp32": EFFICIENT,
    "fp64": MATH,
    "masked": EFFICIENT,
    "trained mask": EFFICIENT,
    "dropout 0.1": FLASH,
    "dropout 1/8": FLASH,
    "bf16 heads of 20": FLASH,
    "fp16 heads of 20": FLASH,
    "fp32 heads of 20": EFFICIENT,
    "fp32 heads of 21": MATH,
    "masked heads of 20": MATH,
    "heads of 160": FLASH,
    "heads of 208": FLASH,
    "heads of 256": FLASH,
    "heads of 256, dropout": FLASH,
    "heads of 264": EFFICIENT,
    "causal": FLASH,
    "causal, not square": EFFICIENT,
    "not square": FLASH,
    "one key": FLASH,
    "groups": FLASH,
    "fp16 groups": FLASH,
    "groups, not told": MATH,
    "one head of keys": FLASH,
}
ON_H100 = ON_A100 | {
    **dict.fromkeys(("bf16", "fp16", "masked", "dropout 1/8", "heads of 256", "causal", "causal, not square"), CUDNN),
    **dict.fromkeys(("not square", "groups", "fp16 groups", "one head of keys"), CUDNN),
}
ON_4090 = ON_A100 | dict.fromkeys(("heads of 208", "heads of 256, dropout"), EFFICIENT)
ON_V100 = {
    **dict.fromkeys(CALLS, MATH),  # bf16
    **dict.fromkeys(("fp16", "fp32", "fp16 groups", "fp32 heads of 20", "fp32 heads of 21"), EFFICIENT),
}
KERNELS = {V100: ON_V100, T4: ON_V100, A100: ON_A100, RTX4090: ON_4090, RTX5090: ON_4090, H100: ON_H100, B200: ON_H100}
CASES = [pytest.param(gpu, name, id=f"sm{gpu[0]}{gpu[1]}-{name}") for gpu in KERNELS for name in CALLS]


@pytest.mark.parametrize(("gpu", "name"), CASES)
def test_the_kernel_is_the_one_that_torch_takes(gpu: Capability, name: str) -> None:
    assert choose_kernel(CALLS[name], gpu, NEW) is KERNELS[gpu][name]


IN_2_11 = {(A100, "one head of keys"): MATH, (V100, "fp16 groups"): MATH, (H100, "one head of keys"): MATH}
IN_2_11 |= {(H100, "dropout 0.1"): CUDNN}
IN_2_11 |= {(H100, f"heads of {width}"): CUDNN for width in ("160", "208", "256, dropout")}


@pytest.mark.parametrize("gpu", [V100, A100, H100])
def test_the_oldest_torch_differs_where_rules_came_later(gpu: Capability) -> None:
    expected = {name: IN_2_11.get((gpu, name), kernel) for name, kernel in KERNELS[gpu].items()}
    assert {name: choose_kernel(attention, gpu, OLD) for name, attention in CALLS.items()} == expected


def test_the_oldest_torch_has_wide_heads_of_cudnn_on_hopper_only() -> None:
    assert choose_kernel(CALLS["heads of 256"], B200, OLD) is FLASH


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
