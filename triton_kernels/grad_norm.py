"""Sum of squares and finiteness of a chunk's gradients: deterministic, without atomics.

Programs of the first launch reduce a tile each in float32: lanes over blocks, then a tree over lanes. The one of the
second adds the tiles' sums in float64 in ascending order, and rounds once. Relative errors add up along the longest
chain of roundings, whatever the chunk's size: one for the square, at most 22 additions within a tile and one for the
result. Squares below 2^-126 add at most 2^-149 of error each.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    make_tiles,
    tile_bounds,
    whole_vectors,
)

MAX_RELATIVE_ERROR: Final = 32 * 2.0**-24
"""Of the sum of squares against exact arithmetic: 1.9e-6, for any size."""

TILE_NUMEL: Final = 8 * BLOCK
"""Elements of the longest tile: the table of a model with 10 billion parameters takes 15 MB."""

UNROLLED: Final = 4
"""Blocks whose loads are under way at once; of eight, the assembler keeps more registers than leave room for others."""

FAN_IN: Final = 8192
"""Tiles that the second launch adds at once, eight to a thread."""

FAN_IN_NUM_WARPS: Final = 32

_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)


def make_norm_tiles(pieces: Sequence[tuple[int, int, int]], device: torch.device | str) -> Tensor:
    return make_tiles(pieces, device, TILE_NUMEL)


def grad_norm(grad: Tensor, tiles: Tensor, out: Tensor, *, partial: Tensor | None = None) -> None:
    for launch in grad_norm_launches(grad, tiles, out, partial=partial):
        launch.run()


def grad_norm_launches(
    grad: Tensor, tiles: Tensor, out: Tensor, *, partial: Tensor | None = None
) -> tuple[Launch, Launch]:
    """The two launches, to be run in order on one stream; ``tiles`` are from `make_norm_tiles`.

    ``grad`` is float32, float16 or bfloat16 [numel]; ``partial``, working memory, float32 [2, num_tiles]. ``out``,
    float32 [2], gets the sum of squares (infinite where it leaves float32), and 1 where an element is infinite or NaN,
    else 0.
    """
    check_list("grad", grad, grad)
    check_table("tiles", tiles, grad, torch.int32, None, TILE_COLUMNS)
    check_table("out", out, grad, torch.float32, 2)
    num_tiles = tiles.shape[0]
    if partial is None:
        partial = torch.empty(2, num_tiles, dtype=torch.float32, device=grad.device)
    check_table("partial", partial, grad, torch.float32, 2, num_tiles)
    tile_args, constants = (grad, tiles, partial, num_tiles), {"UNROLLED": UNROLLED, "BLOCK": BLOCK, "EDGE": EDGE}
    return (
        Launch(tile_squares_kernel, num_tiles, tile_args, constants),
        Launch(add_tiles_kernel, 1, (partial, out, num_tiles), {"FAN_IN": FAN_IN}, FAN_IN_NUM_WARPS),
    )


@triton.jit(do_not_specialize=["num_tiles"], do_not_specialize_on_alignment=["tiles_ptr", "partial_ptr"])
def tile_squares_kernel(
    grad_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    num_tiles: tl.tensor,
    UNROLLED: tl.constexpr,
    BLOCK: tl.constexpr,
    EDGE: tl.constexpr,
) -> None:
    start, end, _ = tile_bounds(tiles_ptr)
    lane_squares = tl.zeros([BLOCK], dtype=tl.float32)
    are_finite = tl.full([BLOCK], 1, dtype=tl.int1)
    for skipped in range(0, (end - start).to(tl.int32), UNROLLED * BLOCK):
        for block in tl.static_range(UNROLLED):
            at, mask = whole_vectors(start, end, BLOCK, skipped + block * BLOCK)
            block_squares, is_finite = _measured(grad_ptr + at, mask)
            lane_squares += block_squares
            are_finite = are_finite & is_finite
    squares, flag = tl.sum(lane_squares, axis=0), _flag(are_finite)
    if has_edges(start, end):
        edge, edge_mask = edges(start, end, EDGE)
        edge_squares, edge_is_finite = _measured(grad_ptr + edge, edge_mask)
        squares += tl.sum(edge_squares, axis=0)
        flag = tl.maximum(flag, _flag(edge_is_finite))
    tile = tl.program_id(0)
    tl.store(partial_ptr + tile, squares)
    tl.store(partial_ptr + num_tiles + tile, flag)


@triton.jit
def _measured(grad_ptrs: tl.tensor, mask: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Squares of the elements in ``mask``, else 0; and whether each is finite."""
    grad = tl.load(grad_ptrs, mask=mask, other=0.0).to(tl.float32)
    return grad * grad, tl.abs(grad) <= _LARGEST  # false for NaN


@triton.jit
def _flag(are_finite: tl.tensor) -> tl.tensor:
    return tl.max(tl.where(are_finite, 0.0, 1.0), axis=0)


@triton.jit(do_not_specialize=["num_tiles"], do_not_specialize_on_alignment=["partial_ptr", "out_ptr"])
def add_tiles_kernel(partial_ptr: tl.tensor, out_ptr: tl.tensor, num_tiles: tl.tensor, FAN_IN: tl.constexpr) -> None:
    squares = tl.zeros([FAN_IN], dtype=tl.float64)
    flags = tl.zeros([FAN_IN], dtype=tl.float32)
    first = 0
    while first < num_tiles:
        tiles = first + tl.arange(0, FAN_IN)
        mask = tiles < num_tiles
        squares += tl.load(partial_ptr + tiles, mask=mask, other=0.0).to(tl.float64)
        flags = tl.maximum(flags, tl.load(partial_ptr + num_tiles + tiles, mask=mask, other=0.0))
        first += FAN_IN
    tl.store(out_ptr, tl.sum(squares, axis=0).to(tl.float32))
    tl.store(out_ptr + 1, tl.max(flags, axis=0))
