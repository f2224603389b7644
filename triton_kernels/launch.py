"""Tiles of a chunk, and how kernels are launched over them.

A *tile* is a run of elements of one parameter, one program's work; a chunk's tiles are a table in device memory.
Between tiles lies padding, which no kernel may touch, so every access is masked. A masked access is only a vector
access when the compiler can prove that the mask is equal over each vector. So a program works in two parts: *whole
vectors*, groups of 16 elements aligned in the chunk, and *edges*, fewer than 16 elements before and after them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK: Final = 1024
"""Elements that a program takes at once: with `NUM_WARPS`, eight to a thread, one 128-bit access of a 16-bit list."""

NUM_WARPS: Final = 4

EDGE: Final = 32 * NUM_WARPS
"""Lanes that handle the edges, of which 30 are used at most: one to a thread, so that no thread repeats another's."""

MAX_NUMEL: Final = 2**31 - 1
"""Elements that a table of tiles can address."""

TILE_COLUMNS: Final = 3

_VECTOR = tl.constexpr(16)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Launch:
    """One kernel over ``grid`` programs, ready to be launched any number of times.

    ``args`` are in the kernel's order; tensors are read when the kernel runs. ``constants`` are compile-time
    parameters, ``max_registers`` to a thread are the assembler's own choice when left out.
    """

    kernel: Any
    grid: int
    args: tuple[Tensor | int, ...]
    constants: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = NUM_WARPS
    max_registers: int | None = None

    @cached_property
    def options(self) -> dict[str, int | bool]:
        """Options of compilation; nothing is contracted, since contractions could differ from place to place."""
        options: dict[str, int | bool] = {"num_warps": self.num_warps, "enable_fp_fusion": False}
        return options if self.max_registers is None else options | {"maxnreg": self.max_registers}

    @cached_property
    def device(self) -> torch.device:
        return next(arg.device for arg in self.args if isinstance(arg, Tensor))

    def run(self) -> None:
        """Launch on the current stream of the tensors' device, without waiting."""
        if not self.grid:
            return
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            self.kernel[(self.grid,)](*self.args, **self.constants, **self.options)


def make_tiles(pieces: Sequence[tuple[int, int, int]], device: torch.device | str, max_numel: int = BLOCK) -> Tensor:
    """Cut ``pieces``, ranges [start, end) of parameters in a chunk, into tiles of at most ``max_numel``.

    Returns int32 [num_tiles, 3]: rows ``(start, end, param)``, ascending. All tiles of a piece but its last end at a
    multiple of 16, as does ``max_numel``. Raises ValueError when pieces overlap or leave [0, `MAX_NUMEL`).
    """
    tables = [torch.empty(0, TILE_COLUMNS, dtype=torch.int64)]
    reached = 0
    for start, end, param in sorted(piece for piece in pieces if piece[0] != piece[1]):
        if not reached <= start < end <= MAX_NUMEL:
            raise ValueError(
                f"pieces of a chunk are disjoint ranges within {MAX_NUMEL} elements; "
                f"found [{start}, {end}) of parameter {param} after element {reached}; use smaller chunks"
            )
        reached = end
        bounds = torch.arange(start - start % _VECTOR.value, end, max_numel)
        rows = torch.stack([bounds, bounds + max_numel, torch.full_like(bounds, param)], dim=1)
        rows[:, :2].clamp_(start, end)
        tables.append(rows)
    return torch.cat(tables).to(device=device, dtype=torch.int32)


def check_list(name: str, tensor: Tensor, like: Tensor) -> None:
    """Require a contiguous floating-point list of the size and on the device of ``like``, or ValueError."""
    if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.shape != like.shape or tensor.device != like.device:
        raise ValueError(
            f"tensors of a chunk are contiguous, have one dimension and share size and device; found {name} of shape "
            f"{tuple(tensor.shape)}, strides {tensor.stride()}, on {tensor.device}, beside {tuple(like.shape)} on "
            f"{like.device}"
        )
    if tensor.dtype not in _DTYPES:
        raise ValueError(f"kernels take float32, float16 and bfloat16; {name} is {tensor.dtype}")


def check_table(name: str, table: Tensor, like: Tensor, dtype: torch.dtype, *shape: int | None) -> None:
    """Require dtype, shape (None: any size), contiguity and the device of ``like``, or ValueError."""
    fits = table.dim() == len(shape) and all(w in (None, f) for w, f in zip(shape, table.shape, strict=True))
    if table.dtype is not dtype or not fits or not table.is_contiguous() or table.device != like.device:
        wanted = ["any" if size is None else size for size in shape]
        raise ValueError(
            f"{name} is a contiguous {dtype} table of shape {wanted} on {like.device}; found {table.dtype}, "
            f"{tuple(table.shape)}, strides {table.stride()}, on {table.device}"
        )


@triton.jit
def tile_bounds(tiles_ptr: tl.tensor) -> Any:
    row = tiles_ptr + 3 * tl.program_id(0)
    return tl.load(row).to(tl.int64), tl.load(row + 1).to(tl.int64), tl.load(row + 2)


@triton.jit
def whole_vectors(start: tl.tensor, end: tl.tensor, BLOCK: tl.constexpr, skipped: tl.tensor) -> Any:
    """Offsets and mask of the aligned 16s within [start, end): BLOCK lanes behind ``skipped`` elements."""
    first = (start + (_VECTOR - 1)) // _VECTOR * _VECTOR + skipped
    numel = (end // _VECTOR * _VECTOR - first).to(tl.int32)
    lanes = tl.arange(0, BLOCK)
    return first + lanes, lanes < numel


@triton.jit
def has_edges(start: tl.tensor, end: tl.tensor) -> Any:
    return (start % _VECTOR != 0) | (end % _VECTOR != 0)


@triton.jit
def edges(start: tl.tensor, end: tl.tensor, EDGE: tl.constexpr) -> Any:
    """Offsets and mask of the elements of [start, end) outside its whole vectors."""
    head_end = tl.minimum((start + (_VECTOR - 1)) // _VECTOR * _VECTOR, end)
    tail_start = tl.maximum(end // _VECTOR * _VECTOR, head_end)
    lanes = tl.arange(0, EDGE)
    in_head = lanes < _VECTOR
    offsets = tl.where(in_head, start + lanes, tail_start + lanes - _VECTOR)
    return offsets, (offsets < tl.where(in_head, head_end, end)) & (lanes < 2 * _VECTOR)
