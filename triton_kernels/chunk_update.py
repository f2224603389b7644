"""The device update: an element-wise rule over one chunk, one launch, one pass over its memory.

One kernel goes through tiles, loads param32, gradient and states, hands them to the rule's formula, and writes what
comes back: the new states, param32, and from it param16, rounded to nearest even. A formula is a function of the kernel
language, one for each rule of `chunkc.runtime.update.rules`, where the definitions stand; it gets the scaled gradient,
param32, up to two states, which are zero in a parameter's first step, and a pointer to the parameter's coefficients.

Fused multiply-adds are written out and the compiler may form no others, so that an element's result depends neither on
where in a tile it lies nor on the GPU. With them each state is within two ulp of the largest operand of its sum: the
parts that are added are rounded less than once together.

Everything that changes from step to step is read from device memory, so that a step never waits for the host and never
compiles anything: whether the gradients overflowed and their scale from ``control``, a parameter's coefficients from
its row of ``rows``. A parameter without a row is inactive: its param32 and states stay, and its param16 is cast again
over whatever gradient lies there. So is every parameter after an overflow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

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

ROW_COLUMNS: Final = 9
"""Columns of a row: the coefficients of a rule, in the order in which its formula reads them, at most eight; and last 1
in a parameter's first step, else 0."""

MAX_REGISTERS: Final = 80
"""To a thread: leaves room for six blocks of 128 threads on a multiprocessor. Left alone, the assembler stops at 64 on
sm_90 and spills; it uses about 72 of these."""

_NUM_COLUMNS = tl.constexpr(ROW_COLUMNS)


@triton.jit
def _adam(grad, param, first, second, row_ptr, active):  # type: ignore[no-untyped-def]
    """AdamW and Adam: one division to an element."""
    step_size = tl.load(row_ptr, mask=active, other=0.0)
    eps = tl.load(row_ptr + 1, mask=active, other=1.0)
    decay = tl.load(row_ptr + 2, mask=active, other=0.0)
    l2 = tl.load(row_ptr + 3, mask=active, other=0.0)
    beta1 = tl.load(row_ptr + 4, mask=active, other=0.0)
    one_minus_beta1 = tl.load(row_ptr + 5, mask=active, other=0.0)
    beta2 = tl.load(row_ptr + 6, mask=active, other=0.0)
    one_minus_beta2 = tl.load(row_ptr + 7, mask=active, other=0.0)
    grad = tl.fma(l2, param, grad)
    exp_avg = tl.fma(beta1, first, one_minus_beta1 * grad)
    share = one_minus_beta2 * grad
    lost = tl.fma(one_minus_beta2, grad, -share)  # the rounding of `share`, exactly
    exp_avg_sq = tl.fma(share, grad, tl.fma(beta2, second, lost * grad))
    quotient = tl.div_rn(step_size * exp_avg, tl.sqrt_rn(exp_avg_sq) + eps)
    return tl.fma(decay, param, -quotient), exp_avg, exp_avg_sq


@triton.jit
def _sgd(grad, param, first, second, row_ptr, active):  # type: ignore[no-untyped-def]
    """SGD without states."""
    lr = tl.load(row_ptr, mask=active, other=0.0)
    l2 = tl.load(row_ptr + 1, mask=active, other=0.0)
    return tl.fma(-lr, tl.fma(l2, param, grad), param), first, second


@triton.jit
def _sgd_momentum(grad, param, first, second, row_ptr, active):  # type: ignore[no-untyped-def]
    """SGD with a buffer, which a momentum of 0 neither reads nor writes."""
    lr = tl.load(row_ptr, mask=active, other=0.0)
    l2 = tl.load(row_ptr + 1, mask=active, other=0.0)
    momentum = tl.load(row_ptr + 2, mask=active, other=0.0)
    share = tl.load(row_ptr + 3, mask=active, other=0.0)
    has_momentum = tl.load(row_ptr + 4, mask=active, other=0.0) != 0.0
    nesterov = tl.load(row_ptr + 5, mask=active, other=0.0) != 0.0
    grad = tl.fma(l2, param, grad)
    moved = tl.fma(momentum, first, share * grad)
    ahead = tl.where(nesterov, tl.fma(momentum, moved, grad), moved)
    direction = tl.where(has_momentum, ahead, grad)
    return tl.fma(-lr, direction, param), tl.where(has_momentum, moved, first), second


