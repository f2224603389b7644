"""Calls of attention by name, on any device: what the choice of a kernel depends on, one thing at a time."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from chunkc.capture.attention.kernels import AttentionCall

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def call(
    dtype: torch.dtype = BF16,
    width: int = 64,
    *,
    heads: tuple[int, int] = (4, 4),
    tokens: tuple[int, int] = (96, 96),
    device: str = "meta",
) -> AttentionCall:
    """Attention of 2 samples, with ``heads`` and ``tokens`` of queries and of keys."""
    shapes = [(2, heads[i], tokens[i], width) for i in (0, 1, 1)]
    return AttentionCall(*(torch.zeros(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes))


def calls(device: str = "meta") -> Mapping[str, AttentionCall]:
    """Calls by name, of tensors on ``device``."""

    def made(dtype: torch.dtype = BF16, width: int = 64, **sizes: tuple[int, int]) -> AttentionCall:
        return call(dtype, width, device=device, **sizes)

    def masked(attention: AttentionCall, *, requires_grad: bool = False) -> AttentionCall:
        mask = torch.zeros(96, 96, dtype=attention.query.dtype, device=device, requires_grad=requires_grad)
        return replace(attention, mask=mask)

    def grouped(attention: AttentionCall) -> AttentionCall:
        return replace(attention, is_grouped=True)

    return {
        "bf16": made(),
        "fp16": made(FP16),
        "fp32": made(FP32),
        "fp64": made(torch.float64),
        "masked": masked(made()),
        "trained mask": masked(made(), requires_grad=True),
        "dropout 0.1": replace(made(), dropout=0.1),
        "dropout 1/8": replace(made(), dropout=0.125),
        "bf16 heads of 20": made(width=20),
        "fp16 heads of 20": made(FP16, 20),
        "fp32 heads of 20": made(FP32, 20),
        "fp32 heads of 21": made(FP32, 21),
        "masked heads of 20": masked(made(width=20)),
        "heads of 160": made(width=160),
        "heads of 208": made(width=208),
        "heads of 256": made(width=256),
        "heads of 256, dropout": replace(made(width=256), dropout=0.1),
        "heads of 264": made(width=264),
        "causal": replace(made(), is_causal=True),
        "causal, not square": replace(made(tokens=(64, 96)), is_causal=True),
        "not square": made(tokens=(64, 96)),
        "one key": made(tokens=(96, 1)),
        "groups": grouped(made(heads=(4, 2))),
        "fp16 groups": grouped(made(FP16, heads=(4, 2))),
        "groups, not told": made(heads=(4, 2)),
        "one head of keys": made(heads=(4, 1)),
    }
