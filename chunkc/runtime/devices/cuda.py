"""The CUDA device: memory under a budget, streams, pinned homes, updates by kernels or on the host.

**Memory.** The arena is one block of torch's caching allocator, beside activations: either can use what the other gave
back. `MemoryLedger` measures once per process and GPU how much the allocator can reserve. A device's budget is the
least of that and of what ``hw`` names, less the context and what the allocator held before.

**Streams.** Side streams touch the arena and homes only, which live until the device is idle, so no block of the
allocator is in use on a stream that it does not know of: ``record_stream`` is not needed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import torch

from chunkc._torch_compat.core import Finalizer, outlives
from chunkc.errors import HardwareError
from chunkc.ir.actions import Stream
from chunkc.ir.layout import ALIGNMENT_NBYTES
from chunkc.ir.plan import Plan
from chunkc.runtime.devices.cpu_affinity import HostCores
from chunkc.runtime.devices.cuda_api import ChunkKernels, CudaApi
from chunkc.runtime.devices.cuda_budget import AllocatorReading, MemoryLedger
from chunkc.runtime.devices.cuda_norm import GpuNorm, NormScratch
from chunkc.runtime.devices.cuda_streams import CudaStreams
from chunkc.runtime.devices.cuda_update import GpuUpdate, StepTables
from chunkc.runtime.devices.debug_settings import DebugSettings
from chunkc.runtime.devices.pinned_memory import HostHomes
from chunkc.runtime.devices.protocol import Launch, Update
from chunkc.runtime.devices.shared_tiles import SharedTiles
from chunkc.runtime.update.cpu_update import Piece
from chunkc.runtime.update.rules import UpdateRule
from chunkc.runtime.update.second_home import host_update

_LOGGER = logging.getLogger("chunkc")
_EXIT_TIMEOUT_S: Final = 5.0


class CudaDevice:
    """One GPU, as one ``hw`` names it; implements `chunkc.runtime.devices.protocol.Device`.

    Args:
        name: for messages, for example ``h200-1024g``.
        ledger: of the GPU; devices of one GPU share it.
        named_nbytes: memory of the GPU that ``hw`` names, context included; less than the context is a `HardwareError`.
        host_budget_nbytes: hard limit of what `allocate_home` gives.
    """

    def __init__(
        self,
        name: str,
        api: CudaApi,
        ledger: MemoryLedger,
        named_nbytes: int,
        host_budget_nbytes: int,
        settings: DebugSettings | None = None,
    ) -> None:
        self.name = name
        self.torch_device = api.torch_device
        self._api, self._ledger, self._named_nbytes = api, ledger, named_nbytes
        self._take_budget()
        self.host_budget_nbytes = host_budget_nbytes
        self.leaves_slack, self.kept_host_nbytes = False, 0  # slack and free host memory are measured
        self.reading_error_nbytes = 0
        self.settings = settings if settings is not None else DebugSettings()
        self._num_arenas = 0
        self._reserved_nbytes = 0
        self._arenas: list[tuple[Callable[[], bool], int]] = []
        self._homes = HostHomes(api.register_host, api.unregister_host)
        self._tables = StepTables(api.upload, api.torch_device)
        self._norm_scratch = NormScratch(api.torch_device)
        self._kernels: ChunkKernels | None = None
        self._has_warned = False
        self._reading = AllocatorReading(api)
        self.start_reading, self.pause_reading = self._reading.start, self._reading.pause
        self.resume_reading = self._reading.resume
        self.touch_home, self.pin_home, self.free_home = self._homes.touch, self._homes.pin, self._homes.free
        self.discard_home = self._homes.discard
        self._streams = CudaStreams(name, api, self.settings)
        self.enqueue_exchanges, self.freed = self._streams.enqueue_exchanges, self.settings.freed
        self.launch, self.launch_all = self._streams.launch, self._streams.launch_all
        self._stop = Finalizer(self, _stop, self._streams, self._homes)  # also at exit

    def _take_budget(self) -> None:
        ledger, named_nbytes = self._ledger, self._named_nbytes
        self.overhead_nbytes = ledger.overhead_nbytes
        self.device_budget_nbytes = min(named_nbytes - self.overhead_nbytes, ledger.capacity_nbytes)
        if self.device_budget_nbytes <= 0:
            raise HardwareError(
                f"{self.name}: CUDA's context and what else is on this GPU take {ledger.context_nbytes} bytes, this "
                f"process has allocated {ledger.base_nbytes} and {ledger.capacity_nbytes} can be had, of the "
                f"{named_nbytes} bytes named: name more device memory in hw, or free some"
            )

    def count_libraries(self) -> None:
        """Deduct from the budget what libraries (NCCL) have taken since; raises `HardwareError` at 0."""
        self._ledger.count_libraries(self._api)
        self._take_budget()

    def num_allocations(self) -> int:
        return self._num_arenas + self._homes.num_allocations

    def num_host_syncs(self) -> int:
        return self._streams.num_synchronizes + self._streams.failures.num_host_waits

    def stalled_s(self) -> dict[Stream, float]:
        return {Stream.CPU: self._streams.worker_waits_s}

    def recorder(self) -> None:
        """Return None: torch's profiler shows when actions run."""

    def free_device_nbytes(self) -> int:
        return min(self.device_budget_nbytes - self._reserved_nbytes, self._ledger.free_nbytes)

    def free_host_nbytes(self) -> int:
        return self.host_budget_nbytes - self._homes.nbytes

    def reserve(self, nbytes: int) -> None:
        with self._ledger.lock:
            free_nbytes = self.free_device_nbytes()
            if nbytes > free_nbytes:
                raise HardwareError(
                    f"{self.name}: {nbytes} device bytes were asked for, {free_nbytes} of {self.device_budget_nbytes} "
                    "are free: let go of another model on this GPU, or name more device memory in hw"
                )
            self._reserved_nbytes += nbytes
            self._ledger.reserved_nbytes += nbytes

    def unreserve(self, nbytes: int) -> None:
        with self._ledger.lock:
            if nbytes > self._reserved_nbytes:
                raise HardwareError(
                    f"{self.name}: {nbytes} device bytes cannot be given back, {self._reserved_nbytes} are reserved"
                )
            self._reserved_nbytes -= nbytes
            self._ledger.reserved_nbytes -= nbytes

    def allocate_arena(self, nbytes: int) -> torch.Tensor:
        """Allocate an arena, which side streams may use from here on."""
        self._arenas = [(alive, size) for alive, size in self._arenas if alive()]
        used_nbytes = sum(size for _, size in self._arenas)
        if used_nbytes + nbytes > self._reserved_nbytes:
            raise HardwareError(
                f"{self.name}: an arena of {nbytes} bytes passes the reservation of {self._reserved_nbytes} bytes, of "
                f"which arenas hold {used_nbytes}: reserve before allocating"
            )
        arena = self._allocate(nbytes)
        if arena.data_ptr() % ALIGNMENT_NBYTES:
            raise HardwareError(f"{self.name}: the allocator gave an arena that is not aligned to {ALIGNMENT_NBYTES}")
        self._num_arenas += 1
        self._arenas.append((outlives(arena.untyped_storage()), nbytes))
        self.freed(arena)
        self._streams.follow()
        return arena

    def _allocate(self, nbytes: int) -> torch.Tensor:
        """Allocate from blocks that are taken anew: the allocator's unused ones go back to the GPU first."""
        self._api.release_cached()
        try:
            return self._api.allocate(nbytes)
        except torch.OutOfMemoryError as error:
            raise HardwareError(
                f"{self.name}: this GPU does not have the {nbytes} bytes of the arena now, {self.memory_text()}: other "
                "processes or tensors of this one have taken memory since chunkc.compile. Free it, or name less device "
                "memory in hw"
            ) from error

    def free_arena(self, arena: torch.Tensor) -> None:
        """Nothing: the memory goes back to the allocator with its last view."""

    def allocate_home(self, nbytes: int, *, is_pinned: bool = True) -> torch.Tensor:
        free_nbytes = self.free_host_nbytes()
        if nbytes > free_nbytes:
            raise HardwareError(
                f"{self.name}: a home of {nbytes} bytes was asked for, {free_nbytes} of {self.host_budget_nbytes} "
                "host bytes are free: let go of another model on this device, or name more host memory in hw"
            )
        return self._homes.allocate(nbytes, is_pinned=is_pinned)

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
        """A kernel for chunks on the device, the host update for those at home."""
        if stream is Stream.CPU:
            return host_update(rule, payload, states, pieces, gradient, target)
        return GpuUpdate(self._chunk_kernels(), self._tables, rule, payload, states, pieces, gradient)

    def make_norm(self, gradient: torch.Tensor, pieces: Sequence[Piece], out: torch.Tensor) -> GpuNorm:
        return GpuNorm(self._chunk_kernels(), self._norm_scratch, gradient, pieces, out)

    def _chunk_kernels(self) -> ChunkKernels:
        if self._kernels is None:
            self._kernels = SharedTiles(self._api.kernels())
        return self._kernels

    def use_cores(self, cores: HostCores) -> None:
        self._homes.cores = cores
        self._streams.launch(Stream.CPU, "use cores", (), cores.take)

    def check_usable(self) -> None:
        self._streams.check_usable()

    def synchronize(self) -> None:
        self._streams.synchronize()

    def call_from_host(self, work: Callable[[], None]) -> None:
        self._streams.call_from_host(work)

    def paced_launch(self, plan: Plan) -> Launch | None:
        """Return None: a GPU is as fast as it is."""
        return None

    def follow_caller(self, work: Callable[[], None]) -> Callable[[], None]:
        """Bind ``work`` to the calling thread's current CUDA stream: threads begin on the default one."""
        return partial(self._api.run, self._api.current_stream(), work)

    def sample_nonmodel(self) -> None:
        """Nothing: the allocator keeps the highest level by itself."""

    def read_nonmodel_nbytes(self) -> int:
        """Highest non-model bytes since `start_reading`; warns once when the allocator has reserved too much."""
        reserved = self._api.allocator_nbytes("reserved", "peak") - self._ledger.base_nbytes
        if reserved > self.device_budget_nbytes and not self._has_warned:
            self._has_warned = True
            _LOGGER.warning(
                "%s: torch's allocator has reserved %d bytes, more than the budget of %d: what is allocated fits, but "
                "in fragments. Set PYTORCH_ALLOC_CONF=expandable_segments:True before Python starts",
                self.name,
                reserved,
                self.device_budget_nbytes,
            )
        return self._reading.peak_nbytes()

    def memory_text(self) -> str:
        kinds = ("requested", "allocated", "reserved")
        requested, allocated, reserved = (self._api.allocator_nbytes(kind, "current") for kind in kinds)
        free, total = self._api.memory_info()
        return (
            f"{requested} bytes requested in blocks of {allocated}, {reserved} reserved by torch, "
            f"{free} of {total} free on the GPU"
        )

    def allocator_peaks(self) -> dict[str, int]:
        return {f"{kind}_peak_nbytes": self._api.allocator_nbytes(kind, "peak") for kind in ("allocated", "reserved")}

    def close(self) -> None:
        self._streams.close()
        self._homes.close()


def _stop(streams: CudaStreams, homes: HostHomes) -> None:
    """Stop a device that is gone: pages go back once nothing copies from or to them."""
    streams.close(_EXIT_TIMEOUT_S)
    homes.close()
