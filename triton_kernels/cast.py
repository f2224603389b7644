"""Casts between float32 and 16 bits, rounding to nearest even: of whole tensors, and of chunks."""

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
    num_blocks,
    tile_bounds,
    whole_vectors,
)


def cast(source: Tensor, target: Tensor) -> None:
    cast_launch(source, target).run()


def cast_launch(source: Tensor, target: Tensor) -> Launch:
    """The cast of ``source`` to ``target``: float32, float16 or bfloat16 [numel], without shared memory.

    Values beyond the target's range become infinite, NaN stays NaN. Raises ValueError where the tensors do not fit.
    """
    check_list("source", source, target)
    check_list("target", target, target)
    numel = source.numel()
    return Launch(cast_kernel, num_blocks(numel), (source, target, numel), {"BLOCK": BLOCK, "EDGE": EDGE})


def restore(param32: Tensor, payload: Tensor, tiles: Tensor) -> None:
    restore_launch(param32, payload, tiles).run()


def restore_launch(param32: Tensor, payload: Tensor, tiles: Tensor) -> Launch:
    """The cast of the elements that ``tiles`` cover, over whatever the payload holds there.

    ``param32`` is float32 [numel], ``payload`` float32, float16 or bfloat16 [numel]; where it is ``param32`` itself,
    there is nothing to do. ``tiles`` are from `launch.make_tiles`.
    """
    check_list("param32", param32, payload)
    check_list("payload", payload, payload)
    check_table("tiles", tiles, payload, torch.int32, None, TILE_COLUMNS)
    if param32.dtype is not torch.float32:
        raise ValueError(f"param32 is float32, found {param32.dtype}")
    grid = tiles.shape[0] if payload.data_ptr() != param32.data_ptr() else 0
    return Launch(restore_kernel, grid, (param32, payload, tiles), {"BLOCK": BLOCK, "EDGE": EDGE})


@triton.jit(do_not_specialize=["numel"])
def cast_kernel(
    source_ptr: tl.tensor, target_ptr: tl.tensor, numel: tl.tensor, BLOCK: tl.constexpr, EDGE: tl.constexpr
) -> None:
    """Cast elements from ``i * BLOCK``, program ``i``."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    end = tl.minimum(start + BLOCK, numel)
    _cast_range(source_ptr, target_ptr, start, end, BLOCK, EDGE)


@triton.jit(do_not_specialize_on_alignment=["tiles_ptr"])
def restore_kernel(
    param32_ptr: tl.tensor, payload_ptr: tl.tensor, tiles_ptr: tl.tensor, BLOCK: tl.constexpr, EDGE: tl.constexpr
) -> None:
    start, end, _ = tile_bounds(tiles_ptr)
    _cast_range(param32_ptr, payload_ptr, start, end, BLOCK, EDGE)


@triton.jit
def _cast_range(
    source_ptr: tl.tensor,
    target_ptr: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    BLOCK: tl.constexpr,
    EDGE: tl.constexpr,
) -> None:
    at, mask = whole_vectors(start, end, BLOCK, 0)
    _cast_lanes(source_ptr + at, target_ptr + at, mask)
    if has_edges(start, end):
        edge, edge_mask = edges(start, end, EDGE)
        _cast_lanes(source_ptr + edge, target_ptr + edge, edge_mask)


@triton.jit
def _cast_lanes(source_ptrs: tl.tensor, target_ptrs: tl.tensor, mask: tl.tensor) -> None:
    """Cast by way of float32, which holds every 16-bit value exactly: one rounding."""
    values = tl.load(source_ptrs, mask=mask, other=0.0).to(tl.float32)
    tl.store(target_ptrs, values.to(target_ptrs.dtype.element_ty), mask=mask)
