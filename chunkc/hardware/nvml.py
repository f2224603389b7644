"""Facts of a GPU by NVIDIA's management library, which answers without a CUDA context.

A CUDA context takes hundreds of MiB of the GPU and makes a later fork unusable. CUDA numbers the GPUs of
CUDA_VISIBLE_DEVICES, by default the fastest first; NVML numbers all, in the order of their buses. Where that leaves a
doubt, or a GPU is divided (MIG), there is no answer. Run on an H100; tested against a double of the library.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["NvmlGpu", "nvml_gpu"]

_LANE_GB_PER_S: Final = {1: 0.25, 2: 0.5, 3: 15.75 / 16, 4: 31.5 / 16, 5: 63.0 / 16, 6: 121.0 / 16}
"""PCIe, each direction, by generation: after line coding, of generation 6 after FLIT framing."""


@dataclass(frozen=True, slots=True)
class NvmlGpu:
    """One GPU; ``name`` as the driver says it, which is CUDA's name of it.

    ``memory_nbytes``: without the driver's share. ``pcie_generation``: the highest that the GPU and its slot agree on,
    as an idle link runs slower; ``pcie_width``: lanes now. ``others_nbytes``: device memory of other processes that
    compute on it, as far as known.
    """

    name: str
    memory_nbytes: int
    capability: tuple[int, int]
    pcie_generation: int | None
    pcie_width: int | None
    num_other_processes: int
    others_nbytes: int

    @property
    def pcie_gb_per_s(self) -> float | None:
        """Bandwidth of its link, each direction, in 1e9 bytes per second."""
        lane = _LANE_GB_PER_S.get(self.pcie_generation or 0)
        return None if lane is None or not self.pcie_width else lane * self.pcie_width


def nvml_gpu(index: int, environ: Mapping[str, str] = os.environ, nvml: Any = None) -> NvmlGpu | None:
    """The GPU that CUDA numbers ``index``; None where NVML is absent or cannot tell which that is."""
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return None
    if not hasattr(nvml, "nvmlMemory_v2"):  # an older module of that name
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        handle = _handle(nvml, index, environ)
        return None if handle is None else _read(nvml, handle)
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()


def _handle(nvml: Any, index: int, environ: Mapping[str, str]) -> Any:
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    numbers = [str(i) for i in range(len(handles))]
    visible = [name.strip() for name in environ.get("CUDA_VISIBLE_DEVICES", ",".join(numbers)).split(",")]
    if index >= len(visible):
        return None
    chosen = visible[index]
    if chosen.startswith("GPU-"):  # CUDA takes the beginning of a UUID, if it is that of one GPU
        named = [handle for handle in handles if nvml.nvmlDeviceGetUUID(handle).startswith(chosen)]
        return named[0] if len(named) == 1 else None
    are_alike = len({nvml.nvmlDeviceGetName(handle) for handle in handles}) == 1
    is_same_order = are_alike or environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    return handles[int(chosen)] if chosen in numbers and is_same_order else None


def _read(nvml: Any, handle: Any) -> NvmlGpu | None:
    current_and_pending = _or_none(nvml, nvml.nvmlDeviceGetMigMode, handle)
    if current_and_pending is not None and current_and_pending[0]:
        return None
    memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    processes = _or_none(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
    others = [process for process in processes if process.pid != os.getpid()]
    return NvmlGpu(
        name=nvml.nvmlDeviceGetName(handle),
        memory_nbytes=memory.total - memory.reserved,
        capability=(major, minor),
        pcie_generation=_or_none(nvml, nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
        pcie_width=_or_none(nvml, nvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        num_other_processes=len(others),
        others_nbytes=sum(process.usedGpuMemory or 0 for process in others),
    )


def _or_none(nvml: Any, ask: Any, handle: Any) -> Any:
    try:
        return ask(handle)
    except nvml.NVMLError:
        return None
