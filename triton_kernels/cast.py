"""Casts of a chunk's param32 to its param16, rounding to nearest even."""

from __future__ import annotations

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


def restore(param32: Tensor, payload: Tensor, tiles: Tensor) -> None:
    restore_launch(param32, payload, tiles).run()


def restore_launch(param32: Tensor, payload: Tensor, tiles: Tensor) -> Launch:
    """The cast of the elements that ``tiles`` (`launch.make_tiles`) cover, over what the payload holds.

    ``param32`` is float32 [numel], ``payload`` float32, float16 or bfloat16 [numel]; nothing happens where both are
    one.
    """
    check_list("param32", param32, payload)
    check_list("payload", payload, payload)
    check_table("tiles", tiles, payload, torch.int32, None, TILE_COLUMNS)
    if param32.dtype is not torch.float32:
        raise ValueError(f"param32 is float32, found {param32.dtype}")
    grid = tiles.shape[0] if payload.data_ptr() != param32.data_ptr() else 0
    return Launch(restore_kernel, grid, (param32, payload, tiles), {"BLOCK": BLOCK, "EDGE": EDGE})


@triton.jit(do_not_specialize_on_alignment=["tiles_ptr"])
def restore_kernel(
    param32_ptr: tl.tensor, payload_ptr: tl.tensor, tiles_ptr: tl.tensor, BLOCK: tl.constexpr, EDGE: tl.constexpr
) -> None:
    start, end, _ = tile_bounds(tiles_ptr)
    at, mask = whole_vectors(start, end, BLOCK, 0)
    _cast_lanes(param32_ptr + at, payload_ptr + at, mask)
    if has_edges(start, end):
        edge, edge_mask = edges(start, end, EDGE)
        _cast_lanes(param32_ptr + edge, payload_ptr + edge, edge_mask)


@triton.jit
def _cast_lanes(param32_ptrs: tl.tensor, payload_ptrs: tl.tensor, mask: tl.tensor) -> None:
    values = tl.load(param32_ptrs, mask=mask, other=0.0)
    tl.store(payload_ptrs, values.to(payload_ptrs.dtype.element_ty), mask=mask)
