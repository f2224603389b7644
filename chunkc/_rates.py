"""Measured rates of a machine, as ``chunkc calibrate`` finds them and a profile carries them.

Every figure is the median of several rounds, with a spread that says how far another calibration may be off (see
`chunkc.calibrate.fit`). Constants of simple laws stand here for a simulator; the measurements they were fitted to
stand in `Rates.table`, round by round. *Activities* go by the name of their stream: ``compute``, ``h2d``, ``d2h``,
``cpu``. Dtypes go by torch's name: ``bfloat16``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

from chunkc.errors import HardwareError

__all__ = ["Condition", "CopyRate", "DtypeRate", "Figure", "Measurement", "Rates", "Slowdown"]


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured value: the median of the rounds, and how far from it another calibration may be, in the same unit."""

    median: float
    spread: float

    def __post_init__(self) -> None:
        for name in ("median", "spread"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise HardwareError(f"a figure's {name} must be a finite number from 0, found {value!r}")

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
    """What the rounds measured: `size` in bytes, elements, rows or tokens, as `name` implies; 0 where there is none."""

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
    """What one device and its host do per second, alone and together.

    Attributes:
        h2d, d2h: copies from host to device and back.
        slowdowns: one for each activity and each set of the others.
        cpu_update_gparam_per_s: Adam in host memory, 1e9 parameters per second, by the payload's dtype.
        gpu_update_gparam_per_s: Adam in device memory, on the compute stream.
        matmul_tflops: square matrix products of the largest size measured, 1e12 operations per second.
        attention_tflops: causal attention of the most tokens measured, the masked half not counted.
        device_memory_gb_per_s: bytes read and written by a copy within device memory.
        compute_launch_us, copy_launch_us: host time to launch work on the compute stream and on a copy stream.
        handoff_us: from the end of work on one stream to the start of work on another that waits for it.
        num_rounds: rounds that every median is taken over.
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
        """How many times as long activity `of` takes while the activities `by` run; 1 where nothing else runs.

        Raises:
            HardwareError: when this set of activities was not measured together.
        """
        wanted = tuple(sorted(set(by)))
        if not wanted:
            return Figure(1.0, 0.0)
        for found in self.slowdowns:
            if (found.of, found.by) == (of, wanted):
                return found.factor
        raise HardwareError(f"the slow-down of {of} by {', '.join(wanted)} was not measured; calibrate again")

    @classmethod
    def from_json(cls, data: Any) -> Rates:
        """Rates from what ``dataclasses.asdict`` and JSON made of them.

        Raises:
            HardwareError: a field is missing, unknown or of another type; the message names it.
        """
        rates: Rates = _decode(cls, data, "rates")
        return rates


def _check_positive(name: str, figure: Figure) -> None:
    if figure.median <= 0:
        raise HardwareError(f"{name} must be positive, found {figure.median!r}")


def _decode(kind: Any, data: Any, where: str) -> Any:
    """`data` as `kind`: a dataclass, a tuple of one type, or a plain value."""
    if get_origin(kind) is tuple:
        if not isinstance(data, (list, tuple)):
            raise HardwareError(f"{where} must be a list, found {data!r}")
        return tuple(_decode(get_args(kind)[0], entry, f"{where}[{i}]") for i, entry in enumerate(data))
    if is_dataclass(kind):
        return _decode_fields(kind, data, where)
    accepted = (int, float) if kind is float else (kind,)
    if isinstance(data, bool) or not isinstance(data, accepted):
        raise HardwareError(f"{where} must be of type {kind.__name__}, found {data!r}")
    return kind(data)


def _decode_fields(kind: Any, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise HardwareError(f"{where} must be an object, found {data!r}")
    types = get_type_hints(kind)
    if wrong := {field.name for field in fields(kind)}.symmetric_difference(data):
        raise HardwareError(f"{where}: fields missing or unknown: {', '.join(sorted(wrong))}")
    return kind(**{name: _decode(types[name], value, f"{where}.{name}") for name, value in data.items()})
