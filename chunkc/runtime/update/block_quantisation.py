"""Block-wise quantisation of optimizer states to 8 bits, after Dettmers et al. (ICLR 2022).

    scale = max |value| of a block    code = the nearest of 256 values to value / scale    value = values[code] * scale

The values are those of dynamic tree quantisation ("8-bit Optimizers via Block-wise Quantization", section 2.2, as
bitsandbytes' ``create_dynamic_map`` has them): a decade of magnitudes takes a power of two of them, twice as many as
the decade below, from 1e-7 to 1. Second moments are not negative and take all 256 values from 0 on. One value is
changed: the least signed one is -1 and not -0.993, so that the largest magnitude of a block is kept exactly whatever
its sign, and codes and scales follow from the values that they stand for (``quantise(dequantise(x)) == x``).

Everything is defined in float32, every operation rounded to nearest: the quotient is rounded, borders are midpoints of
neighbouring values rounded to float32, and a quotient on a border takes the code below. A block whose largest magnitude
is below 2^-100 is stored as zeros: products of values and scales stay normal numbers that way. A block with an
infinity or a NaN is NaN in every element, by a scale that is NaN.

Kernels find a code without a search: the first 16 bits of the quotient name a bin, in which at most one border lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Final, NamedTuple

import torch
from torch import Tensor

from chunkc.ir.state_spec import BLOCK_NUMEL, StateSpec

NUM_CODES: Final = 256

MIN_SCALE: Final = 2.0**-100
"""Blocks with a smaller largest magnitude are zeros."""

FIRST_BIN: Final = 0x3380
"""First 16 bits of 2^-24: smaller quotients are in the first bin."""

NUM_BINS: Final = 0x3F80 - FIRST_BIN + 1
"""From 2^-24 to 1, 128 to an octave."""

NUM_DECADES: Final = 7


class CodeTables(NamedTuple):
    """Tables of kernels, on one device; the first row of each is that of signed states.

    Attributes:
        values: float32 [2, 256], ascending.
        borders: float32 [2, 256]: between a value and the next, infinite behind the last.
        bases: int32 [2, 2, `NUM_BINS`]: least code of a bin, of quotients from 0 on and then of negative ones.
    """

    values: Tensor
    borders: Tensor
    bases: Tensor


def is_signed(name: str) -> bool:
    """Whether a state has negative values: all but averages of squares."""
    return not name.endswith("_sq")


@cache
def code_values(signed: bool) -> Tensor:
    """The 256 values of codes, float32, ascending, on the host; nobody writes to them."""
    found = [0.0, 1.0]
    for decade in range(NUM_DECADES):
        num = 2**decade if signed else 2 ** (decade + 1)
        means = [0.1 + 0.9 * (i + 0.5) / num for i in range(num)]
        magnitudes = [10.0 ** (decade - NUM_DECADES + 1) * mean for mean in means]
        found += [*magnitudes, *(-m for m in magnitudes)] if signed else magnitudes
    found.sort()
    if signed:
        found[0] = -1.0
    with torch.inference_mode(False):
        return torch.tensor(found, dtype=torch.float64, device="cpu").float()


@cache
def code_borders(signed: bool) -> Tensor:
    """The 255 borders between values, float32, on the host; nobody writes to them."""
    with torch.inference_mode(False):
        values = code_values(signed).double()
        return ((values[1:] + values[:-1]) / 2).float()


@cache
def code_tables(device: torch.device) -> CodeTables:
    """The tables of kernels, made once for a device; nobody writes to them."""
    with torch.inference_mode(False):
        rows = (True, False)
        infinite = torch.full((1,), torch.inf, dtype=torch.float32, device="cpu")
        tables = (
            torch.stack([code_values(signed) for signed in rows]),
            torch.stack([torch.cat([code_borders(signed), infinite]) for signed in rows]),
            torch.stack([torch.stack([_bases(signed, negative) for negative in (False, True)]) for signed in rows]),
        )
        return CodeTables(*(table.contiguous().to(device) for table in tables))


def _bases(signed: bool, negative: bool) -> Tensor:
    """The least code in every bin: that of its quotient nearest to zero, or farthest from it if negative."""
    bins = torch.arange(FIRST_BIN, FIRST_BIN + NUM_BINS, dtype=torch.int32, device="cpu") << 16
    least = -(bins | 0xFFFF).view(torch.float32) if negative else bins.view(torch.float32)
    if not negative:
        least[0] = 0.0
    return torch.searchsorted(code_borders(signed), least).int()


def quantise(values: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Quantise float32 [n], of which the first begins a block.

    Returns codes, uint8 [n], and scales, float32 [ceil(n / 256)], on the same device.
    """
    numel, device = values.numel(), values.device
    num_blocks = -(-numel // BLOCK_NUMEL)
    blocks = torch.zeros(num_blocks * BLOCK_NUMEL, dtype=torch.float32, device=device)
    blocks[:numel] = values
    blocks = blocks.view(num_blocks, BLOCK_NUMEL)
    magnitudes = torch.where(blocks.isfinite(), blocks.abs(), torch.inf)
    largest = magnitudes.amax(dim=1) if num_blocks else magnitudes.new_empty(0)
    scales = torch.where(largest < MIN_SCALE, 0.0, torch.where(largest.isinf(), torch.nan, largest))
    divisors = torch.where(scales > 0, scales, 1.0)[:, None]
    quotients = torch.where((scales > 0)[:, None], blocks / divisors, 0.0)
    codes = torch.searchsorted(code_borders(signed).to(device), quotients).to(torch.uint8)
    return codes.flatten()[:numel], scales


def dequantise(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """The values of `quantise`'s results, float32 [n]."""
    values = code_values(signed).to(codes.device)[codes.int()]
    return values * scales.repeat_interleave(BLOCK_NUMEL)[: codes.numel()]


def read_list(spec: StateSpec, lists: Sequence[Tensor], position: int, start: int, end: int) -> Tensor:
    """Elements [start, end) of one of a chunk's ``lists`` (`StateSpec.lists`): a view, or decoded values.

    ``position`` 0 is that of param32, and of the only list of a chunk without states. ``start`` begins a block.
    """
    if not position or spec.names[position - 1] not in spec.quantised:
        return lists[position][start:end]
    scales = _scales_of(spec, lists, position, start, end)
    return dequantise(lists[position][start:end], scales, signed=is_signed(spec.names[position - 1]))


def write_list(
    spec: StateSpec, lists: Sequence[Tensor], position: int, start: int, end: int, values: Tensor | None
) -> None:
    """Replace elements [start, end), zeros without ``values``; both ends are a block's or the parameter's."""
    target = lists[position][start:end]
    if not position or spec.names[position - 1] not in spec.quantised:
        target.zero_() if values is None else target.copy_(values)
        return
    flat = torch.zeros(end - start, dtype=torch.float32, device="cpu") if values is None else values.float()
    codes, scales = quantise(flat, signed=is_signed(spec.names[position - 1]))
    target.copy_(codes)
    _scales_of(spec, lists, position, start, end).copy_(scales)


def _scales_of(spec: StateSpec, lists: Sequence[Tensor], position: int, start: int, end: int) -> Tensor:
    place = 1 + len(spec.names) + spec.quantised.index(spec.names[position - 1])
    return lists[place][start // BLOCK_NUMEL : -(-end // BLOCK_NUMEL)]
