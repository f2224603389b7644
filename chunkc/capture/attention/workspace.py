"""Bytes that the attention kernels of GPUs allocate while they run, beyond inputs and outputs.

    flash        forward: none, or fp32 results of every split of the keys where few blocks of queries fill no GPU;
                 backward: fp32 sums of the queries' gradient, and of each row; one copy per split if deterministic
    cuDNN        backward: the same sums (as its frontend describes them; not measured)
    efficient    forward: fp32 results where heads are wider than 128; backward: the fp32 gradient of queries in whole
                 blocks, and of keys and values where registers do not hold them; in fp32 a product that gives row sums
    all          gradients of keys and values for every head of queries, where queries share them; a copy of what must
                 be contiguous and is not

Sources, torch 2.11 to 2.15: flash_attn/flash_api.cpp (``mha_fwd``, ``mha_bwd``, ``set_params_splitkv``),
attention_backward.cu (``_efficient_attention_backward``) and mem_eff_attention/kernel_backward.h (``workspace_size``).
What depends on the number of multiprocessors takes the worst of the GPUs on sale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch

aten = torch.ops.aten
_FP32_NBYTES: Final = 4
_NUM_MULTIPROCESSORS: Final = (82, 84, 108, 114, 128, 132, 142, 148, 152, 160, 170, 188)
_MAX_SPLITS: Final = 128
_MAX_SPLIT_HEADS: Final = 200
_FORWARD: Final = {
    aten._scaled_dot_product_flash_attention: "flash",
    aten._scaled_dot_product_cudnn_attention: "cudnn",
    aten._scaled_dot_product_efficient_attention: "efficient",
}
_BACKWARD: Final = {
    aten._scaled_dot_product_flash_attention_backward: "flash",
    aten._scaled_dot_product_cudnn_attention_backward: "cudnn",
    aten._scaled_dot_product_efficient_attention_backward: "efficient",
}


def gpu_attention_nbytes(packet: Any, inputs: Sequence[torch.Tensor]) -> int | None:
    """Return the bytes of workspace of one call; None where ``packet`` is no attention operator of GPUs.

    Args:
        packet: the operator, such as ``torch.ops.aten._scaled_dot_product_flash_attention``.
        inputs: its tensors in the order of its arguments: query, key, value; in backward the result's gradient first.
    """
    if packet in _FORWARD:
        query, key, value = inputs[:3]
        if _FORWARD[packet] == "flash":
            return _split_results_nbytes(query, key)
        return _wide_results_nbytes(query, value) if _FORWARD[packet] == "efficient" else 0
    if packet not in _BACKWARD:
        return None
    gradient, query, key, value = inputs[:4]
    shared_nbytes = _nbytes(key, query.shape[1]) + _nbytes(value, query.shape[1])
    copies_nbytes = _copy_nbytes(gradient) + (shared_nbytes if key.shape[1] != query.shape[1] else 0)
    if _BACKWARD[packet] == "efficient":
        return copies_nbytes + _blocks_nbytes(gradient, query, key, value)
    return copies_nbytes + _sums_nbytes(query) + _copy_nbytes(inputs[4])


def _split_results_nbytes(query: torch.Tensor, key: torch.Tensor) -> int:
    """Bytes of the results, and their log-sum-exp, of every split of the keys of flash attention."""
    batch, heads, num_queries, width = query.shape
    block = 256 if width <= 64 else 128 if width <= 128 else 64
    num_blocks, num_key_blocks = batch * heads * math.ceil(num_queries / 64), math.ceil(key.shape[2] / block)
    num_splits = max(_num_splits(num_blocks, 2 * count, num_key_blocks) for count in _NUM_MULTIPROCESSORS)
    row = _rounded_width(width) + 1
    return num_splits * batch * heads * num_queries * row * _FP32_NBYTES if num_splits > 1 else 0


def _num_splits(num_blocks: int, num_places: int, num_key_blocks: int) -> int:
    """Return the least number of splits that fills a GPU's places 0.85 times as well as the best."""
    if num_blocks >= 0.8 * num_places:
        return 1
    counts = range(1, min(_MAX_SPLITS, num_places, num_key_blocks) + 1)
    fit = [n for n in counts if n == 1 or math.ceil(num_key_blocks / n) != math.ceil(num_key_blocks / (n - 1))]
    filled = {n: (waves := num_blocks * n / num_places) / math.ceil(waves) for n in fit}
    best = max(filled.values(), default=0.0)
    return next((n for n, share in filled.items() if share >= 0.85 * best), 1)


def _sums_nbytes(query: torch.Tensor) -> int:
    """Bytes of fp32 sums of flash attention's backward, with as many copies as determinism takes."""
    batch, heads, num_queries, width = query.shape
    rows = batch * heads * _rounded(num_queries, 128)
    num_copies = math.ceil(max(_NUM_MULTIPROCESSORS) / max(batch * heads, 1)) if _is_deterministic() else 1
    return rows * (_rounded_width(width) * num_copies + 1) * _FP32_NBYTES


def _wide_results_nbytes(query: torch.Tensor, value: torch.Tensor) -> int:
    """Bytes of the fp32 results that the efficient kernel adds up in memory."""
    batch, heads, num_queries, _ = query.shape
    width = value.shape[-1]
    is_summed = width > 128 and query.dtype is not torch.float32
    return batch * heads * num_queries * width * _FP32_NBYTES if is_summed else 0


def _blocks_nbytes(gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    """Bytes of the efficient kernel's backward: row sums, their products, then gradients in blocks."""
    batch, heads, num_queries, width = query.shape
    num_pairs, value_width, is_fp32 = batch * heads, value.shape[-1], query.dtype is torch.float32
    rows = _rounded(num_queries, 64 if max(width, value_width) <= 64 else 128)
    blocks = (rows // 64) * (_rounded(width, 64) // 64)
    nbytes = num_pairs * blocks * (64 * 64 * _FP32_NBYTES + 16)
    if not is_fp32 and max(width, value_width) > 64:
        splits = 1 if _is_deterministic() else math.ceil(key.shape[2] / 64)
        split_pairs = max(num_pairs, min(num_pairs * splits, _MAX_SPLIT_HEADS))
        nbytes += split_pairs * 64 * (_rounded(width, 128) + _rounded(value_width, 128)) * _FP32_NBYTES
    sums_nbytes = num_pairs * num_queries * _FP32_NBYTES
    products = 1 if is_fp32 else 3 if max(width, value_width) > 128 else 0
    return sums_nbytes + max(nbytes, products * gradient.numel() * _FP32_NBYTES + sums_nbytes)


def _copy_nbytes(tensor: torch.Tensor) -> int:
    """Bytes of a copy of (batch, heads, tokens, width) where a token's heads are not side by side."""
    return 0 if tensor.transpose(1, 2).is_contiguous() else tensor.numel() * tensor.element_size()


def _nbytes(tensor: torch.Tensor, num_heads: int) -> int:
    """Bytes of a tensor like ``tensor`` (batch, heads, tokens, width) with ``num_heads``."""
    batch, _, num_tokens, width = tensor.shape
    return batch * num_heads * num_tokens * width * tensor.element_size()


def _rounded_width(width: int) -> int:
    return _rounded(width, 32 if width <= 128 else 64)


def _rounded(size: int, multiple: int) -> int:
    return math.ceil(size / multiple) * multiple


def _is_deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
