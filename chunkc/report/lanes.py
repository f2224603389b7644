"""One stream in a picture's pixels: wide bars one by one, the others as a density.

Narrow bars of the same work that follow each other without a gap are one block. Where a stream has few blocks, or they
are wide, each is drawn. Else narrow ones are merged: for each kind of work the share of the time in which it is under
way, averaged over neighbouring columns, since bars nearly as wide as a column would beat with it. No busy time is lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from chunkc.ir.actions import Stream
from chunkc.report.frame import Bar, Frame, Phase, Work
from chunkc.report.memory_curve import Kind, MemoryCurve

Array = npt.NDArray[np.float64]
_TOUCHING = 1e-6
"""Columns that may be between two bars of one block, for rounding."""
_HALF_WINDOW = 24
"""Columns on each side over which shares are averaged."""
_MANY_COLUMNS = 5
"""A stream with more than one narrow block in so many columns has them merged."""


@dataclass(frozen=True, slots=True)
class Block:
    """Work without a gap from ``start`` to ``end`` in the window; ``bar`` is its only action, else None."""

    start: float
    end: float
    work: Work
    bar: Bar | None

    @property
    def width(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Lane:
    """One stream in columns of equal width.

    Attributes:
        stream: which.
        blocks: those to draw one by one, by start.
        shares: by work, for every column the share of its time, from 0 to 1, that all others take.
        busy: time in which the stream is busy.
        num_bars: actions, those that take no time included.
    """

    stream: Stream
    blocks: tuple[Block, ...]
    shares: dict[Work, Array]
    busy: float
    num_bars: int

    @property
    def is_counted(self) -> bool:
        """Whether every bar is a block of its own, so that who looks can count them."""
        return not self.shares and all(block.bar is not None for block in self.blocks)


def lane_of(frame: Frame, stream: Stream, num_columns: int, min_columns: float) -> Lane:
    """The lane of ``stream``; blocks of ``min_columns`` columns and more are always drawn."""
    column, bars = frame.period / num_columns, frame.lane(stream)
    blocks = list(_blocks(frame, stream, min_columns * column, _TOUCHING * column))
    merged = [block for block in blocks if block.width < min_columns * column]
    if len(merged) <= num_columns / _MANY_COLUMNS:
        merged = []
    else:
        blocks = [block for block in blocks if block.width >= min_columns * column]
    narrow: dict[Work, list[tuple[float, float]]] = {}
    for block in merged:
        narrow.setdefault(block.work, []).append((block.start, block.end))
    shares = {work: column_shares(narrow[work], frame.period, num_columns) for work in Work if work in narrow}
    breaks = {time for block in blocks for time in (block.start, block.end)} | {p.start for p in frame.phases}
    stretches = sorted({0, num_columns, *(round(time / column) for time in breaks)})
    smooth = {work: averaged(values, stretches) for work, values in shares.items()}
    return Lane(stream, tuple(blocks), smooth, sum(bar.duration for bar in bars), len(bars))


def _blocks(frame: Frame, stream: Stream, least: float, touching: float) -> Iterator[Block]:
    """Bars of a stream by start, narrow ones joined with the same work that follows without a gap."""
    last: Block | None = None
    parts = sorted(((*piece, bar) for bar in frame.lane(stream) for piece in frame.pieces(bar)), key=lambda p: p[:2])
    for start, end, bar in parts:
        joins = last is not None and last.work is bar.work and start - last.end <= touching
        if last is not None and joins and end - start < least and (last.bar is None or last.width < least):
            last = Block(last.start, end, bar.work, None)
            continue
        if last is not None:
            yield last
        last = Block(start, end, bar.work, bar)
    if last is not None:
        yield last


def without_seams(blocks: Sequence[Block], column: float) -> list[Block]:
    """``blocks``, by start, as pixels can show them.

    A gap narrower than ``column`` belongs to the block before it. Blocks narrower than half a column are left out where
    another is that near: between two wide ones they would be a line where the pixels' edges happen to fall, and none
    elsewhere.
    """
    bounds = [(-math.inf, -math.inf), *((block.start, block.end) for block in blocks), (math.inf, math.inf)]
    alone = [
        start - before[1] >= column and after[0] - end >= column
        for before, (start, end), after in zip(bounds, bounds[1:], bounds[2:], strict=False)
    ]
    shown = [b for b, is_alone in zip(blocks, alone, strict=True) if is_alone or b.width >= column / 2]
    following = [*(block.start for block in shown[1:]), math.inf]
    return [
        replace(block, end=start) if 0 < start - block.end < column else block
        for block, start in zip(shown, following, strict=False)
    ]


def column_shares(pieces: list[tuple[float, float]], period: float, num_columns: int) -> Array:
    """The share of each column that ``pieces`` cover; pieces do not overlap and lie in ``0 .. period``.

    Exact: the time covered up to an instant is piecewise linear, and a column's is the difference at its ends.
    """
    ordered = np.array(sorted(pieces), dtype=np.float64).reshape(-1, 2)
    covered = np.concatenate([[0.0], np.cumsum(ordered[:, 1] - ordered[:, 0])])
    times = np.concatenate([[0.0], ordered.ravel(), [period]])
    until = np.concatenate([[0.0], np.repeat(covered, 2)[1:-1], [covered[-1]]])
    edges = np.linspace(0.0, period, num_columns + 1)
    shares: Array = np.diff(np.interp(edges, times, until)) / (period / num_columns)
    return shares


def averaged(shares: Array, stretches: Sequence[int]) -> Array:
    """``shares``, each column a weighted mean of neighbours in its stretch; a stretch keeps its sum.

    The weights are a triangle. At the ends of a stretch the columns are mirrored, so that nothing leaves it.

    Args:
        shares: one figure for each column.
        stretches: the columns at which stretches begin, and the number of columns, ascending.
    """
    means = shares.copy()
    for first, end in pairwise(stretches):
        half = min(_HALF_WINDOW, end - first - 1)
        if half > 0:
            weights = np.concatenate([np.arange(1, half + 2), np.arange(half, 0, -1)]).astype(np.float64)
            mirrored = np.pad(shares[first:end], half, mode="symmetric")
            means[first:end] = np.convolve(mirrored, weights / weights.sum(), mode="valid")
    return means


def thinned(curve: MemoryCurve, phases: Sequence[Phase], num_cells: int) -> tuple[Array, dict[Kind, Array]]:
    """The curve with about one piece for each of ``num_cells`` cells: edges, and bytes by kind.

    A curve with no more pieces than cells stays as it is. Else a cell shows the one of its pieces in which most is
    allocated, and of those the one with most in use: a true moment, and the peak survives. Phases begin new cells.
    """
    edges = np.array(curve.edges)
    nbytes = {kind: np.array(curve.nbytes[kind], dtype=np.float64) for kind in curve.kinds()}
    if len(edges) - 1 <= num_cells:
        return edges, nbytes
    total = np.array(curve.total_nbytes, dtype=np.float64)
    in_use = total - np.array(curve.nbytes[Kind.UNUSED], dtype=np.float64)
    cells = _cells(phases, edges[-1], num_cells)
    # a piece counts in the cell in which it begins, and in those at whose beginning it lasts
    lasting = np.searchsorted(edges, cells[:-1], side="right") - 1
    pieces = np.concatenate([np.arange(len(total)), lasting])
    of_cell = np.concatenate([np.searchsorted(cells, edges[:-1], side="right") - 1, np.arange(len(cells) - 1)])
    order = np.lexsort((-in_use[pieces], -total[pieces], of_cell))  # the last key counts first
    first = np.unique(of_cell[order], return_index=True)[1]
    chosen = pieces[order[first]]
    return cells, {kind: values[chosen] for kind, values in nbytes.items()}


def _cells(phases: Sequence[Phase], period: float, num_cells: int) -> Array:
    """Edges of cells of nearly equal width, of which none lies in two phases."""
    edges = [np.zeros(1)]
    for phase in phases:
        count = max(1, round(num_cells * (phase.end - phase.start) / period))
        edges.append(np.linspace(phase.start, phase.end, count + 1)[1:])
    return np.concatenate(edges)