@triton.jit
def _lion(grad, param, first, second, row_ptr, active):  # type: ignore[no-untyped-def]
    """Lion: every element moves by ``lr`` or not at all."""
    lr = tl.load(row_ptr, mask=active, other=0.0)
    decay = tl.load(row_ptr + 1, mask=active, other=0.0)
    beta1 = tl.load(row_ptr + 2, mask=active, other=0.0)
    one_minus_beta1 = tl.load(row_ptr + 3, mask=active, other=0.0)
    beta2 = tl.load(row_ptr + 4, mask=active, other=0.0)
    one_minus_beta2 = tl.load(row_ptr + 5, mask=active, other=0.0)
    direction = tl.fma(beta1, first, one_minus_beta1 * grad)
    moved = tl.where(direction > 0.0, lr, tl.where(direction < 0.0, -lr, 0.0))
    return tl.fma(decay, param, -moved), tl.fma(beta2, first, one_minus_beta2 * grad), second


FORMULAS: Final[Mapping[str, tuple[Any, int]]] = MappingProxyType(
    {"adam": (_adam, 2), "sgd": (_sgd, 0), "sgd_momentum": (_sgd_momentum, 1), "lion": (_lion, 1)}
)
"""By the names of rules, with their numbers of states."""


def chunk_update_launch(
    rule: str,
    states: Sequence[Tensor],
    grad: Tensor,
    payload: Tensor,
    tiles: Tensor,
    row_of_param: Tensor,
    rows: Tensor,
    control: Tensor,
) -> Launch:
    """The update of one chunk, checked once; every run of it reads what the tensors hold then.

    Args:
        rule: a key of `FORMULAS`.
        states: param32 and the rule's states, float32 [numel]. Parameters in their first step start from states of
            zero, whatever lies there.
        grad: gradients, [numel], float32, float16 or bfloat16. May be ``payload`` (the overlay); else it is only read.
        payload: param16, [numel], in one of these dtypes. May be param32 itself where ``grad`` is apart.
        tiles: int32 [num_tiles, 3], from `launch.make_tiles`. What no tile covers is neither read nor written.
        row_of_param: int32 [num_params], the row of each parameter; negative: inactive. Covers the tiles' parameters.
        rows: float32 [num_rows, 9], see `ROW_COLUMNS`.
        control: float32 [2]: factor of every gradient; and 0, or anything else to leave all parameters inactive.

    Raises:
        ValueError: when a dtype, size, device or number of states breaks these rules.
    """
    formula, num_states = FORMULAS[rule]
    if len(states) != 1 + num_states:
        raise ValueError(f"{rule} updates param32 and {num_states} states, found {len(states)} lists")
    param32 = states[0]
    for name, tensor in (("grad", grad), ("payload", payload), *(("a state", state) for state in states)):
        check_list(name, tensor, param32)
    if any(state.dtype is not torch.float32 for state in states):
        raise ValueError(f"optimizer states are float32, found {[str(state.dtype) for state in states]}")
    check_table("tiles", tiles, param32, torch.int32, None, TILE_COLUMNS)
    check_table("row_of_param", row_of_param, param32, torch.int32, None)
    check_table("rows", rows, param32, torch.float32, None, ROW_COLUMNS)
    check_table("control", control, param32, torch.float32, 2)
    is_cast = payload.data_ptr() != param32.data_ptr()
    if not is_cast and grad.data_ptr() == param32.data_ptr() and param32.numel():
        raise ValueError("where the payload is param32, the gradient has memory of its own")
    first, second = (*states[1:], param32, param32)[:2]  # a formula reads as many as it has
    args = (grad, payload, param32, first, second, tiles, row_of_param, rows, control)
    constants = {"FORMULA": formula, "NUM_STATES": num_states, "IS_CAST": is_cast, "BLOCK": BLOCK, "EDGE": EDGE}
    return Launch(chunk_update_kernel, tiles.shape[0], args, constants, max_registers=MAX_REGISTERS)


