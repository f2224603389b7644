"""Measured rates of a machine, as ``chunkc calibrate`` finds them and a profile carries them.

Every figure is the median of several rounds (`chunkc.calibrate.fit`), which stand in `Rates.table`. *Activities* go by
the name of their stream: ``compute``, ``h2d``, ``d2h``, ``cpu``. Dtypes go by torch's name: ``bfloat16``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from chunkc.errors import HardwareError
from chunkc.hardware.catalogue import MAX_RATE, check_rate

__all__ = ["Condition", "CopyRate", "DtypeRate", "Figure", "Measurement", "Rates", "Slowdown", "of_8bit_states"]


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured value: median of the rounds, and how far from it another calibration may be (spread)."""

    median: float
    spread: float

    def __post_init__(self) -> None:
        for name in ("median", "spread"):
            value = getattr(self, name)
            if not 0 <= value <= MAX_RATE:
                raise HardwareError(f"a figure's {name} must be a number from 0 to {MAX_RATE:g}, found {value!r}")

    def agrees_with(self, other: Figure) -> bool:
        """Whether the medians differ by no more than the larger spread."""
        return abs(self.median - other.median) <= max(self.spread, other.spread)


@dataclass(frozen=True, slots=True)
class CopyRate:
    """One direction of copies between host and device: latency and bandwidth (1e9 bytes per second)."""

    latency_us: Figure
    gb_per_s: Figure

    def __post_init__(self) -> None:
        _check_positive("gb_per_s", self.gb_per_s)

    def time_us(self, nbytes: int) -> float:
        """Microseconds of a copy that runs alone: latency + nbytes / bandwidth."""
        return self.latency_us.median + nbytes / (self.gb_per_s.median * 1e3)


@dataclass(frozen=True, slots=True)
class DtypeRate:
    """A rate for operands of one dtype; the field that holds it names the unit."""

    dtype: str
    rate: Figure

    def __post_init__(self) -> None:
        _check_positive(f"a rate for {self.dtype}", self.rate)


@dataclass(frozen=True, slots=True)
class Slowdown:
    """How many times as long activity `of` takes while all activities in `by` run (in alphabetical order)."""

    of: str
    by: tuple[str, ...]
    factor: Figure

    def __post_init__(self) -> None:
        _check_positive(f"the slow-down of {self.of}", self.factor)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One measurement: figure, values by round; `size` in bytes, elements, rows or tokens (0: none)."""

    name: str
    size: int
    unit: str
    figure: Figure
    rounds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Condition:
    """A fact about the machine while it was measured."""

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates of one device and its host, alone and together.

    Attributes:
        cpu_update_gparam_per_s, gpu_update_gparam_per_s: Adam, 1e9 parameters per second, by the payload's dtype; of
            8-bit Adam under the name that `of_8bit_states` gives.
        matmul_tflops: square matrix products of the largest size measured, 1e12 operations per second.
        attention_tflops: causal attention of the most tokens measured, the masked half not counted.
        device_memory_gb_per_s: bytes read and written by a copy within device memory.
        compute_launch_us, copy_launch_us: host time to launch work on the compute stream and on a copy stream.
        handoff_us: from the end of work on one stream to the start of work on another that waits for it.
    """

    h2d: CopyRate
    d2h: CopyRate
    slowdowns: tuple[Slowdown, ...]
    cpu_update_gparam_per_s: tuple[DtypeRate, ...]
    gpu_update_gparam_per_s: tuple[DtypeRate, ...]
    matmul_tflops: tuple[DtypeRate, ...]
    attention_tflops: tuple[DtypeRate, ...]
    device_memory_gb_per_s: Figure
    compute_launch_us: Figure
    copy_launch_us: Figure
    handoff_us: Figure
    num_rounds: int
    conditions: tuple[Condition, ...]
    table: tuple[Measurement, ...]

    def __post_init__(self) -> None:
        _check_positive("device_memory_gb_per_s", self.device_memory_gb_per_s)
        if self.num_rounds < 1:
            raise HardwareError(f"num_rounds must be at least 1, found {self.num_rounds}")

    def slowdown(self, of: str, by: Iterable[str]) -> Figure:
        """How many times as long `of` takes while `by` run, 1 if none; HardwareError if not measured."""
        wanted = tuple(sorted(set(by)))
        if not wanted:
            return Figure(1.0, 0.0)
        for slowdown in self.slowdowns:
            if (slowdown.of, slowdown.by) == (of, wanted):
                return slowdown.factor
        raise HardwareError(f"the slow-down of {of} by {', '.join(wanted)} was not measured; calibrate again")


def of_8bit_states(dtype: str) -> str:
    """The name among rates by dtype of updates whose states are quantised to 8 bits."""
    return f"{dtype} 8-bit"


def _check_positive(name: str, figure: Figure) -> None:
    check_rate(name, figure.median)
