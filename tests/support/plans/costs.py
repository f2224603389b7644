"""Rates in round numbers, and plans with work in their segments, for tests of the cost model.

A payload of 256 bytes is copied in 1 ms, updated on the host in 2 ms, lands in 1 ms; a unit of work takes 1 ms.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any

from chunkc.cost.rates import CopyLaw, CostRates, Links
from chunkc.cost.sharing import MEASURED_STREAMS
from chunkc.hardware.profile import Condition, CopyRate, DtypeRate, Figure, Rates, Slowdown
from chunkc.ir.actions import Stream
from chunkc.ir.plan import Plan
from chunkc.ir.tiers import COPIED_TIERS
from chunkc.ir.work import Kind, Work

UNIT_NBYTES = 512
COPY = CopyLaw(0.0, 256e-6)
LINKS = Links(gpu_gb_per_s=256e-6, node_gb_per_s=None, gpus_per_node=8, hop_us=0.0, is_host_link=False)
RATES = CostRates(
    hw="round",
    matmul_tflops={"float32": 1e-9},
    attention_tflops={"float32": 1e-9},
    device_memory_gb_per_s=UNIT_NBYTES * 1e-6,
    copies=dict.fromkeys(COPIED_TIERS, COPY),
    cpu_update_gparam_per_s={"float32": 32e-6},
    gpu_update_gparam_per_s={"float32": 64e-6},
    links=LINKS,
)


def with_work(plan: Plan, units: Mapping[str, int] | int) -> Plan:
    """``plan`` with so many units of work in every segment, or in those named."""
    amounts = {s.name: units for s in plan.segments} if isinstance(units, int) else units
    segments = tuple(
        replace(s, work=(Work(Kind.MEMORY, "", 0, UNIT_NBYTES * amounts.get(s.name, 0), 1),)) for s in plan.segments
    )
    return replace(plan, segments=segments)


def rates(**changes: Any) -> CostRates:
    return replace(RATES, **changes)


def copies(to_device: CopyLaw, from_device: CopyLaw | None = None) -> dict[Stream, CopyLaw]:
    """The laws of both directions."""
    return {Stream.H2D: to_device, Stream.D2H: from_device or to_device}


def calibration(factors: dict[tuple[str, tuple[str, ...]], float]) -> Rates:
    """Rates in which every set of others slows by ``1 + 0.5 * how many``, but for ``factors``."""
    of_fp32 = (DtypeRate("float32", Figure(2.0, 0.1)),)
    slowdowns = []
    for of in MEASURED_STREAMS:
        others = sorted(s for s in MEASURED_STREAMS if s is not of)
        for by in (tuple(map(str, c)) for n in (1, 2, 3) for c in combinations(others, n)):
            slowdowns.append(Slowdown(str(of), by, Figure(factors.get((str(of), by), 1 + 0.5 * len(by)), 0.1)))
    copy = CopyRate(Figure(7.0, 0.1), Figure(10.0, 0.1))
    return Rates(
        copy, copy, tuple(slowdowns), of_fp32, of_fp32, of_fp32, of_fp32, Figure(40.0, 1), Figure(3.0, 1),
        Figure(4.0, 1), Figure(12.0, 1), 15, (Condition("date", "today"),), (),
    )  # fmt: skip
