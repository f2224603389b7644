"""Figures from the rounds' values: medians with an honest spread, and the constants of the copy law.

**Spread** says how far the median of another calibration may be. Assume that the rounds of both are exchangeable. Take
the range of the rounds without the ``trim`` smallest and largest. If the ranges of both overlap, the medians, which lie
inside, are at most both ranges apart: the spread is twice the range. The ranges are disjoint with the probability of
`disjoint_probability` (1.5 in 10,000 for 15 rounds without 2 at either end); ``trim`` is the largest that keeps it
below 1 in 1,000. The spread is never below 5 % of the median, for what all rounds of one process share. The load of
other programs is in the profile's conditions; no statistics of one run can tell it.

**Copies** obey time = latency + bytes / bandwidth. Each round is fitted by least squares of relative errors, since
sizes span four decades: absolute errors would leave the latency to the noise of the largest copy.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from math import comb
from typing import Final

from chunkc.calibrate.rounds import TOGETHER, Samples, Subject, slowdown_subject, subsets
from chunkc.hardware.profile import Condition, CopyRate, DtypeRate, Figure, Measurement, Rates, Slowdown
from chunkc.ir.actions import Stream

SPREAD_IN_RANGES: Final = 2.0
MIN_RELATIVE_SPREAD: Final = 0.05
MAX_DISJOINT_PROBABILITY: Final = 1e-3


def figure_of(values: Sequence[float]) -> Figure:
    """The median, and as spread twice the trimmed range, at least 5 % of the median."""
    median, ordered = statistics.median(values), sorted(values)
    trim = trim_of(len(values))
    value_range = ordered[len(values) - 1 - trim] - ordered[trim]
    return Figure(median, max(SPREAD_IN_RANGES * value_range, MIN_RELATIVE_SPREAD * median))


def trim_of(num_rounds: int) -> int:
    """Rounds that are left out at either end of the range."""
    trim = 0
    while disjoint_probability(num_rounds, trim + 1) <= MAX_DISJOINT_PROBABILITY:
        trim += 1
    return trim


def disjoint_probability(num_rounds: int, trim: int) -> float:
    """Probability that the trimmed ranges of two sets of exchangeable values are disjoint.

    Of the orders of 2n values that belong to A or B, n each, count those in which the last value of A's range comes
    before the first of B's: ``b <= trim`` of B stand before the (n - trim)-th of A. Then the same with A and B changed.
    """
    n = num_rounds
    if trim >= n:
        return 1.0
    num_orders = sum(comb(n - trim - 1 + b, b) * comb(trim + n - b, trim) for b in range(trim + 1))
    return 2 * num_orders / comb(2 * n, n)


def fit_copies(sizes_nbytes: Sequence[int], times_us: Sequence[float]) -> tuple[float, float]:
    """(latency in microseconds, bandwidth in 1e9 bytes per second) of one round.

    Least squares of ``(latency + nbytes * slope) / time - 1``; without a solution of latency from 0 and positive slope,
    the latency is 0.
    """
    x = [1 / time for time in times_us]
    y = [nbytes / time for nbytes, time in zip(sizes_nbytes, times_us, strict=True)]
    xx, yy = sum(a * a for a in x), sum(b * b for b in y)
    xy = sum(a * b for a, b in zip(x, y, strict=True))
    determinant = xx * yy - xy * xy
    if determinant > 0:
        latency_us = (yy * sum(x) - xy * sum(y)) / determinant
        slope = (xx * sum(y) - xy * sum(x)) / determinant
        if latency_us >= 0 and slope > 0:
            return latency_us, 1e-3 / slope
    return 0.0, 1e-3 * yy / sum(y)


def rates_of(samples: Samples, conditions: Sequence[tuple[str, str]]) -> Rates:
    slowdowns = (
        Slowdown(of, by, figure_of(samples[slowdown_subject(of, by)]))
        for of in TOGETHER
        for by in subsets(stream for stream in TOGETHER if stream is not of)
    )
    return Rates(
        h2d=_copy_rate(samples, Stream.H2D),
        d2h=_copy_rate(samples, Stream.D2H),
        slowdowns=tuple(slowdowns),
        cpu_update_gparam_per_s=_by_dtype(samples, "update cpu ", 1e9),
        gpu_update_gparam_per_s=_by_dtype(samples, "update compute ", 1e9),
        matmul_tflops=_by_dtype(samples, "matmul ", 1e12),
        attention_tflops=_by_dtype(samples, "attention ", 1e12),
        device_memory_gb_per_s=_rate(samples, _largest(samples, "copy within device"), 1e9),
        compute_launch_us=figure_of(samples[Subject("launch compute")]),
        copy_launch_us=figure_of(samples[Subject("launch h2d")]),
        handoff_us=figure_of(samples[Subject("handoff")]),
        num_rounds=min(len(values) for values in samples.values()),
        conditions=tuple(Condition(name, value) for name, value in conditions),
        table=tuple(
            Measurement(subject.name, subject.size, subject.unit, figure_of(values), tuple(values))
            for subject, values in samples.items()
        ),
    )


def _copy_rate(samples: Samples, stream: Stream) -> CopyRate:
    subjects = [subject for subject in samples if subject.name == f"copy {stream}"]
    sizes = [subject.size for subject in subjects]
    rounds = zip(*(samples[subject] for subject in subjects), strict=True)
    latencies_us, bandwidths = zip(*(fit_copies(sizes, times_us) for times_us in rounds), strict=True)
    return CopyRate(figure_of(latencies_us), figure_of(bandwidths))


def _by_dtype(samples: Samples, prefix: str, per: float) -> tuple[DtypeRate, ...]:
    """Rates of the largest size for each dtype that stands behind ``prefix``."""
    names = dict.fromkeys(subject.name for subject in samples if subject.name.startswith(prefix))
    return tuple(DtypeRate(name.removeprefix(prefix), _rate(samples, _largest(samples, name), per)) for name in names)


def _largest(samples: Samples, name: str) -> Subject:
    return max((subject for subject in samples if subject.name == name), key=lambda subject: subject.size)


def _rate(samples: Samples, subject: Subject, per: float) -> Figure:
    """Amount per second in units of ``per``."""
    return figure_of([subject.amount / (time_us * 1e-6) / per for time_us in samples[subject]])
