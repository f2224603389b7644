"""The CUDA device: memory under a budget, streams, pinned homes, updates by kernels or on the host.

**Memory.** The arena is one block of torch's caching allocator, activations are the user's and torch's own blocks
beside it: one allocator, so that either can use what the other gave back. Its settings are the user's, and chunkc
changes none of them; ``PYTORCH_ALLOC_CONF=expandable_segments:True`` lets it waste least. What can be had is measured
once per process and GPU (`MemoryLedger`), in bytes that the allocator *reserves*, after CUDA's context and the
libraries' workspaces have been made to exist. The budget of a device is the least of that and of what ``hw`` names,
less the context and what the allocator held before, which take their share of a GPU of that size too.

**Who may use what when.** Side streams touch the arena and homes only, both of which live until the device is idle, so
that no block of the allocator is ever in use on a stream that the allocator does not know of: ``record_stream`` is
not needed. Gradients land in the arena on the compute stream. Blocks of the arena are handed from the compute stream to
the side streams once, when it is allocated (`chunkc.runtime.devices.cuda_streams.CudaStreams.follow`).

**Readings** are the allocator's own peaks, exact and without a sample; to read one iteration they are reset when a
forward begins, which ``torch.cuda.max_memory_allocated`` then shows too.
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
from chunkc.runtime.devices.protocol import Event, Launch, Update
from chunkc.runtime.devices.shared_tiles import SharedTiles
from chunkc.runtime.update.cpu_update import ChunkUpdate, Piece
from chunkc.runtime.update.rules import UpdateRule

_LOGGER = logging.getLogger("chunkc")
_POISON: Final = 0xFF  # in every byte: NaN in fp32, bf16 and fp16
_EXIT_TIMEOUT_S: Final = 5.0


class CudaDevice:
    """One GPU, as one ``hw`` names it; implements `chunkc.runtime.devices.protocol.Device`.

    Args:
        name: for messages, for example ``h200-1024g``.
        api: CUDA.
        ledger: of the GPU; devices of one GPU share it.
        named_nbytes: memory of the GPU that ``hw`` names, context included.
        host_budget_nbytes: hard limit of what `allocate_home` gives.
        settings: debug settings; none by default.

    Raises:
        HardwareError: when the context and what was allocated before pass ``named_nbytes``.
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
        self.settings = settings if settings is not None else DebugSettings()
        self.num_arena_allocations = 0
        self._reserved_nbytes = 0
        self._arenas: list[tuple[Callable[[], bool], int]] = []
        self._homes = HostHomes(api.register_host, api.unregister_host)
        self._tables = StepTables(api.upload, api.torch_device)
        self._norm_scratch = NormScratch(api.torch_device)
        self._kernels: ChunkKernels | None = None
        self._has_warned = False
        self._reading = AllocatorReading(api)
        self._streams = CudaStreams(name, api, self.settings)
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
        """The budget is what is left after libraries took theirs since the device was made, as NCCL has.

        Raises:
            HardwareError: when nothing is left.
        """
        self._ledger.count_libraries(self._api)
        self._take_budget()

    def num_allocations(self) -> int:
        """Arenas and homes allocated so far."""
        return self.num_arena_allocations + self._homes.num_allocations

    def num_host_syncs(self) -> int:
        """Calls of `synchronize`, and waits of events that blocked the host, so far."""
        return self._streams.num_synchronizes + self._streams.failures.num_host_waits

    def stalled_s(self) -> dict[Stream, float]:
        """Return the seconds the caller has waited for host updates so far; device waits are not seen."""
        return {Stream.CPU: self._streams.worker_waits_s}

    def recorder(self) -> None:
        """Nothing: torch's profiler shows when actions run."""

    def free_device_nbytes(self) -> int:
        """Bytes of the budget that no model has set aside, here or on another device of the same GPU."""
        return min(self.device_budget_nbytes - self._reserved_nbytes, self._ledger.free_nbytes)

    def free_host_nbytes(self) -> int:
        """Host bytes that no home holds."""
        return self.host_budget_nbytes - self._homes.nbytes

    def reserve(self, nbytes: int) -> None:
        """Set device bytes aside for one model.

        Raises:
            HardwareError: when fewer are free.
        """
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
        """Give bytes of `reserve` back.

        Raises:
            HardwareError: when fewer are reserved.
        """
        with self._ledger.lock:
            if nbytes > self._reserved_nbytes:
                raise HardwareError(
                    f"{self.name}: {nbytes} device bytes cannot be given back, {self._reserved_nbytes} are reserved"
                )
            self._reserved_nbytes -= nbytes
            self._ledger.reserved_nbytes -= nbytes

    def allocate_arena(self, nbytes: int) -> torch.Tensor:
        """``nbytes`` of device memory as uint8, within what is reserved; side streams may use it from here on.

        Raises:
            HardwareError: when less is reserved and not in use by other arenas, or the GPU does not have it.
        """
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
        self.num_arena_allocations += 1
        self._arenas.append((outlives(arena.untyped_storage()), nbytes))
        self.freed(arena)
        self._streams.follow()
        return arena

    def _allocate(self, nbytes: int) -> torch.Tensor:
        """From blocks that the allocator takes anew: what it holds unused goes back to the GPU first."""
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
        """Its memory goes back to the allocator with the last view; the caller has drained the device."""

    def allocate_home(self, nbytes: int, *, is_pinned: bool = True) -> torch.Tensor:
        """``nbytes`` of host memory as uint8, zeroed, page-aligned, not inherited by forks; pinned, here or by
        `pin_home`.

        Raises:
            HardwareError: when the host budget does not hold them, or CUDA does not pin them.
        """
        free_nbytes = self.free_host_nbytes()
        if nbytes > free_nbytes:
            raise HardwareError(
                f"{self.name}: a home of {nbytes} bytes was asked for, {free_nbytes} of {self.host_budget_nbytes} "
                "host bytes are free: let go of another model on this device, or name more host memory in hw"
            )
        return self._homes.allocate(nbytes, is_pinned=is_pinned)

    def touch_home(self, part: torch.Tensor) -> None:
        """Take the pages of a part of a home that is to be written, by threads on the cores of this rank.

        Raises:
            HardwareError: when ``part`` is in no live home of this device.
        """
        self._homes.touch(part)

    def pin_home(self, home: torch.Tensor) -> None:
        """Take the pages of a home that are left, and pin it; idempotent.

        Raises:
            HardwareError: when CUDA does not pin it, which loses nothing; when it is no live home of this device.
        """
        self._homes.pin(home)

    def free_home(self, home: torch.Tensor) -> None:
        """Give a home's memory back to the system now; views that live on read zeros and must not be written.

        Raises:
            HardwareError: when ``home`` is not the start of a live home of this device.
        """
        self._homes.free(home)

    def make_update(
        self,
        stream: Stream,
        rule: UpdateRule,
        payload: torch.Tensor,
        states: Sequence[torch.Tensor],
        pieces: Sequence[Piece],
        gradient: torch.Tensor | None = None,
    ) -> Update:
        """A kernel for chunks on the device, the host update for those at home."""
        if stream is Stream.CPU:
            return ChunkUpdate(rule, payload, states, pieces, gradient=gradient)
        return GpuUpdate(self._chunk_kernels(), self._tables, rule, payload, states, pieces, gradient)

    def make_norm(self, gradient: torch.Tensor, pieces: Sequence[Piece], out: torch.Tensor) -> GpuNorm:
        """Kernels on the compute stream."""
        return GpuNorm(self._chunk_kernels(), self._norm_scratch, gradient, pieces, out)

    def _chunk_kernels(self) -> ChunkKernels:
        if self._kernels is None:
            self._kernels = SharedTiles(self._api.kernels())
        return self._kernels

    def use_cores(self, cores: HostCores) -> None:
        """Run updates of the worker on ``cores``.

        Homes that are allocated from here on are touched first on ``cores``.
        """
        self._homes.cores = cores
        self._streams.launch(Stream.CPU, "use cores", (), cores.take)

    def launch(self, stream: Stream, label: str, waits: Sequence[Event], work: Callable[[], None]) -> Event:
        """Carry out ``work`` on ``stream`` after ``waits``; see `chunkc.runtime.devices.cuda_streams`.

        Work of CUDA streams is enqueued before this returns, and raises here what torch raises meanwhile.

        Raises:
            ChunkcError: on a closed device or in a forked child. A failure the host was not told is raised as it is.
        """
        return self._streams.launch(stream, label, waits, work)

    def paced_launch(self, plan: Plan) -> Launch | None:
        """None: a GPU is as fast as it is."""
        return None

    def check_usable(self) -> None:
        """Raise where nothing can be launched.

        Raises:
            ChunkcError: on a closed device or in a forked child.
        """
        self._streams.check_usable()

    def freed(self, memory: torch.Tensor) -> None:
        """Note that ``memory`` holds nothing from here on.

        Where the settings ask for poison, ``memory`` is filled with NaN in every floating dtype.
        """
        if self.settings.poison:
            memory.fill_(_POISON)

    def synchronize(self) -> None:
        """Wait for everything launched, and re-raise the first exception that the host was not told."""
        self._streams.synchronize()

    def follow_caller(self, work: Callable[[], None]) -> Callable[[], None]:
        """``work`` on the CUDA stream that is the calling thread's now: threads begin on the default stream."""
        return partial(self._api.run, self._api.current_stream(), work)

    def call_from_host(self, work: Callable[[], None]) -> None:
        """Call ``work``, which may wait for streams: here, or in a new thread where the worker calls this."""
        self._streams.call_from_host(work)

    def start_reading(self) -> None:
        """From here on non-model bytes are read against this moment's level; resets the allocator's peaks."""
        self._reading.start()

    def pause_reading(self) -> None:
        """Exclude what the process takes from here to `resume_reading` from non-model data."""
        self._reading.pause()

    def resume_reading(self) -> None:
        """Go on after `pause_reading`; nothing otherwise."""
        self._reading.resume()

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
        """Return the bytes that stand in the allocator and on the GPU now, as text for messages."""
        kinds = ("requested", "allocated", "reserved")
        requested, allocated, reserved = (self._api.allocator_nbytes(kind, "current") for kind in kinds)
        free, total = self._api.memory_info()
        return (
            f"{requested} bytes requested in blocks of {allocated}, {reserved} reserved by torch, "
            f"{free} of {total} free on the GPU"
        )

    def allocator_peaks(self) -> dict[str, int]:
        """Return peak bytes of torch's allocator since the last reading began.

        They are bytes of blocks, of the whole process.
        """
        return {f"{kind}_peak_nbytes": self._api.allocator_nbytes(kind, "peak") for kind in ("allocated", "reserved")}

    def enqueue_exchanges(self) -> None:
        """Launch what is held back of them, once the updates on the host have come so far."""
        self._streams.enqueue_exchanges()

    def close(self) -> None:
        """Finish what was launched, stop the worker and free all homes; idempotent."""
        self._streams.close()
        self._homes.close()


def _stop(streams: CudaStreams, homes: HostHomes) -> None:
    """A device is gone, or the process ends: pages go back once nothing copies from or to them."""
    streams.close(_EXIT_TIMEOUT_S)
    homes.close()
