"""The machines that tests run on: what to name as ``hw``, where inputs go, and devices for runners.

    emulated   host memory behind a budget; what tests run on unless they are marked ``gpu``
    cuda       this machine's GPU
    double     the CUDA device over a double of CUDA (`fake_cuda`): its code, carried out in host memory

Tests marked ``gpu`` take the fixture ``machine``. Without a GPU they are skipped, or run on a stand-in with
``--stand-in emulated`` or ``--stand-in double``, which shows that the tests themselves are right.
"""

from dataclasses import replace
from typing import Any, Protocol

import torch

import chunkc
from chunkc.runtime.devices.debug_settings import DebugSettings
from chunkc.runtime.devices.emulated import EmulatedDevice
from chunkc.runtime.devices.protocol import Device


class Machine(Protocol):
    """See the module docstring. Of the memory that ``hw`` names, ``overhead_nbytes`` are given to no model.

    ``variable`` of the environment has debug settings; ``context_nbytes`` stand outside of torch's allocator.
    """

    kind: str
    torch_device: torch.device
    variable: str
    overhead_nbytes: int
    context_nbytes: int

    def named(self, nbytes: int, host_nbytes: int) -> chunkc.Hardware:
        """A machine whose GPU has ``nbytes`` in all, as `BudgetError` counts them; each has a device of its own."""
        ...

    def hw(self, device_nbytes: int, host_nbytes: int) -> chunkc.Hardware: ...

    def make_device(
        self, device_nbytes: int, host_nbytes: int, settings: DebugSettings, *, host_arithmetic: bool = False
    ) -> Device: ...

    def put(self, values: Any) -> Any: ...


class Emulated:
    kind = "emulated"
    torch_device = torch.device("cpu")
    variable = "CHUNKC_EMULATED"
    overhead_nbytes = context_nbytes = 0

    def named(self, nbytes: int, host_nbytes: int) -> chunkc.Hardware:
        hw = chunkc.Hardware.parse("emulated-1m-1m")
        return replace(
            hw, name=f"emulated-{nbytes}-{host_nbytes}", gpu_memory_nbytes=nbytes, host_memory_nbytes=host_nbytes
        )

    def hw(self, device_nbytes: int, host_nbytes: int) -> chunkc.Hardware:
        return self.named(device_nbytes, host_nbytes)

    def make_device(
        self, device_nbytes: int, host_nbytes: int, settings: DebugSettings, *, host_arithmetic: bool = False
    ) -> Device:
        return EmulatedDevice(f"emulated-{device_nbytes}-{host_nbytes}", device_nbytes, host_nbytes, settings)

    def put(self, values: Any) -> Any:
        return values


EMULATED = Emulated()