@triton.jit(do_not_specialize_on_alignment=["tiles_ptr", "row_of_param_ptr", "rows_ptr", "control_ptr"])
def chunk_update_kernel(
    grad_ptr: tl.tensor,
    payload_ptr: tl.tensor,
    param32_ptr: tl.tensor,
    first_ptr: tl.tensor,
    second_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    row_of_param_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    control_ptr: tl.tensor,
    FORMULA: tl.constexpr,
    NUM_STATES: tl.constexpr,
    IS_CAST: tl.constexpr,
    BLOCK: tl.constexpr,
    EDGE: tl.constexpr,
) -> None:
    """Program ``i`` updates tile ``i``; see `chunk_update_launch`."""
    start, end, param = tile_bounds(tiles_ptr)
    row = tl.load(row_of_param_ptr + param)
    active = (row >= 0) & (tl.load(control_ptr + 1) == 0.0)
    row_ptr = rows_ptr + tl.maximum(row, 0) * _NUM_COLUMNS
    at, mask = whole_vectors(start, end, BLOCK, 0)
    _update(
        *(grad_ptr + at, payload_ptr + at, param32_ptr + at, first_ptr + at, second_ptr + at),
        *(mask, active, row_ptr, control_ptr, FORMULA, NUM_STATES, IS_CAST),
    )
    if has_edges(start, end):
        edge, edge_mask = edges(start, end, EDGE)
        _update(
            *(grad_ptr + edge, payload_ptr + edge, param32_ptr + edge, first_ptr + edge, second_ptr + edge),
            *(edge_mask, active, row_ptr, control_ptr, FORMULA, NUM_STATES, IS_CAST),
        )


@triton.jit
def _update(
    grad_ptrs: tl.tensor,
    payload_ptrs: tl.tensor,
    param32_ptrs: tl.tensor,
    first_ptrs: tl.tensor,
    second_ptrs: tl.tensor,
    mask: tl.tensor,
    active: tl.tensor,
    row_ptr: tl.tensor,
    control_ptr: tl.tensor,
    FORMULA: tl.constexpr,
    NUM_STATES: tl.constexpr,
    IS_CAST: tl.constexpr,
) -> None:
    """Update the elements in ``mask``. The loads of the chunk need nothing but the tile, and come first."""
    before = tl.load(param32_ptrs, mask=mask, other=0.0)
    grad = tl.load(grad_ptrs, mask=mask, other=0.0).to(tl.float32)
    first = before
    second = before
    if NUM_STATES > 0:
        first = tl.load(first_ptrs, mask=mask, other=0.0)
    if NUM_STATES > 1:
        second = tl.load(second_ptrs, mask=mask, other=0.0)
    is_first = tl.load(row_ptr + (_NUM_COLUMNS - 1), mask=active, other=0.0) != 0.0
    first = tl.where(is_first, 0.0, first)
    second = tl.where(is_first, 0.0, second)
    grad = grad * tl.load(control_ptr)
    after, first, second = FORMULA(grad, before, first, second, row_ptr, active)
    is_written = tl.where(active, mask, False)
    if NUM_STATES > 0:
        tl.store(first_ptrs, first, mask=is_written)
    if NUM_STATES > 1:
        tl.store(second_ptrs, second, mask=is_written)
    tl.store(param32_ptrs, after, mask=is_written)
    if IS_CAST:
        tl.store(payload_ptrs, tl.where(active, after, before).to(payload_ptrs.dtype.element_ty), mask=mask)
