"""Which device a model runs on, and whether this machine can hold what a plan takes.

Each ``hw`` text makes a device of its own. Models that were given the same ``Hardware`` object share one device and its
budgets, so that the second gets what the first left.
"""

from __future__ import annotations

import logging
import os
import weakref

from chunkc.errors import HardwareError
from chunkc.hardware import Hardware, free_host_nbytes
from chunkc.ir.plan import Plan
from chunkc.runtime.emulated import EmulatedDevice, EmulationSettings

logger = logging.getLogger("chunkc")

HardwareLike = Hardware | str | os.PathLike[str]


class SharedDevice(EmulatedDevice):
    """An emulated device that remembers the ``Hardware`` object it belongs to, so that the object's id stays taken."""

    def __init__(self, hw: Hardware, settings: EmulationSettings) -> None:
        super().__init__(str(hw), hw.gpu_memory_nbytes, hw.host_nbytes_per_rank, settings)
        self.hardware = hw


_shared: weakref.WeakValueDictionary[int, SharedDevice] = weakref.WeakValueDictionary()
"""The device of each ``Hardware`` object in use: budgets are a fact of the process, like the memory they stand for."""


def device_for(hw: HardwareLike) -> tuple[Hardware, SharedDevice]:
    """The machine that ``hw`` names and the device to run on; CUDA devices are emulated in this release.

    Raises:
        HardwareError: for an unknown machine, or one of several GPUs.
    """
    machine = Hardware.of(hw)
    if machine.num_gpus != 1:
        raise HardwareError(
            f"hw={machine} names {machine.num_gpus} GPUs; training on several ranks is not built yet. chunkc.plan "
            "plans for them"
        )
    known = _shared.get(id(hw))
    if known is not None and known.hardware is hw:
        return machine, known
    if not machine.emulated:
        logger.warning(
            "hw=%s: running on CUDA is not built yet, so the %s is emulated in host memory", machine, machine.gpu
        )
    settings = EmulationSettings.from_env(os.environ.get("CHUNKC_EMULATED", ""))
    device = SharedDevice(machine, settings)
    if isinstance(hw, Hardware):
        _shared[id(hw)] = device
    return machine, device


def check_free_memory(plan: Plan, already_held_nbytes: int) -> None:
    """Refuse a plan that this machine's free memory cannot hold, since host memory stands for the device too.

    Args:
        already_held_nbytes: bytes of the model itself, which the chunks consume as they fill.

    Raises:
        HardwareError: with the numbers.
    """
    needed = plan.memory.device_peak_nbytes + plan.memory.host_nbytes - already_held_nbytes
    free = free_host_nbytes()
    if needed > free:
        raise HardwareError(
            f"the plan for {plan.hw} takes {plan.memory.device_peak_nbytes} device and {plan.memory.host_nbytes} host "
            f"bytes, both of which are host memory here, where {free} bytes are free; use a smaller model, or name a "
            "machine with less memory"
        )
