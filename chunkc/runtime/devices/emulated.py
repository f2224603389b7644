"""The emulated device: host memory behind hard byte budgets, with real copies, concurrency and events.

Streams are threads (`worker_streams`), arena and homes are slabs (`host_slab`), non-model bytes are what malloc has
handed out (`malloc_meter`). A reservation is checked against the device budget, an arena against what is reserved, a
home against the host budget, all in the bytes asked for: a plan that says it fits is never refused for rounding.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final

import torch

from chunkc._torch_compat.core import Finalizer
from chunkc.errors import HardwareError
from chunkc.ir.actions import Stream
from chunkc.ir.plan import Plan
from chunkc.runtime.devices.cpu_affinity import HostCores
from chunkc.runtime.devices.debug_settings import DebugSettings
from chunkc.runtime.devices.host_slab import LiveSlabs, discard_pages, keep_freed_pages
from chunkc.runtime.devices.malloc_meter import NonModelMeter
from chunkc.runtime.devices.protocol import Event, Launch, PlannedLaunch, Work, launch_each
from chunkc.runtime.devices.throttle import PaceLaw, Timekeeper
from chunkc.runtime.devices.worker_streams import Streams
from chunkc.runtime.update.cpu_norm import HostNorm
from chunkc.runtime.update.cpu_update import ChunkUpdate, Piece
from chunkc.runtime.update.rules import UpdateRule
from chunkc.runtime.update.second_home import SecondHomeUpdate, host_update

_LOGGER = logging.getLogger("chunkc")
_EXIT_TIMEOUT_S: Final = 5.0


class EmulatedDevice:
    """A device made of host memory and threads; implements `chunkc.runtime.devices.protocol.Device`.

    Closing or collecting it stops its workers; its memory lives on until it is freed or nobody views it.

    Args:
        name: for messages, for example ``emulated-64m-2g``.
        device_budget_nbytes, host_budget_nbytes: hard limits of what `reserve` and `allocate_home` give.
        law: throttles the device: how long the actions of a plan take at least.
    """

    def __init__(
        self,
        name: str,
        device_budget_nbytes: int,
        host_budget_nbytes: int,
        settings: DebugSettings | None = None,
        law: PaceLaw | None = None,
    ) -> None:
        if device_budget_nbytes <= 0 or host_budget_nbytes <= 0:
            raise HardwareError(
                f"{name}: budgets are positive, not {device_budget_nbytes} device and {host_budget_nbytes} host bytes"
            )
        self.name = name
        self.torch_device = torch.device("cpu")
        self.overhead_nbytes = self.kept_host_nbytes = 0
        self.reading_error_nbytes = 2**20  # libraries keep what they took in a first step; objects of the interpreter
        self.leaves_slack = False
        self.device_budget_nbytes = device_budget_nbytes
        self.host_budget_nbytes = host_budget_nbytes
        self.settings = settings if settings is not None else DebugSettings()
        self._num_allocations = 0
        keep_freed_pages(device_budget_nbytes)
        self.meter = NonModelMeter()
        self.timekeeper = Timekeeper(law)
        self._law = law
        self._lock = threading.RLock()
        self._arenas = LiveSlabs("an arena")
        self._homes = LiveSlabs("a home")
        self._reserved_nbytes = 0
        self._orphaned_nbytes = 0  # of arenas that are alive although their reservation was given back
        self._streams = Streams(
            name,
            max_delay_ms=self.settings.max_delay_ms,
            seed=self.settings.seed,
            synchronous=self.settings.synchronous,
            long_work=self.meter.long_work(),
            timekeeper=self.timekeeper,
        )
        self.pause_reading, self.resume_reading = self.meter.pause, self.meter.resume
        self.freed = self.settings.freed
        self._stop = Finalizer(self, self._streams.close, _EXIT_TIMEOUT_S)  # also at exit

    def num_allocations(self) -> int:
        return self._num_allocations

    def num_host_syncs(self) -> int:
        return self._streams.num_synchronizes + self._streams.failures.num_host_waits

    def stalled_s(self) -> dict[Stream, float]:
        return dict(self._streams.stalled_s)

    def recorder(self) -> Timekeeper:
        return self.timekeeper

    def free_device_nbytes(self) -> int:
        """Device bytes that no reservation holds, nor an arena that outlives its own."""
        with self._lock:
            self._settle()
            return self.device_budget_nbytes - self._reserved_nbytes - self._orphaned_nbytes

    def free_host_nbytes(self) -> int:
        with self._lock:
            self._settle()
            return self.host_budget_nbytes - self._homes.nbytes

    def reserve(self, nbytes: int) -> None:
        _check_size(nbytes)
        with self._lock:
            free_nbytes = self.free_device_nbytes()
            if nbytes > free_nbytes:
                raise HardwareError(
                    f"{self.name}: {nbytes} device bytes were asked for, {free_nbytes} of "
                    f"{self.device_budget_nbytes} are free: let go of another model on this device, or name more "
                    "device memory in hw"
                )
            self._reserved_nbytes += nbytes

    def unreserve(self, nbytes: int) -> None:
        """Give bytes of `reserve` back. Those of an arena still alive become free when it goes."""
        _check_size(nbytes)
        with self._lock:
            self._settle()
            if nbytes > self._reserved_nbytes:
                raise HardwareError(
                    f"{self.name}: {nbytes} device bytes cannot be given back, {self._reserved_nbytes} are reserved"
                )
            self._reserved_nbytes -= nbytes
            uncovered_nbytes = self._arenas.nbytes - self._orphaned_nbytes - self._reserved_nbytes
            self._orphaned_nbytes += max(0, uncovered_nbytes)

    def allocate_arena(self, nbytes: int) -> torch.Tensor:
        _check_size(nbytes)
        with self._lock:
            self._settle()
            used_nbytes = self._arenas.nbytes - self._orphaned_nbytes
            if used_nbytes + nbytes > self._reserved_nbytes:
                raise HardwareError(
                    f"{self.name}: an arena of {nbytes} bytes passes the reservation of {self._reserved_nbytes} "
                    f"bytes, of which arenas hold {used_nbytes}: reserve before allocating"
                )
            arena = self._arenas.allocate(nbytes)
            self._num_allocations += 1
        self.freed(arena)
        return arena

    def free_arena(self, arena: torch.Tensor) -> None:
        """Give an arena's memory back to the system now, although views may live; its bytes stay reserved."""
        with self._lock:
            self._arenas.free(arena)

    def allocate_home(self, nbytes: int, *, is_pinned: bool = True) -> torch.Tensor:
        _check_size(nbytes)
        with self._lock:
            free_nbytes = self.free_host_nbytes()
            if nbytes > free_nbytes:
                raise HardwareError(
                    f"{self.name}: a home of {nbytes} bytes was asked for, {free_nbytes} of {self.host_budget_nbytes} "
                    "host bytes are free: let go of another model on this device, or name more host memory in hw"
                )
            home = self._homes.allocate(nbytes)
            self._num_allocations += 1
        return home

    def touch_home(self, part: torch.Tensor) -> None:
        """Nothing: whoever writes first takes the pages."""

    def pin_home(self, home: torch.Tensor) -> None:
        """Nothing: copies are as fast as they get."""

    def discard_home(self, part: torch.Tensor) -> None:
        discard_pages(part)

    def free_home(self, home: torch.Tensor) -> None:
        with self._lock:
            self._homes.free(home)

    def make_update(
        self,
        stream: Stream,
        rule: UpdateRule,
        payload: torch.Tensor,
        states: Sequence[torch.Tensor],
        pieces: Sequence[Piece],
        gradient: torch.Tensor | None = None,
        target: tuple[torch.Tensor, Sequence[torch.Tensor]] | None = None,
    ) -> ChunkUpdate | SecondHomeUpdate:
        """The host update, on either stream: device memory is host memory here."""
        return host_update(rule, payload, states, pieces, gradient, target)

    def make_norm(self, gradient: torch.Tensor, pieces: Sequence[Piece], out: torch.Tensor) -> HostNorm:
        return HostNorm(gradient, pieces, out)

    def use_cores(self, cores: HostCores) -> None:
        if not self.settings.synchronous:  # the caller's thread would take them
            self._streams.launch(Stream.CPU, "use cores", (), cores.take)

    def launch(self, stream: Stream, label: str, waits: Sequence[Event], work: Callable[[], None]) -> Event:
        """Launch. Compute work, and in synchronous mode all work, runs and raises here, on the calling thread."""
        return self._streams.launch(stream, label, waits, work)

    def launch_all(self, launches: Sequence[PlannedLaunch], works: Sequence[Work], events: dict[str, Event]) -> None:
        """Launch works by their plan, as `launch` does."""
        launch_each(self.launch, launches, works, events)

    def check_usable(self) -> None:
        self._streams.check_usable()

    def synchronize(self) -> None:
        self._streams.synchronize()

    def call_from_host(self, work: Callable[[], None]) -> None:
        self._streams.call_from_host(work)

    def paced_launch(self, plan: Plan) -> Launch | None:
        """`launch` for the actions of ``plan`` by their text, each at the pace of the law; None without a law."""
        if self._law is None:
            return None
        paces, streams = self._law.paces(plan), self._streams

        def launch(stream: Stream, label: str, waits: Sequence[Event], work: Callable[[], None]) -> Event:
            return streams.launch(stream, label, waits, work, paces[label])

        return launch

    def allocator_peaks(self) -> dict[str, int]:
        """Return nothing: malloc stands for the caching allocator, and takes no blocks of its own."""
        return {}

    def memory_text(self) -> str:
        return f"{self._arenas.nbytes} bytes in arenas, {self.meter.peak_nbytes or 0} beside them at most so far"

    def enqueue_exchanges(self) -> None:
        """Nothing: every stream is a thread, which goes on by itself."""

    def follow_caller(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return ``work`` itself: every thread computes on the host."""
        return work

    def start_reading(self) -> None:
        """Read non-model bytes against this moment's level from here on; warn where they cannot be read."""
        if not self.meter.available:
            _LOGGER.warning(
                "%s cannot read non-model bytes on this system (needs glibc's malloc): 0 is shown", self.name
            )
        self.meter.start()

    def sample_nonmodel(self) -> None:
        self.meter.sample()

    def read_nonmodel_nbytes(self) -> int:
        self.meter.sample()
        return self.meter.peak_nbytes or 0

    def close(self) -> None:
        self._streams.close()
        self.meter.stop()

    def _settle(self) -> None:
        self._homes.settle()
        self._orphaned_nbytes = max(0, self._orphaned_nbytes - self._arenas.settle())


def _check_size(nbytes: int) -> None:
    if nbytes < 0:
        raise HardwareError(f"a size is at least 0 bytes, not {nbytes}")
