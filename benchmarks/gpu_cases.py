"""Contests of the GPU benchmark: systems on one model within one limit of memory.

All systems of a contest are alive at the same time and take turns, a block of steps each, so that what changes with
time falls on all alike. Contests are in order of importance.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from gpu_models import Shape

MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True)
class Contest:
    """Systems that train ``shape``.

    Attributes:
        systems: names in `gpu_systems`; chunkc is the first, since it reads what is free of the GPU.
        device_nbytes, host_nbytes: memory of the machine that chunkc is told. torch's allocator refuses every system
            more than ``device_nbytes``; chunkc counts CUDA's context in.
        block, num_rounds: steps of a block, and blocks of each system.
        limit_s: most seconds for all of it; least_s: with less left it is not begun.
        is_trace_kept: whether the profiler's traces are results, too.
    """

    name: str
    shape: Shape
    systems: tuple[str, ...]
    device_nbytes: int
    host_nbytes: int
    block: int
    num_rounds: int
    limit_s: float
    least_s: float
    is_trace_kept: bool = False

    def facts(self) -> dict[str, Any]:
        """For results."""
        return {**asdict(self), "num_params": self.shape.num_params(), "step_flops": self.shape.step_flops()}


CONTESTS = (
    Contest(
        "1.3B in 16 GiB", Shape(layers=24, hidden=2048, heads=16, batch=4),
        ("chunkc", "chunkc_clipped", "zero_offload", "fsdp2"), 16 * GIB, 64 * GIB, block=8, num_rounds=3, limit_s=250,
        least_s=90, is_trace_kept=True,
    ),
    Contest(
        "5B in 24 GiB", Shape(layers=32, hidden=3584, heads=28, batch=2), ("chunkc",),
        24 * GIB, 100 * GIB, block=8, num_rounds=2, limit_s=180, least_s=75, is_trace_kept=True,
    ),
    Contest(
        "355M resident", Shape(layers=24, hidden=1024, heads=16, batch=8), ("chunkc", "compile"),
        32 * GIB, 32 * GIB, block=10, num_rounds=4, limit_s=110, least_s=45,
    ),
)  # fmt: skip
_TOY = Shape(layers=2, hidden=64, heads=2, batch=2, length=32, vocabulary=128)
STAND_IN_CONTESTS = (
    Contest(
        "toy capped", _TOY, ("chunkc", "zero_offload", "fsdp2"), MIB, 64 * MIB, block=8, num_rounds=2, limit_s=300,
        least_s=20, is_trace_kept=True,
    ),
    Contest("toy alone", _TOY, ("chunkc",), 3 * MIB // 2, 64 * MIB, block=8, num_rounds=2, limit_s=120, least_s=20),
    Contest("toy resident", _TOY, ("chunkc", "compile"), 64 * MIB, 64 * MIB, 8, 2, limit_s=180, least_s=20),
)  # fmt: skip
"""The same flow without a GPU: chunkc on the emulated device, the others on the CPU, where nothing caps them."""


def contests(*, is_stand_in: bool) -> tuple[Contest, ...]:
    """Of a GPU, or of its stand-in."""
    return STAND_IN_CONTESTS if is_stand_in else CONTESTS


def contest_named(name: str, *, is_stand_in: bool) -> Contest:
    """That of ``name``."""
    return next(contest for contest in contests(is_stand_in=is_stand_in) if contest.name == name)
