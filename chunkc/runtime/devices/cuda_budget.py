"""Memory that one GPU gives to models of a process, and what iterations take of it beside chunks."""

from __future__ import annotations

import threading

from chunkc.hardware.usable_memory import slack_nbytes
from chunkc.runtime.devices.cuda_api import CudaApi


class MemoryLedger:
    """Memory that one GPU gives to all models of this process.

    Attributes:
        context_nbytes: what CUDA, its libraries and other processes take of the GPU, outside of the allocator.
        capacity_nbytes: what the allocator can reserve for chunkc, less slack for fragments and kernels' code.
        base_nbytes: what the process had of the allocator before: workspaces of cuBLAS, tensors of the script.
        reserved_nbytes: set aside by models.
    """

    def __init__(self, api: CudaApi) -> None:
        api.warm_up()
        free, total = api.memory_info()
        reserved = api.allocator_nbytes("reserved", "current")
        self.base_nbytes = api.allocator_nbytes("allocated", "current")
        unused = reserved - self.base_nbytes
        self.context_nbytes = total - free - reserved
        self.capacity_nbytes = max(0, free + unused - slack_nbytes(total))
        self.reserved_nbytes = 0
        self.lock = threading.Lock()

    def count_libraries(self, api: CudaApi) -> None:
        """Deduct what libraries (NCCL) have taken of the GPU since the last count."""
        api.synchronize()
        free, total = api.memory_info()
        taken = max(0, total - free - api.allocator_nbytes("reserved", "current") - self.context_nbytes)
        self.context_nbytes += taken
        self.capacity_nbytes = max(0, self.capacity_nbytes - taken)

    @property
    def overhead_nbytes(self) -> int:
        """Bytes that a GPU of any size cannot give to models: outside the allocator, or taken of it before."""
        return self.context_nbytes + self.base_nbytes

    @property
    def free_nbytes(self) -> int:
        return self.capacity_nbytes - self.reserved_nbytes


class AllocatorReading:
    """Highest non-model bytes since `start`, from the allocator's peaks of what tensors asked for."""

    def __init__(self, api: CudaApi) -> None:
        self._api = api
        self._baseline_nbytes = 0
        self._peak_nbytes = 0
        self._paused_nbytes: int | None = None
        self._has_started = False

    def start(self) -> None:
        self._api.reset_peaks()
        self._baseline_nbytes = self._api.allocator_nbytes("requested", "current")
        self._peak_nbytes, self._paused_nbytes, self._has_started = 0, None, True

    def pause(self) -> None:
        """Exclude what is taken from here to `resume`."""
        self._peak_nbytes = self.peak_nbytes()
        self._paused_nbytes = self._api.allocator_nbytes("requested", "current")

    def resume(self) -> None:
        if self._paused_nbytes is not None:
            self._baseline_nbytes += self._api.allocator_nbytes("requested", "current") - self._paused_nbytes
            self._api.reset_peaks()
            self._paused_nbytes = None

    def peak_nbytes(self) -> int:
        if not self._has_started or self._paused_nbytes is not None:
            return self._peak_nbytes
        return max(self._peak_nbytes, self._api.allocator_nbytes("requested", "peak") - self._baseline_nbytes)
