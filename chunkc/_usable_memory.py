"""Memory of a named machine less what CUDA, fragments, the system and processes keep.

A run on a GPU measures the context, and leaves as much to fragments of the allocator, but at least 128 MiB
(`chunkc.runtime.cuda_memory`), which is more on GPUs below 8 GiB. A plan for a machine that is not here assumes both,
and so does a run that stands in for the machine in host memory. An emulated device by name (``emulated-64m-2g``) is a
budget and keeps nothing back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from chunkc._assumed import assumed
from chunkc.hardware import Hardware

SLACK_PARTS: Final = 64
"""One part in so many of a GPU's memory is left to fragments of the allocator and to kernels that are loaded late."""

_MIB: Final = 2**20


@dataclass(frozen=True, slots=True)
class UsableMemory:
    """Bytes of one rank.

    Attributes:
        device_nbytes, host_nbytes: what training may take.
        context_nbytes: of the device, what CUDA's context keeps.
        slack_parts: one part in so many of the device's memory is left free; 0 for none.
        kept_host_nbytes: of the rank's share of the host's memory, what the system and the process keep.
    """

    device_nbytes: int
    host_nbytes: int
    context_nbytes: int = 0
    slack_parts: int = 0
    kept_host_nbytes: int = 0

    @classmethod
    def of(cls, hw: Hardware) -> UsableMemory:
        """That of one rank of ``hw``."""
        device_nbytes, host_nbytes = hw.gpu_memory_nbytes, hw.host_nbytes_per_rank
        if hw.emulated:
            return cls(device_nbytes, host_nbytes)
        facts = assumed(hw.gpu)
        context_nbytes = facts.cuda_context_mib * _MIB
        kept_host_nbytes = (facts.system_host_mib // hw.gpus_per_node + facts.process_host_mib) * _MIB
        return cls(
            max(0, device_nbytes - device_nbytes // SLACK_PARTS - context_nbytes),
            max(0, host_nbytes - kept_host_nbytes),
            context_nbytes,
            SLACK_PARTS,
            kept_host_nbytes,
        )


def named_nbytes(needed_nbytes: int, slack_parts: int) -> int:
    """The least memory of which ``needed_nbytes`` are left without one part in ``slack_parts``."""
    return needed_nbytes + (needed_nbytes - 1) // (slack_parts - 1) if slack_parts and needed_nbytes else needed_nbytes
