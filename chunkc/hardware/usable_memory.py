"""Memory of a named machine less what CUDA, fragments, the system and processes keep.

A run on a GPU measures the context (`cuda_budget`); a plan for a machine that is not here, or a run that stands in for
it, assumes it. All leave the same slack (`slack_nbytes`). An emulated device by name (``emulated-64m-2g``) is a budget
and keeps nothing back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from chunkc.hardware import Hardware
from chunkc.hardware.assumptions import assumed

_MIB: Final = 2**20
_SLACK_PARTS: Final = 64
_LEAST_SLACK_NBYTES: Final = 128 * _MIB


@dataclass(frozen=True, slots=True)
class Budget:
    """``nbytes`` that one rank may take of a memory in which others hold ``reserved_nbytes`` of its share.

    ``leaves_slack``: whether `slack_nbytes` are left free.
    """

    nbytes: int
    reserved_nbytes: int = 0
    leaves_slack: bool = False

    def less(self, taken_nbytes: int) -> Budget:
        """The budget when ``taken_nbytes`` more are reserved."""
        return replace(self, nbytes=self.nbytes - taken_nbytes, reserved_nbytes=self.reserved_nbytes + taken_nbytes)

    def memory_nbytes(self, needed_nbytes: int) -> int:
        """The least memory that leaves a budget of ``needed_nbytes``."""
        nbytes = needed_nbytes + self.reserved_nbytes
        has_slack = self.leaves_slack and nbytes > 0
        return nbytes + max(_LEAST_SLACK_NBYTES, (nbytes - 1) // (_SLACK_PARTS - 1)) if has_slack else nbytes


@dataclass(frozen=True, slots=True)
class UsableMemory:
    """Budgets of one rank; CUDA's context, the system and processes have theirs reserved."""

    device: Budget
    host: Budget

    @classmethod
    def of(cls, hw: Hardware) -> UsableMemory:
        device_nbytes, host_nbytes = hw.gpu_memory_nbytes, hw.host_nbytes_per_rank
        if hw.emulated:
            return cls(Budget(device_nbytes), Budget(host_nbytes))
        facts = assumed(hw.gpu)
        context_nbytes = facts.cuda_context_mib * _MIB
        kept_host_nbytes = (facts.system_host_mib // hw.gpus_per_node + facts.process_host_mib) * _MIB
        usable_nbytes = max(0, device_nbytes - slack_nbytes(device_nbytes) - context_nbytes)
        return cls(
            Budget(usable_nbytes, context_nbytes, leaves_slack=True),
            Budget(max(0, host_nbytes - kept_host_nbytes), kept_host_nbytes),
        )


def slack_nbytes(gpu_nbytes: int) -> int:
    """Bytes left to fragments and kernels loaded late: 1/64 of a GPU's memory, 128 MiB at least."""
    return max(_LEAST_SLACK_NBYTES, gpu_nbytes // _SLACK_PARTS)
