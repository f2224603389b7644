"""One rank of a machine as the modelled systems see it: memory, rates, and the number of ranks."""

from __future__ import annotations

from dataclasses import dataclass

from chunkc.cost.rates import CostRates, cost_rates
from chunkc.hardware import Hardware
from chunkc.hardware.usable_memory import UsableMemory


@dataclass(frozen=True, slots=True)
class Machine:
    """One rank of the machine ``name``: rates, bytes that models may have, and the number of ranks."""

    name: str
    rates: CostRates
    device_nbytes: int
    host_nbytes: int
    world_size: int = 1

    @classmethod
    def of(cls, hw: Hardware, reserved_nbytes: int = 0) -> Machine:
        """A rank of ``hw``, all of whose GPUs train; HardwareError when the rates are not known."""
        memory = UsableMemory.of(hw)
        return cls(
            name=str(hw),
            rates=cost_rates(hw),
            device_nbytes=memory.device.nbytes - reserved_nbytes,
            host_nbytes=memory.host.nbytes,
            world_size=hw.num_gpus,
        )
