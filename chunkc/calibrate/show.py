"""A calibration as tables on standard output: rates, what runs together, and the copies by size."""

from __future__ import annotations

from collections.abc import Iterator

from chunkc.calibrate.rounds import TOGETHER
from chunkc.hardware import Hardware, format_size
from chunkc.hardware.profile import CopyRate, DtypeRate, Figure, Rates
from chunkc.report.columns import table, wrapped


def tables(hw: Hardware, rates: Rates) -> str:
    heading = f"{hw}: medians of {rates.num_rounds} rounds, and how far another calibration may be off"
    together = "times as long as alone, while the activities on the left run"
    copies = f"copies by size, in microseconds; {_law('h2d', rates.h2d)}, {_law('d2h', rates.d2h)}"
    return "\n\n".join(
        f"{wrapped(title, '  ')}\n\n{numbers}"
        for title, numbers in ((heading, _rates(rates)), (together, _together(rates)), (copies, _copies(rates)))
    )


def _rates(rates: Rates) -> str:
    rows = [(name, unit, f"{figure.median:.4g}", spread(figure)) for name, unit, figure in _figures(rates)]
    return table(("", "unit", "median", "spread"), rows, "llrr")


def _figures(rates: Rates) -> Iterator[tuple[str, str, Figure]]:
    for name, rate in (("host to device", rates.h2d), ("device to host", rates.d2h)):
        yield f"copy {name}", "GB/s", rate.gb_per_s
        yield f"copy {name}, latency", "us", rate.latency_us
    yield "device memory", "GB/s", rates.device_memory_gb_per_s
    yield from _dtypes("update on the host", "Gparam/s", rates.cpu_update_gparam_per_s)
    yield from _dtypes("update on the device", "Gparam/s", rates.gpu_update_gparam_per_s)
    yield from _dtypes("matrix product", "TFLOPS", rates.matmul_tflops)
    yield from _dtypes("causal attention", "TFLOPS", rates.attention_tflops)
    yield "launch on compute", "us", rates.compute_launch_us
    yield "launch on a copy stream", "us", rates.copy_launch_us
    yield "handoff between streams", "us", rates.handoff_us


def _dtypes(name: str, unit: str, rates: tuple[DtypeRate, ...]) -> Iterator[tuple[str, str, Figure]]:
    for entry in rates:
        yield f"{name}, {entry.dtype}", unit, entry.rate


def spread(figure: Figure) -> str:
    """The spread as a percentage of the median; in the unit itself where the median is 0."""
    return f"{100 * figure.spread / figure.median:.0f} %" if figure.median else f"{figure.spread:.3g}"


def _together(rates: Rates) -> str:
    by_sets = dict.fromkeys(slowdown.by for slowdown in sorted(rates.slowdowns, key=lambda s: (len(s.by), s.by)))
    factors = {(slowdown.of, slowdown.by): slowdown.factor for slowdown in rates.slowdowns}
    rows = [
        (" + ".join(by), *(f"{factors[of, by].median:.2f}" if (of, by) in factors else "" for of in TOGETHER))
        for by in by_sets
    ]
    return table(("", *TOGETHER), rows, "l" + "r" * len(TOGETHER))


def _law(name: str, rate: CopyRate) -> str:
    return f"{name} fitted as {rate.latency_us.median:.3g} + bytes / {rate.gb_per_s.median * 1e3:.4g}"


def _copies(rates: Rates) -> str:
    rows = []
    for name, rate in (("h2d", rates.h2d), ("d2h", rates.d2h)):
        for entry in (entry for entry in rates.table if entry.name == f"copy {name}"):
            median_us, fitted_us = entry.figure.median, rate.time_us(entry.size)
            rows.append((name, format_size(entry.size), f"{median_us:.4g}", spread(entry.figure), f"{fitted_us:.4g}"))
    return table(("", "size", "median", "spread", "fitted"), rows, "lrrrr")
