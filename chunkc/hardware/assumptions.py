"""Assumptions where a data sheet says nothing, with their sources in ``hardware.toml``.

A calibrated profile replaces what it has measured.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache

from chunkc.errors import HardwareError
from chunkc.hardware.catalogue import check_rate, read_catalogue

__all__ = ["Assumed", "Host", "assumed", "host_of"]


@dataclass(frozen=True, slots=True)
class Assumed:
    """Efficiencies, latencies, Adam on a host, and memory that training does not get.

    An efficiency is the share of the data sheet's figure that large work reaches. A hop is for each rank beyond the
    first; a hand-off lasts from the end of work on one stream to the start of work on another that waits for it. Adam's
    rate is in 1e9 parameters per second; ``dram_update_efficiency`` is of Adam by many cores, ``dram_efficiency`` of
    copies and updates together. ``block_update_share``: of a core's rate for fp32 states, that for 8-bit states, which
    it decodes and encodes; ``gpu_block_update_share``: the same of a GPU. ``second_home_factor``: time of an update
    that writes elsewhere, where one in place takes 1. CUDA keeps memory of a GPU, the system and each process memory of
    a node.
    """

    matmul_efficiency: float
    attention_efficiency: float
    device_memory_efficiency: float
    host_link_efficiency: float
    collective_efficiency: float
    copy_latency_us: float
    kernel_launch_us: float
    action_launch_us: float
    handoff_us: float
    collective_hop_us: float
    cpu_update_gparam_per_s_per_core: float
    dram_update_efficiency: float
    block_update_share: float
    gpu_block_update_share: float
    second_home_factor: float
    dram_efficiency: float
    cuda_context_mib: int
    system_host_mib: int
    process_host_mib: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            check_rate(field.name, value)
            if field.name.endswith("_efficiency") and value > 1:
                raise HardwareError(f"{field.name} is a share of at most 1, found {value!r}")


@dataclass(frozen=True, slots=True)
class Host:
    """One node around its GPUs: memory bandwidth (1e9 bytes per second), cores, network per direction."""

    dram_gb_per_s: float
    num_cpu_cores: int
    internode_gb_per_s: float


@cache
def assumed(gpu: str) -> Assumed:
    """Return the assumptions for ``gpu``, a name of the catalogue; the defaults for any other name."""
    table = read_catalogue()["assumed"]
    return Assumed(**{**table["default"], **table.get(gpu, {})})


@cache
def host_of(gpu: str) -> Host | None:
    """The usual node around ``gpu``; None for a GPU that the catalogue does not have."""
    entry = read_catalogue()["host"].get(gpu)
    return None if entry is None else Host(**entry)
