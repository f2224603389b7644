"""The device update: Adam or AdamW over one chunk, one launch, one pass over its memory.

Per element, in float32 (Kingma and Ba, "Adam", algorithm 1; Loshchilov and Hutter, "Decoupled weight decay
regularization", algorithm 2; semantics are torch.optim's)::

    g = grad16 * grad_scale + l2 * p
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    p = decay * p - step_size * m / (sqrt(v) / sqrt_correction + eps)
    param16 = p, rounded to nearest even

The quotient is computed as ``(step_size * c) * m / (sqrt(v) + eps * c)``, where ``c`` is the correction: one division
to an element instead of two, and no more roundings. Fused multiply-adds are written out and the compiler may form no
others, so that an element's result depends neither on where in a tile it lies nor on the GPU. With them each moment is
within two ulp of the largest operand of its sum: the parts that are added are rounded less than once together.

Everything that changes from step to step is read from device memory, so that a step never waits for the host and never
compiles anything: whether the gradients overflowed and their scale from ``control``, a parameter's hyperparameters
from its row of ``rows``. A parameter without a row is inactive: its param32 and moments stay, and its param16 is cast
again over whatever gradient lies there. So is every parameter after an overflow.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from chunkc.triton_kernels.launch import (
    BLOCK,
    EDGE,
    TILE_COLUMNS,
    Launch,
    check_list,
    check_table,
    edges,
    has_edges,
    tile_bounds,
    whole_vectors,
)

ROW_COLUMNS: Final = 10
"""Columns of a row: step_size = lr / (1 - beta1^t), sqrt_correction = sqrt(1 - beta2^t), eps, decay = 1 - lr * wd for
AdamW and 1 for Adam, l2 = wd for Adam and 0 for AdamW, beta1, 1 - beta1, beta2, 1 - beta2, and 1 when t = 1, else 0."""

MAX_REGISTERS: Final = 80
"""To a thread: leaves room for six blocks of 128 threads on a multiprocessor. Left alone, the assembler stops at 64 on
sm_90 and spills; it uses about 72 of these."""

_NUM_COLUMNS = tl.constexpr(ROW_COLUMNS)


def chunk_adam(
    grad: Tensor,
    payload: Tensor,
    param32: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    tiles: Tensor,
    row_of_param: Tensor,
    rows: Tensor,
    control: Tensor,
) -> None:
    """Update one chunk in place, on the current stream; see `chunk_adam_launch` for the arguments."""
    chunk_adam_launch(grad, payload, param32, exp_avg, exp_avg_sq, tiles, row_of_param, rows, control).run()


def chunk_adam_launch(
    grad: Tensor,
    payload: Tensor,
    param32: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    tiles: Tensor,
    row_of_param: Tensor,
    rows: Tensor,
    control: Tensor,
) -> Launch:
    """The update of one chunk, checked once; every run of it reads what the tensors hold then.

    Args:
        grad: gradients, [numel], float32, float16 or bfloat16. May be ``payload`` (the overlay); else it is only read.
        payload: param16, [numel], in one of these dtypes. May be ``param32`` itself where ``grad`` is apart.
        param32, exp_avg, exp_avg_sq: the OS triple, float32 [numel]. Parameters in their first step start from zero
            moments, whatever lies there.
        tiles: int32 [num_tiles, 3], from `launch.make_tiles`. What no tile covers is neither read nor written.
        row_of_param: int32 [num_params], the row of each parameter; negative: inactive. Covers the tiles' parameters.
        rows: float32 [num_rows, 10], see `ROW_COLUMNS`.
        control: float32 [2]: factor of every gradient; and 0, or anything else to leave all parameters inactive.

    Raises:
        ValueError: when a dtype, size or device breaks these rules.
    """
    for name, tensor in (("grad", grad), ("payload", payload), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        check_list(name, tensor, param32)
    for name, tensor in (("param32", param32), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        check_list(name, tensor, param32)
        if tensor.dtype is not torch.float32:
            raise ValueError(f"an OS triple is float32; {name} is {tensor.dtype}")
    check_table("tiles", tiles, param32, torch.int32, None, TILE_COLUMNS)
    check_table("row_of_param", row_of_param, param32, torch.int32, None)
    check_table("rows", rows, param32, torch.float32, None, ROW_COLUMNS)
    check_table("control", control, param32, torch.float32, 2)
    is_cast = payload.data_ptr() != param32.data_ptr()
    if not is_cast and grad.data_ptr() == param32.data_ptr() and param32.numel():
        raise ValueError("where the payload is param32, the gradient has memory of its own")
    args = (grad, payload, param32, exp_avg, exp_avg_sq, tiles, row_of_param, rows, control)
    constants = {"IS_CAST": is_cast, "BLOCK": BLOCK, "EDGE": EDGE}
    return Launch(chunk_adam_kernel, tiles.shape[0], args, constants, max_registers=MAX_REGISTERS)


@triton.jit(do_not_specialize_on_alignment=["tiles_ptr", "row_of_param_ptr", "rows_ptr", "control_ptr"])
def chunk_adam_kernel(
    grad_ptr: tl.tensor,
    payload_ptr: tl.tensor,
    param32_ptr: tl.tensor,
    exp_avg_ptr: tl.tensor,
    exp_avg_sq_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    row_of_param_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    control_ptr: tl.tensor,
    IS_CAST: tl.constexpr,
    BLOCK: tl.constexpr,
    EDGE: tl.constexpr,
) -> None:
    """Program ``i`` updates tile ``i``; see `chunk_adam_launch`."""
    start, end, param = tile_bounds(tiles_ptr)
    row = tl.load(row_of_param_ptr + param)
    active = (row >= 0) & (tl.load(control_ptr + 1) == 0.0)
    row_ptr = rows_ptr + tl.maximum(row, 0) * _NUM_COLUMNS
    at, mask = whole_vectors(start, end, BLOCK, 0)
    _update(
        *(grad_ptr + at, payload_ptr + at, param32_ptr + at, exp_avg_ptr + at, exp_avg_sq_ptr + at),
        *(mask, active, row_ptr, control_ptr, IS_CAST),
    )
    if has_edges(start, end):
        edge, edge_mask = edges(start, end, EDGE)
        _update(
            *(grad_ptr + edge, payload_ptr + edge, param32_ptr + edge, exp_avg_ptr + edge, exp_avg_sq_ptr + edge),
            *(edge_mask, active, row_ptr, control_ptr, IS_CAST),
        )


@triton.jit
def _update(
    grad_ptrs: tl.tensor,
    payload_ptrs: tl.tensor,
    param32_ptrs: tl.tensor,
    exp_avg_ptrs: tl.tensor,
    exp_avg_sq_ptrs: tl.tensor,
    mask: tl.tensor,
    active: tl.tensor,
    row_ptr: tl.tensor,
    control_ptr: tl.tensor,
    IS_CAST: tl.constexpr,
) -> None:
    """Update the elements in ``mask``. The loads of the chunk need nothing but the tile, and come first."""
    before = tl.load(param32_ptrs, mask=mask, other=0.0)
    grad = tl.load(grad_ptrs, mask=mask, other=0.0).to(tl.float32)
    exp_avg = tl.load(exp_avg_ptrs, mask=mask, other=0.0)
    exp_avg_sq = tl.load(exp_avg_sq_ptrs, mask=mask, other=0.0)

    step_size = tl.load(row_ptr, mask=active, other=0.0)
    sqrt_correction = tl.load(row_ptr + 1, mask=active, other=0.0)
    eps = tl.load(row_ptr + 2, mask=active, other=1.0)
    decay = tl.load(row_ptr + 3, mask=active, other=0.0)
    l2 = tl.load(row_ptr + 4, mask=active, other=0.0)
    beta1 = tl.load(row_ptr + 5, mask=active, other=0.0)
    one_minus_beta1 = tl.load(row_ptr + 6, mask=active, other=0.0)
    beta2 = tl.load(row_ptr + 7, mask=active, other=0.0)
    one_minus_beta2 = tl.load(row_ptr + 8, mask=active, other=0.0)
    is_first = tl.load(row_ptr + 9, mask=active, other=0.0) != 0.0

    grad = tl.fma(l2, before, grad * tl.load(control_ptr))
    exp_avg = tl.fma(beta1, tl.where(is_first, 0.0, exp_avg), one_minus_beta1 * grad)
    share = one_minus_beta2 * grad
    lost = tl.fma(one_minus_beta2, grad, -share)  # the rounding of `share`, exactly
    exp_avg_sq = tl.fma(share, grad, tl.fma(beta2, tl.where(is_first, 0.0, exp_avg_sq), lost * grad))
    denominator = tl.fma(eps, sqrt_correction, tl.sqrt_rn(exp_avg_sq))
    quotient = tl.div_rn((step_size * sqrt_correction) * exp_avg, denominator)
    after = tl.fma(decay, before, -quotient)

    is_written = tl.where(active, mask, False)
    tl.store(exp_avg_ptrs, exp_avg, mask=is_written)
    tl.store(exp_avg_sq_ptrs, exp_avg_sq, mask=is_written)
    tl.store(param32_ptrs, after, mask=is_written)
    if IS_CAST:
        tl.store(payload_ptrs, tl.where(active, after, before).to(payload_ptrs.dtype.element_ty), mask=mask)
