"""The device update over states quantised block by block: one launch, one pass over a chunk's memory.

A program takes a tile of up to four blocks, one to a warp: it decodes the states, hands them to the rule's formula
(`chunk_update`), writes param32 and param16, and encodes what comes back: the largest magnitude of each block, the
quotient by it, and the nearest code. Codes are defined in ``chunkc.runtime.update.block_quantisation``, operation by
operation, and found as there, by the bin of a quotient and the one border in it.

Full tiles need no mask, which makes their accesses vectors; the last tile of a parameter is masked. Everything else is
as `chunk_update` says: what changes from step to step is read from device memory, parameters without a row stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from chunkc.triton_kernels.chunk_update import FORMULAS, ROW_COLUMNS
from chunkc.triton_kernels.launch import (
    BLOCK,
    TILE_COLUMNS,
    Launch,
    check_list,
    check_table,
    tile_bounds,
)

BLOCK_NUMEL: Final = 256
"""Elements that share a scale."""

NUM_CODES: Final = 256

BLOCK_FORMULAS: Final[Mapping[str, Any]] = MappingProxyType({"adam_8bit": FORMULAS["adam"][0]})
"""By the names of rules with two quantised states, of which the first is signed."""

MAX_REGISTERS: Final = 168
"""To a thread: room for three programs of 128 threads on a multiprocessor; 128 registers spill by Triton 3.6."""

_NUM_COLUMNS = tl.constexpr(ROW_COLUMNS)
_BLOCK_NUMEL = tl.constexpr(BLOCK_NUMEL)
_NUM_CODES = tl.constexpr(NUM_CODES)
_INFINITY_BITS = tl.constexpr(0x7F800000)
_MIN_SCALE_BITS = tl.constexpr((127 - 100) << 23)
_ONE_BITS = tl.constexpr(0x3F800000)


def block_update_launch(
    rule: str,
    lists: Sequence[Tensor],
    grad: Tensor,
    payload: Tensor,
    tiles: Tensor,
    row_of_param: Tensor,
    rows: Tensor,
    control: Tensor,
) -> Launch:
    """The update of one chunk, checked once; every run of it reads what the tensors hold then.

    Args:
        rule: a key of `BLOCK_FORMULAS`.
        lists: param32, float32 [numel]; codes of both states, uint8 [numel]; their scales, float32 [ceil(numel / 256)];
            and the tables of codes: float32 [2, 256], float32 [2, 256] and int32 [2, 2, num_bins].
        grad, payload, row_of_param, rows, control: as of `chunk_update.chunk_update_launch`.
        tiles: as there, of pieces that begin at multiples of 256.

    Raises:
        ValueError: when a dtype, size, device or number of lists breaks these rules.
    """
    if len(lists) != 8:
        raise ValueError(
            f"{rule} updates param32, two states and their scales by three tables, found {len(lists)} lists"
        )
    param32, first, second, first_scale, second_scale, values, borders, bases = lists
    for name, tensor in (("grad", grad), ("payload", payload), ("param32", param32)):
        check_list(name, tensor, param32)
    if param32.dtype is not torch.float32:
        raise ValueError(f"param32 is float32, found {param32.dtype}")
    numel, num_blocks = param32.numel(), -(-param32.numel() // BLOCK_NUMEL)
    for name, codes, scales in (("first", first, first_scale), ("second", second, second_scale)):
        check_table(f"the {name} state", codes, param32, torch.uint8, numel)
        check_table(f"scales of the {name} state", scales, param32, torch.float32, num_blocks)
    check_table("values", values, param32, torch.float32, 2, NUM_CODES)
    check_table("borders", borders, param32, torch.float32, 2, NUM_CODES)
    check_table("bases", bases, param32, torch.int32, 2, 2, None)
    check_table("tiles", tiles, param32, torch.int32, None, TILE_COLUMNS)
    check_table("row_of_param", row_of_param, param32, torch.int32, None)
    check_table("rows", rows, param32, torch.float32, None, ROW_COLUMNS)
    check_table("control", control, param32, torch.float32, 2)
    is_cast = payload.data_ptr() != param32.data_ptr()
    if not is_cast and grad.data_ptr() == param32.data_ptr() and numel:
        raise ValueError("where the payload is param32, the gradient has memory of its own")
    num_bins = bases.shape[2]
    constants = {
        "FORMULA": BLOCK_FORMULAS[rule],
        "IS_CAST": is_cast,
        "NUM_BLOCKS": BLOCK // BLOCK_NUMEL,
        "NUM_BINS": num_bins,
        "FIRST_BIN": 0x3F80 - num_bins + 1,
    }
    args = (grad, payload, *lists, tiles, row_of_param, rows, control)
    return Launch(block_update_kernel, tiles.shape[0], args, constants, max_registers=MAX_REGISTERS)


@triton.jit(do_not_specialize_on_alignment=["tiles_ptr", "row_of_param_ptr", "rows_ptr", "control_ptr"])
def block_update_kernel(
    grad_ptr: tl.tensor,
    payload_ptr: tl.tensor,
    param32_ptr: tl.tensor,
    first_ptr: tl.tensor,
    second_ptr: tl.tensor,
    first_scale_ptr: tl.tensor,
    second_scale_ptr: tl.tensor,
    values_ptr: tl.tensor,
    borders_ptr: tl.tensor,
    bases_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    row_of_param_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    control_ptr: tl.tensor,
    FORMULA: tl.constexpr,
    IS_CAST: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    NUM_BINS: tl.constexpr,
    FIRST_BIN: tl.constexpr,
) -> None:
    """Program ``i`` updates tile ``i``; see `block_update_launch`."""
    start, end, param = tile_bounds(tiles_ptr)
    start = start // _BLOCK_NUMEL * _BLOCK_NUMEL  # as it is: `tl.multiple_of` would say it of `end`, too
    row = tl.load(row_of_param_ptr + param)
    active = (row >= 0) & (tl.load(control_ptr + 1) == 0.0)
    row_ptr = rows_ptr + tl.maximum(row, 0) * _NUM_COLUMNS
    blocks = tl.arange(0, NUM_BLOCKS)
    offsets = blocks[:, None] * _BLOCK_NUMEL + tl.arange(0, _BLOCK_NUMEL)[None, :]
    numel = (end - start).to(tl.int32)
    in_blocks = blocks * _BLOCK_NUMEL < numel
    scale_at = start // _BLOCK_NUMEL + blocks
    at = start + offsets
    if numel == NUM_BLOCKS * _BLOCK_NUMEL:
        mask = tl.full([NUM_BLOCKS, _BLOCK_NUMEL], True, tl.int1)
        _update(
            *(grad_ptr + at, payload_ptr + at, param32_ptr + at, first_ptr + at, second_ptr + at),
            *(first_scale_ptr + scale_at, second_scale_ptr + scale_at, values_ptr, borders_ptr, bases_ptr),
            *(mask, in_blocks, active, row_ptr, control_ptr, FORMULA, IS_CAST, NUM_BINS, FIRST_BIN),
        )
    else:
        _update(
            *(grad_ptr + at, payload_ptr + at, param32_ptr + at, first_ptr + at, second_ptr + at),
            *(first_scale_ptr + scale_at, second_scale_ptr + scale_at, values_ptr, borders_ptr, bases_ptr),
            *(offsets < numel, in_blocks, active, row_ptr, control_ptr, FORMULA, IS_CAST, NUM_BINS, FIRST_BIN),
        )


@triton.jit
def _update(
    grad_ptrs: tl.tensor,
    payload_ptrs: tl.tensor,
    param32_ptrs: tl.tensor,
    first_ptrs: tl.tensor,
    second_ptrs: tl.tensor,
    first_scale_ptrs: tl.tensor,
    second_scale_ptrs: tl.tensor,
    values_ptr: tl.tensor,
    borders_ptr: tl.tensor,
    bases_ptr: tl.tensor,
    mask: tl.tensor,
    in_blocks: tl.tensor,
    active: tl.tensor,
    row_ptr: tl.tensor,
    control_ptr: tl.tensor,
    FORMULA: tl.constexpr,
    IS_CAST: tl.constexpr,
    NUM_BINS: tl.constexpr,
    FIRST_BIN: tl.constexpr,
) -> None:
    """Update the elements in ``mask`` of the blocks ``in_blocks``."""
    before = tl.load(param32_ptrs, mask=mask, other=0.0)
    grad = tl.load(grad_ptrs, mask=mask, other=0.0).to(tl.float32)
    first_codes = tl.load(first_ptrs, mask=mask, other=0).to(tl.int32)
    second_codes = tl.load(second_ptrs, mask=mask, other=0).to(tl.int32)
    first_scale = tl.load(first_scale_ptrs, mask=in_blocks, other=0.0)
    second_scale = tl.load(second_scale_ptrs, mask=in_blocks, other=0.0)
    is_first = tl.load(row_ptr + (_NUM_COLUMNS - 1), mask=active, other=0.0) != 0.0
    first = tl.where(is_first, 0.0, tl.load(values_ptr + first_codes) * first_scale[:, None])
    second = tl.where(is_first, 0.0, tl.load(values_ptr + _NUM_CODES + second_codes) * second_scale[:, None])
    grad = grad * tl.load(control_ptr)
    after, first, second = FORMULA(grad, before, first, second, row_ptr, active)
    is_written = tl.where(active, mask, False)
    blocks_written = tl.where(active, in_blocks, False)
    tl.store(param32_ptrs, after, mask=is_written)
    if IS_CAST:
        tl.store(payload_ptrs, tl.where(active, after, before).to(payload_ptrs.dtype.element_ty), mask=mask)
    codes, scale = _encode(first, mask, borders_ptr, bases_ptr, NUM_BINS, FIRST_BIN)
    tl.store(first_ptrs, codes, mask=is_written)
    tl.store(first_scale_ptrs, scale, mask=blocks_written)
    codes, scale = _encode(second, mask, borders_ptr + _NUM_CODES, bases_ptr + 2 * NUM_BINS, NUM_BINS, FIRST_BIN)
    tl.store(second_ptrs, codes, mask=is_written)
    tl.store(second_scale_ptrs, scale, mask=blocks_written)


@triton.jit
def _encode(values, mask, borders_ptr, bases_ptr, NUM_BINS: tl.constexpr, FIRST_BIN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Codes, uint8, and the scale of each block; magnitudes are compared as the integers of their bits."""
    magnitudes = tl.where(mask, values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    largest = tl.max(magnitudes, axis=1)
    is_finite = largest < _INFINITY_BITS
    is_kept = is_finite & (largest >= _MIN_SCALE_BITS)
    divisor = tl.where(is_kept, largest, _ONE_BITS).to(tl.float32, bitcast=True)
    scale = tl.where(is_kept, divisor, tl.where(is_finite, 0.0, float("nan")))
    quotients = tl.where(mask & is_kept[:, None], tl.div_rn(values, divisor[:, None] + tl.zeros_like(values)), 0.0)
    bits = quotients.to(tl.int32, bitcast=True)
    bins = tl.maximum(((bits & 0x7FFFFFFF) >> 16) - FIRST_BIN, 0) + tl.where(bits < 0, NUM_BINS, 0)
    bases = tl.load(bases_ptr + bins)
    codes = bases + tl.where(quotients > tl.load(borders_ptr + bases), 1, 0)
    return codes.to(tl.uint8), scale
