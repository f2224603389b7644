"""What a picture with so many pixels shows of a stream: wide bars one by one, the others as a density.

A plan has tens of thousands of actions, a screen has two thousand columns. Bars of a few pixels keep their ends. All
others are merged column by column: for each kind of work the share of the column's time in which it is under way. No
busy time is lost or invented, and the number of shapes does not grow with the number of actions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from chunkc.ir.actions import Stream
from chunkc.report.frame import Bar, Frame, Work
from chunkc.report.memory_curve import Kind, MemoryCurve

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Lane:
    """One stream in ``num_columns`` columns of equal width.

    Attributes:
        stream: which.
        wide: bars of at least the asked width: (start, end, bar); twice where a bar passes the window's end.
        shares: by work, for every column the share of its time, from 0 to 1, that the other bars take.
        busy: time in which the stream is busy.
        num_bars: actions, those that take no time included.
    """

    stream: Stream
    wide: tuple[tuple[float, float, Bar], ...]
    shares: dict[Work, Array]
    busy: float
    num_bars: int


def lane_of(frame: Frame, stream: Stream, num_columns: int, min_columns: float) -> Lane:
    """The lane of ``stream``; bars of ``min_columns`` columns and more stay bars of their own."""
    bars = frame.lane(stream)
    least = min_columns * frame.period / num_columns
    wide, narrow = [], {}
    for bar in bars:
        if bar.duration >= least:
            wide += [(start, end, bar) for start, end in frame.pieces(bar)]
        elif bar.duration > 0:
            narrow.setdefault(bar.work, []).extend(frame.pieces(bar))
    shares = {work: column_shares(narrow[work], frame.period, num_columns) for work in Work if work in narrow}
    return Lane(stream, tuple(wide), shares, sum(bar.duration for bar in bars), len(bars))


def column_shares(pieces: list[tuple[float, float]], period: float, num_columns: int) -> Array:
    """The share of each column that ``pieces`` cover; pieces do not overlap and lie in ``0 .. period``.

    Exact: the time covered up to an instant is piecewise linear, and a column's is the difference at its ends.
    """
    ordered = np.array(sorted(pieces), dtype=np.float64).reshape(-1, 2)
    covered = np.concatenate([[0.0], np.cumsum(ordered[:, 1] - ordered[:, 0])])
    times = np.concatenate([[0.0], ordered.ravel(), [period]])
    until = np.concatenate([[0.0], np.repeat(covered, 2)[1:-1], [covered[-1]]])
    edges = np.linspace(0.0, period, num_columns + 1)
    return np.diff(np.interp(edges, times, until)) / (period / num_columns)


def thinned(curve: MemoryCurve, num_columns: int) -> tuple[Array, dict[Kind, Array]]:
    """The curve with at most one piece a column: edges, and bytes by kind.

    A curve with no more pieces than columns stays as it is. Else a column shows the one of its pieces in which most is
    allocated, and of those the one with most in use: a true moment, and the peak survives.
    """
    edges = np.array(curve.edges)
    nbytes = {kind: np.array(curve.nbytes[kind], dtype=np.float64) for kind in curve.kinds()}
    if len(edges) <= num_columns:
        return edges, nbytes
    total = np.array(curve.total_nbytes, dtype=np.float64)
    in_use = total - np.array(curve.nbytes[Kind.UNUSED], dtype=np.float64)
    columns = np.minimum((edges[:-1] / edges[-1] * num_columns).astype(int), num_columns - 1)
    order = np.lexsort((-in_use, -total, columns))  # the last key counts first
    first = np.unique(columns[order], return_index=True)[1]
    chosen = order[first]
    starts = columns[chosen] * (edges[-1] / num_columns)
    return np.append(np.maximum(starts, 0.0), edges[-1]), {kind: values[chosen] for kind, values in nbytes.items()}
