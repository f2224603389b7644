"""Workspaces of the attention kernels of GPUs, by hand."""

import pytest
import torch

from chunkc.capture.attention.workspace import gpu_attention_nbytes
from chunkc.capture.operators.workspace import BASE_NBYTES, kernel_workspace_nbytes

aten = torch.ops.aten
FLASH, CUDNN, EFFICIENT = (
    getattr(aten, f"_scaled_dot_product_{kind}_attention") for kind in ("flash", "cudnn", "efficient")
)
FLASH_BACK, CUDNN_BACK, EFFICIENT_BACK = (
    getattr(aten, f"_scaled_dot_product_{kind}_attention_backward") for kind in ("flash", "cudnn", "efficient")
)


def heads(batch: int, num_heads: int, tokens: int, width: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """As a linear layer makes them: the heads of a token side by side."""
    return torch.empty(batch, tokens, num_heads, width, dtype=dtype, device="meta").transpose(1, 2)


def test_flash_forward_takes_none_where_queries_fill_the_gpu() -> None:
    q = heads(4, 25, 1024, 64)
    assert gpu_attention_nbytes(FLASH, [q, q, q]) == 0


def test_flash_forward_splits_the_keys_of_few_queries() -> None:
    """One head of 64 queries over 4096 keys: 16 blocks of 256 keys, all split on any GPU."""
    q, k = heads(1, 1, 64, 64), heads(1, 1, 4096, 64)
    assert gpu_attention_nbytes(FLASH, [q, k, k]) == 16 * 64 * (64 + 1) * 4


@pytest.mark.parametrize("packet", [FLASH_BACK, CUDNN_BACK])
def test_backward_adds_up_gradients_of_queries_in_fp32(packet: object) -> None:
    """Rows in blocks of 128, widths in 32; and a sum of every row."""
    q = heads(2, 3, 200, 40)
    assert gpu_attention_nbytes(packet, [q, q, q, q, q]) == 2 * 3 * 256 * (64 + 1) * 4


def test_backward_copies_what_is_not_contiguous_by_token() -> None:
    q, other = heads(2, 4, 128, 64), torch.empty(2, 4, 128, 64, dtype=torch.bfloat16, device="meta")
    sums, copy = 2 * 4 * 128 * (64 + 1) * 4, q.numel() * 2
    assert gpu_attention_nbytes(FLASH_BACK, [q, q, q, q, q]) == sums
    assert gpu_attention_nbytes(FLASH_BACK, [other, q, q, q, q]) == sums + copy
    assert gpu_attention_nbytes(FLASH_BACK, [other, q, q, q, other]) == sums + 2 * copy


def test_shared_keys_get_a_gradient_for_every_head_of_queries() -> None:
    q, k = heads(2, 8, 128, 64), heads(2, 2, 256, 64)
    alone = gpu_attention_nbytes(FLASH_BACK, [q, q, q, q, q])
    assert alone is not None
    assert gpu_attention_nbytes(FLASH_BACK, [q, q, k, k, q]) == alone + 2 * (2 * 8 * 256 * 64) * 2


def test_deterministic_backward_takes_a_copy_for_every_split() -> None:
    q = heads(2, 4, 128, 64)
    torch.use_deterministic_algorithms(True)
    try:
        found = gpu_attention_nbytes(FLASH_BACK, [q, q, q, q, q])
    finally:
        torch.use_deterministic_algorithms(False)
    assert found == 2 * 4 * 128 * (64 * 24 + 1) * 4, "188 multiprocessors over 8 heads"


def test_the_efficient_kernel_adds_up_wide_results_in_fp32() -> None:
    assert gpu_attention_nbytes(EFFICIENT, [heads(2, 4, 100, 128)] * 3) == 0
    assert gpu_attention_nbytes(EFFICIENT, [heads(2, 4, 100, 160)] * 3) == 2 * 4 * 100 * 160 * 4
    assert gpu_attention_nbytes(EFFICIENT, [heads(2, 4, 100, 160, torch.float32)] * 3) == 0


def test_the_efficient_kernel_has_gradients_of_queries_in_blocks() -> None:
    """Two blocks of 64 queries and 64 elements, each with a lock; and a sum of every row."""
    q = heads(2, 4, 100, 40)
    assert gpu_attention_nbytes(EFFICIENT_BACK, [q, q, q, q, q]) == 8 * (2 * (64 * 64 * 4 + 16) + 100 * 4)


def test_in_fp32_the_efficient_kernel_makes_row_sums_of_products() -> None:
    """The product and two sums of its rows; blocks of the queries' gradient come later and are smaller."""
    q = heads(2, 4, 128, 64, torch.float32)
    product, sums = q.numel() * 4, 8 * 128 * 4
    assert gpu_attention_nbytes(EFFICIENT_BACK, [q, q, q, q, q]) == product + 2 * sums


def test_wide_heads_add_up_gradients_of_keys_in_memory() -> None:
    """Of 4 heads over 128 keys both splits: 64 keys each, widths in 128, keys and values."""
    q = heads(1, 4, 128, 128)
    blocks = 4 * (2 * 2 * (64 * 64 * 4 + 16))
    assert gpu_attention_nbytes(EFFICIENT_BACK, [q, q, q, q, q]) == 4 * 128 * 4 + blocks + 8 * 64 * 256 * 4


def test_the_allowance_of_an_operator_is_this_workspace() -> None:
    q = heads(2, 4, 128, 64)
    own = gpu_attention_nbytes(FLASH_BACK, [q, q, q, q, q])
    assert own is not None
    assert kernel_workspace_nbytes(FLASH_BACK, [q, q, q, q, q], [q, q, q], "cuda") == BASE_NBYTES + own
    assert gpu_attention_nbytes(aten._scaled_dot_product_flash_attention_for_cpu, [q, q, q]) is None
    assert gpu_attention_nbytes(None, []) is None
