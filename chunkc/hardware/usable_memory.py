"""Memory of a named machine less what CUDA, fragments, the system and processes keep.

A run on a GPU measures the context (`cuda_budget`); a plan for a machine that is not here, or a run that stands in for
it, assumes it. All leave the same slack (`slack_nbytes`). An emulated device by name (``emulated-64m-2g``) is a budget
and keeps nothing back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from chunkc.hardware import Hardware
from chunkc.hardware.assumptions import assumed

_MIB: Final = 2**20
_SLACK_PARTS: Final = 64
_LEAST_SLACK_NBYTES: Final = 128 * _MIB


@dataclass(frozen=True, slots=True)
class UsableMemory:
    """Bytes that one rank may take, those that CUDA's context keeps, and those kept of its host share.

    ``leaves_slack``: whether `slack_nbytes` are left free.
    """

    device_nbytes: int
    host_nbytes: int
    context_nbytes: int = 0
    leaves_slack: bool = False
    kept_host_nbytes: int = 0

    @classmethod
    def of(cls, hw: Hardware) -> UsableMemory:
        device_nbytes, host_nbytes = hw.gpu_memory_nbytes, hw.host_nbytes_per_rank
        if hw.emulated:
            return cls(device_nbytes, host_nbytes)
        facts = assumed(hw.gpu)
        context_nbytes = facts.cuda_context_mib * _MIB
        kept_host_nbytes = (facts.system_host_mib // hw.gpus_per_node + facts.process_host_mib) * _MIB
        return cls(
            max(0, device_nbytes - slack_nbytes(device_nbytes) - context_nbytes),
            max(0, host_nbytes - kept_host_nbytes),
            context_nbytes,
            True,
            kept_host_nbytes,
        )


def slack_nbytes(gpu_nbytes: int) -> int:
    """Bytes left to fragments and kernels loaded late: 1/64 of a GPU's memory, 128 MiB at least."""
    return max(_LEAST_SLACK_NBYTES, gpu_nbytes // _SLACK_PARTS)


def least_gpu_nbytes(needed_nbytes: int) -> int:
    """The least GPU memory with ``needed_nbytes`` left beside the slack; 0 where none are needed."""
    if not needed_nbytes:
        return 0
    return needed_nbytes + max(_LEAST_SLACK_NBYTES, (needed_nbytes - 1) // (_SLACK_PARTS - 1))
