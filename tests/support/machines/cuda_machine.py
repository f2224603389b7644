"""Machines whose device is CUDA's: this machine's GPU, and the same device over a double of CUDA."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from fake_cuda import GIB, FakeCuda
from torch.utils import _pytree as pytree

import chunkc
from chunkc.compiler.device_selection import SharedDevice, device_for
from chunkc.hardware import PresentGpu, present_gpu
from chunkc.ir.actions import Stream
from chunkc.runtime.devices.cuda import CudaDevice
from chunkc.runtime.devices.cuda_api import CudaApi
from chunkc.runtime.devices.cuda_budget import MemoryLedger
from chunkc.runtime.devices.debug_settings import DebugSettings
from chunkc.runtime.devices.protocol import Device, Update
from chunkc.runtime.update.cpu_update import ChunkUpdate, Piece
from chunkc.runtime.update.rules import UpdateRule
from chunkc.runtime.update.update_inputs import StepInputs

DOUBLE_GPU = PresentGpu(index=0, gpu="h200", memory_nbytes=140 * GIB, capability=(9, 0))


class HostArithmetic:
    """An update of a chunk on the device by the host's update over copies, for comparisons of bits."""

    def __init__(
        self,
        rule: UpdateRule,
        payload: torch.Tensor,
        states: Sequence[torch.Tensor],
        pieces: Sequence[Piece],
        gradient: Any,
    ) -> None:
        self._device = [payload, *states] + ([] if gradient is None else [gradient])
        self._host = [tensor.to("cpu", copy=True) for tensor in self._device]
        self._num_written = 1 + len(states)
        apart = None if gradient is None else self._host[-1]
        self._update = ChunkUpdate(rule, self._host[0], self._host[1 : self._num_written], pieces, gradient=apart)

    def update(self, inputs: StepInputs) -> None:
        self._with_copies(lambda: self._update.update(inputs))

    def restore(self) -> None:
        self._with_copies(self._update.restore)

    def _with_copies(self, work: Callable[[], None]) -> None:
        for host, device in zip(self._host, self._device, strict=True):
            host.copy_(device)
        work()
        for host, device in zip(self._host[: self._num_written], self._device, strict=False):
            device.copy_(host)


class HostArithmeticDevice(CudaDevice):
    """A CUDA device on which updates of chunks on the device compute what those of the host compute."""

    def make_update(
        self,
        stream: Stream,
        rule: UpdateRule,
        payload: torch.Tensor,
        states: Sequence[torch.Tensor],
        pieces: Sequence[Piece],
        gradient: torch.Tensor | None = None,
        target: tuple[torch.Tensor, Sequence[torch.Tensor]] | None = None,
    ) -> Update:
        if stream is Stream.CPU:
            return super().make_update(stream, rule, payload, states, pieces, gradient, target)
        return HostArithmetic(rule, payload, states, pieces, gradient)


class Cuda:
    """This machine's GPU. What CUDA takes of it is measured once, so that budgets of a few bytes stay what they are."""

    kind = "cuda"
    variable = "CHUNKC_CUDA"

    def __init__(self) -> None:
        gpu = self.find_gpu()
        assert gpu is not None, "there is no CUDA device here"
        self.gpu = gpu
        self._api = self.make_api(gpu.index)
        self.torch_device = self._api.torch_device
        self._ledger = MemoryLedger(self._api)
        _, self._held = self.device_for(self.named(gpu.memory_nbytes, GIB))  # with it lives what has been measured
        self.overhead_nbytes = self._held.overhead_nbytes
        self.context_nbytes = self._ledger.context_nbytes  # of it what stands outside of torch's allocator

    def find_gpu(self) -> PresentGpu | None:
        return present_gpu()

    def make_api(self, index: int) -> CudaApi:
        return CudaApi(index)

    def device_for(self, hw: Any) -> tuple[chunkc.Hardware, SharedDevice]:
        return device_for(hw, self.find_gpu, self.make_api)

    def named(self, nbytes: int, host_nbytes: int) -> chunkc.Hardware:
        hw, name = chunkc.Hardware.parse(f"{self.gpu.gpu}-1g-1g"), f"{self.gpu.gpu}-{nbytes}-{host_nbytes}"
        return replace(hw, name=name, gpu_memory_nbytes=nbytes, host_memory_nbytes=host_nbytes)

    def hw(self, device_nbytes: int, host_nbytes: int) -> chunkc.Hardware:
        return self.named(device_nbytes + self.overhead_nbytes, host_nbytes)

    def make_device(
        self, device_nbytes: int, host_nbytes: int, settings: DebugSettings, *, host_arithmetic: bool = False
    ) -> Device:
        make = HostArithmeticDevice if host_arithmetic else CudaDevice
        named_nbytes = device_nbytes + self._ledger.overhead_nbytes
        name = f"{self.kind}-{device_nbytes}-{host_nbytes}"
        return make(name, self._api, self._ledger, named_nbytes, host_nbytes, settings)

    def put(self, values: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, lambda value: value.to(self.torch_device), values)


class Double(Cuda):
    """The CUDA device over a double: threads with queues for streams, host memory for device memory."""

    kind = "double"

    def find_gpu(self) -> PresentGpu | None:
        return DOUBLE_GPU

    def make_api(self, index: int) -> CudaApi:
        return FakeCuda(free=130 * GIB, total=140 * GIB)
