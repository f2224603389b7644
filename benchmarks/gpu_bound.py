"""The least time of a training step that measured rates and a limit of memory allow.

A parameter whose states stand on the device takes 14 bytes there: bf16 beside three fp32 lists. Of P parameters R do,
at most memory / 14, activations not counted. Of the others a share y is updated on the device, for which 12 bytes
each go up and come back; for the rest 2 bytes of gradient come down, the host updates, and 2 bytes of parameter go up:

    compute = operations / rate + (R + y (P - R)) / rate of the device's update
    h2d     = (12 y + 2 (1 - y)) (P - R) / rate of copies to the device
    d2h     = the same / rate of copies from it
    host    = (1 - y) (P - R) / rate of the host's update

Whatever overlaps, a step takes as long as the longest of the four; the bound is that for the best R and y. Each
rate is that of an activity that runs alone: what activities that run together take from each other is not in the bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

from gpu_models import Shape

from chunkc.cost.rates import CostRates

RESIDENT_NBYTES = 14
TRIPLE_NBYTES = 12
PAYLOAD_NBYTES = 2
NUM_SHARES = 100
"""Steps in which R and y are tried."""
DTYPE = "bfloat16"


@dataclass(frozen=True, slots=True)
class Work:
    """Work of a step. The masked half of attention counts neither here nor in measured rates."""

    num_params: int
    matmul_flops: float
    attention_flops: float

    @classmethod
    def of(cls, shape: Shape) -> Work:
        """A step of the model ``shape``."""
        attention = shape.attention_flops()
        return cls(shape.num_params(), shape.step_flops() - attention, attention / 2)


def bound(shape: Shape, rates: CostRates, device_nbytes: int) -> dict[str, float]:
    """The bound in milliseconds with its parts, and the same with all states on the host.

    Args:
        rates: of one rank, measured.
        device_nbytes: for model data.
    """
    work = Work.of(shape)
    most = min(1.0, device_nbytes / RESIDENT_NBYTES / work.num_params)
    shares = [number / NUM_SHARES for number in range(NUM_SHARES + 1)]
    times = {(most * r, y): parts_ms(work, rates, most * r, y) for r, y in product(shares, shares)}
    best = min(times, key=lambda choice: longest(times[choice]))
    parts = times[best]
    return {
        "bound_ms": longest(parts),
        **parts,
        "resident_share": best[0],
        "streamed_share": best[1],
        "bound_by_host_updates_ms": longest(parts_ms(work, rates, 0, 0.0)),
    }


def parts_ms(work: Work, rates: CostRates, resident_share: float, streamed_share: float) -> dict[str, float]:
    """Milliseconds of each resource; R is ``resident_share`` of P, y ``streamed_share``."""
    resident = resident_share * work.num_params
    others = work.num_params - resident
    copied = (TRIPLE_NBYTES * streamed_share + PAYLOAD_NBYTES * (1 - streamed_share)) * others
    on_device = resident + streamed_share * others
    compute_s = work.matmul_flops / rates.of_dtype(rates.matmul_tflops, DTYPE) / 1e12
    compute_s += work.attention_flops / rates.of_dtype(rates.attention_tflops, DTYPE) / 1e12
    compute_s += on_device / rates.of_dtype(rates.gpu_update_gparam_per_s, DTYPE) / 1e9
    host_s = (1 - streamed_share) * others / rates.of_dtype(rates.cpu_update_gparam_per_s, DTYPE) / 1e9
    return {
        "compute_ms": compute_s * 1e3,
        **{f"{stream}_ms": copied / law.gb_per_s / 1e6 for stream, law in rates.copies.items()},
        "host_update_ms": host_s * 1e3,
    }


def longest(parts: Mapping[str, float]) -> float:
    """Of times that may all overlap."""
    return max(parts.values())
