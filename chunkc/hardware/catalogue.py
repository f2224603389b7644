"""The catalogue ``hardware.toml`` as typed rows: GPUs with rates, and the papers' machines by name."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from chunkc.errors import HardwareError

MIN_RATE, MAX_RATE = 1e-9, 1e12
_GIB = 1024**3
_VENDOR_PREFIX = re.compile(r"^((NVIDIA|Tesla|GeForce) )*")


@dataclass(frozen=True, slots=True)
class Tflops:
    """Dense matrix rates of one GPU in 1e12 operations per second, by dtype; 0.0 where it lacks one."""

    fp32: float
    tf32: float = 0.0
    fp16: float = 0.0
    bf16: float = 0.0

    def __post_init__(self) -> None:
        check_rate("tflops.fp32", self.fp32)
        for name in ("tf32", "fp16", "bf16"):
            if getattr(self, name) != 0.0:
                check_rate(f"tflops.{name}", getattr(self, name))


@dataclass(frozen=True, slots=True)
class GpuRow:
    """One GPU of the catalogue: GB/s, those of links per direction; `memory` as (bytes, GB/s) by size."""

    gpu: str
    compute_capability: tuple[int, int]
    memory: tuple[tuple[int, float], ...]
    default_nbytes: int
    tflops: Tflops
    cuda_name: str
    names: tuple[str, ...] = ()
    pcie_gb_per_s: float | None = None
    nvlink_gb_per_s: float | None = None
    c2c_gb_per_s: float | None = None

    @property
    def variants(self) -> tuple[int, ...]:
        """The memory sizes in bytes that it is sold with, smallest first."""
        return tuple(nbytes for nbytes, _ in self.memory)

    def hbm_gb_per_s(self, nbytes: int) -> float:
        """Memory bandwidth of the smallest variant that has `nbytes`."""
        return next(rate for variant, rate in self.memory if nbytes <= variant)

    def is_device(self, cuda_name: str, nbytes: int) -> bool:
        """Whether a CUDA device of this name and memory is this GPU."""
        model = _VENDOR_PREFIX.sub("", cuda_name)
        return re.fullmatch(self.cuda_name, model) is not None and nbytes <= self.variants[-1]


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine of the papers: its spelling and what the spelling cannot say."""

    hw: str
    num_cpu_cores: int | None = None
    internode_gb_per_s: float | None = None


@cache
def gpus() -> Mapping[str, GpuRow]:
    """The GPUs of the catalogue by canonical name, in its order."""
    return {gpu: _row(gpu, entry) for gpu, entry in read_catalogue()["gpu"].items()}


@cache
def machines() -> Mapping[str, Machine]:
    return {alias: Machine(**entry) for alias, entry in read_catalogue()["alias"].items()}


@cache
def gpu_spellings() -> Mapping[str, str]:
    """Every accepted GPU spelling to its canonical name: ``4090`` to ``rtx4090``."""
    return {name: gpu for gpu, row in gpus().items() for name in (gpu, *row.names)}


def check_rate(name: str, rate: object) -> None:
    """Refuse a rate that is no number from `MIN_RATE` to `MAX_RATE`, since times would overflow."""
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not math.isfinite(rate) or rate <= 0:
        raise HardwareError(f"{name} must be a positive finite number, found {rate!r}")
    if not MIN_RATE <= rate <= MAX_RATE:
        raise HardwareError(f"{name} must be from {MIN_RATE:g} to {MAX_RATE:g}, found {rate!r}")


def _row(gpu: str, entry: dict[str, Any]) -> GpuRow:
    major, minor = entry.pop("compute_capability")
    return GpuRow(
        gpu,
        (major, minor),
        memory=tuple((variant["gib"] * _GIB, variant["gb_per_s"]) for variant in entry.pop("memory")),
        default_nbytes=entry.pop("default_gib") * _GIB,
        tflops=Tflops(**entry.pop("tflops")),
        names=tuple(entry.pop("names", ())),
        **entry,
    )


def read_catalogue() -> dict[str, Any]:
    """The tables of ``hardware.toml`` as they stand there."""
    return tomllib.loads(Path(__file__).with_name("hardware.toml").read_text(encoding="utf-8"))
