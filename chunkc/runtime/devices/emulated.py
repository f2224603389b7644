"""The emulated device: host memory behind hard byte budgets, with real copies, concurrency and events.

It runs the same plans through the same executor as a GPU, so that everything but speed is proved without one. Streams
are threads (`worker_streams`), arena and homes are slabs (`host_slab`), non-model bytes are what
malloc has handed out (`chunkc.runtime.devices.malloc_meter`).

**Budgets.** A reservation is checked against the device budget, an arena against what is reserved, a home against the
host budget, all in the bytes asked for: a plan that says it fits is never refused for rounding, even on a device of
one MiB. What CUDA's caching allocator would take for the same arenas, in blocks of 512 bytes up to 1 MiB and of 2 MiB
above (CUDACachingAllocator.cpp: kMinBlockSize, kSmallSize, kRoundLarge), is `EmulatedDevice.rounded_arena_nbytes`.

**Throttle.** With a law of paces (`throttle`) the actions of a plan take as long as the law says, in real
time. `EmulatedDevice.timekeeper` can record when every action ran, throttled or not.

**Debug settings** (environment variable ``CHUNKC_EMULATED``, for example ``poison,delay=2,seed=3``): results are equal
to the bit under all of them, or a plan has a race.
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
from chunkc.runtime.devices.live_slabs import LiveSlabs
from chunkc.runtime.devices.malloc_meter import NonModelMeter
from chunkc.runtime.devices.protocol import Event, Launch
from chunkc.runtime.devices.throttle import PaceLaw, Timekeeper
from chunkc.runtime.devices.worker_streams import Streams
from chunkc.runtime.update.cpu_norm import HostNorm
from chunkc.runtime.update.cpu_update import ChunkUpdate, Piece
from chunkc.runtime.update.rules import UpdateRule

_LOGGER = logging.getLogger("chunkc")
_POISON: Final = 0xFF  # in every byte: NaN in fp32, bf16 and fp16
_EXIT_TIMEOUT_S: Final = 5.0


class EmulatedDevice:
    """A device made of host memory and threads; implements `chunkc.runtime.devices.protocol.Device`.

    Closing or collecting it stops its workers; its memory lives on until it is freed or nobody views it. In a forked
    child it refuses to launch. A failure of work is raised as `chunkc.runtime.devices.worker_streams` says.

    Args:
        name: for messages, for example ``emulated-64m-2g``.
        device_budget_nbytes, host_budget_nbytes: hard limits of what `reserve` and `allocate_home` give.
        settings: debug settings; none by default.
        law: throttles the device: how long the actions of a plan take at least.

    Attributes:
        timekeeper: its ``records``, once set to a list, say when every action ran.
        num_arena_allocations, num_home_allocations: calls so far; a steady state adds none.
        meter: the reading of non-model bytes; ``meter.available`` says whether this system has one.
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
        self.leaves_slack = False
        self.device_budget_nbytes = device_budget_nbytes
        self.host_budget_nbytes = host_budget_nbytes
        self.settings = settings if settings is not None else DebugSettings()
        self.num_arena_allocations = 0
        self.num_home_allocations = 0
        self.meter = NonModelMeter()
        self.timekeeper = Timekeeper(law)
        self._law = law
        self._lock = threading.Lock()
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
        self._stop = Finalizer(self, self._streams.close, _EXIT_TIMEOUT_S)  # also at exit

    @property
    def num_synchronizes(self) -> int:
        """Calls of `synchronize` so far."""
        return self._streams.num_synchronizes

    @property
    def num_host_waits(self) -> int:
        """How often ``wait`` of an event blocked the host; waits of the compute stream do not count."""
        return self._streams.failures.num_host_waits

    def num_allocations(self) -> int:
        """Arenas and homes allocated so far."""
        return self.num_arena_allocations + self.num_home_allocations

    def num_host_syncs(self) -> int:
        """Calls of `synchronize`, and waits of events that blocked the host, so far."""
        return self.num_synchronizes + self.num_host_waits

    def stalled_s(self) -> dict[Stream, float]:
        """Seconds that the compute stream has waited so far, by the stream whose work it waited for."""
        return dict(self._streams.stalled_s)

    def recorder(self) -> Timekeeper:
        """Return the timekeeper, which can record when actions run."""
        return self.timekeeper

    def free_device_nbytes(self) -> int:
        """Device bytes that no reservation holds, nor an arena that outlives its own."""
        with self._lock:
            self._settle()
            return self.device_budget_nbytes - self._reserved_nbytes - self._orphaned_nbytes

    def free_host_nbytes(self) -> int:
        """Host bytes that no home holds."""
        with self._lock:
            self._settle()
            return self.host_budget_nbytes - self._homes.nbytes

    def rounded_arena_nbytes(self) -> int:
        """Bytes of the live arenas after the rounding of CUDA's caching allocator; for reports only."""
        with self._lock:
            self._settle()
            return self._arenas.rounded_nbytes

    def reserve(self, nbytes: int) -> None:
        """Set device bytes aside for one model, exactly.

        Raises:
            HardwareError: when fewer are free.
        """
        _check_size(nbytes)
        with self._lock:
            self._settle()
            free_nbytes = self.device_budget_nbytes - self._reserved_nbytes - self._orphaned_nbytes
            if nbytes > free_nbytes:
                raise HardwareError(
                    f"{self.name}: {nbytes} device bytes were asked for, {free_nbytes} of "
                    f"{self.device_budget_nbytes} are free: let go of another model on this device, or name more "
                    "device memory in hw"
                )
            self._reserved_nbytes += nbytes

    def unreserve(self, nbytes: int) -> None:
        """Give bytes of `reserve` back. Those of an arena still alive become free when it goes.

        Raises:
            HardwareError: when fewer are reserved.
        """
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
        """``nbytes`` of device memory as uint8, page-aligned, within what is reserved.

        Raises:
            HardwareError: when less is reserved and not in use by other arenas.
        """
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
            self.num_arena_allocations += 1
        self.freed(arena)
        return arena

    def free_arena(self, arena: torch.Tensor) -> None:
        """Give an arena's memory back to the system now, although views may live; its bytes stay reserved."""
        with self._lock:
            self._arenas.free(arena)

    def allocate_home(self, nbytes: int, *, is_pinned: bool = True) -> torch.Tensor:
        """``nbytes`` of host memory as uint8, zeroed, page-aligned, not inherited by forks.

        Raises:
            HardwareError: when the host budget does not hold them.
        """
        _check_size(nbytes)
        with self._lock:
            self._settle()
            free_nbytes = self.host_budget_nbytes - self._homes.nbytes
            if nbytes > free_nbytes:
                raise HardwareError(
                    f"{self.name}: a home of {nbytes} bytes was asked for, {free_nbytes} of {self.host_budget_nbytes} "
                    "host bytes are free: let go of another model on this device, or name more host memory in hw"
                )
            home = self._homes.allocate(nbytes)
            self.num_home_allocations += 1
        return home

    def touch_home(self, part: torch.Tensor) -> None:
        """Nothing: whoever writes first takes the pages."""

    def pin_home(self, home: torch.Tensor) -> None:
        """Nothing: copies are as fast as they get."""

    def free_home(self, home: torch.Tensor) -> None:
        """Give a home's memory back to the system now; views that live on read zeros and must not be written.

        Raises:
            HardwareError: when ``home`` is not the start of a live home of this device.
        """
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
    ) -> ChunkUpdate:
        """The host update, on either stream: device memory is host memory here."""
        return ChunkUpdate(rule, payload, states, pieces, gradient=gradient)

    def make_norm(self, gradient: torch.Tensor, pieces: Sequence[Piece], out: torch.Tensor) -> HostNorm:
        """The host measures: device memory is host memory here."""
        return HostNorm(gradient, pieces, out)

    def use_cores(self, cores: HostCores) -> None:
        """The worker of updates takes ``cores``; homes are touched first by whoever fills them."""
        if not self.settings.synchronous:  # the caller's thread would take them
            self._streams.launch(Stream.CPU, "use cores", (), cores.take)

    def launch(self, stream: Stream, label: str, waits: Sequence[Event], work: Callable[[], None]) -> Event:
        """Carry out ``work`` on ``stream`` after ``waits``, in the order of launching.

        Compute work runs before this returns, on the calling thread, and raises here; in synchronous mode all work
        does. Elsewhere gradients are not recorded.

        Raises:
            ChunkcError: on a closed device or in a forked child. A failure the host was not told is raised as it is.
        """
        return self._streams.launch(stream, label, waits, work)

    def paced_launch(self, plan: Plan) -> Launch | None:
        """Return `launch` for the actions of ``plan`` by their text, or None without a law.

        Each action takes the time that the law says.
        """
        if self._law is None:
            return None
        paces, streams = self._law.paces(plan), self._streams

        def launch(stream: Stream, label: str, waits: Sequence[Event], work: Callable[[], None]) -> Event:
            return streams.launch(stream, label, waits, work, paces[label])

        return launch

    def allocator_peaks(self) -> dict[str, int]:
        """Nothing: malloc stands for the caching allocator, and takes no blocks of its own."""
        return {}

    def memory_text(self) -> str:
        """Return the bytes that stand on the device now, as text for messages."""
        return f"{self._arenas.nbytes} bytes in arenas, {self.meter.peak_nbytes or 0} beside them at most so far"

    def check_usable(self) -> None:
        """Raise ``ChunkcError`` where nothing can be launched: on a closed device or in a forked child."""
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

    def enqueue_exchanges(self) -> None:
        """Nothing: every stream is a thread, which goes on by itself."""

    def follow_caller(self, work: Callable[[], None]) -> Callable[[], None]:
        """``work`` itself: every thread computes on the host."""
        return work

    def call_from_host(self, work: Callable[[], None]) -> None:
        """Call ``work``, which may wait for streams: here, or in a new thread where a worker calls this."""
        self._streams.call_from_host(work)

    def start_reading(self) -> None:
        """Read non-model bytes against this moment's level from here on; warn where they cannot be read."""
        if not self.meter.available:
            _LOGGER.warning(
                "%s cannot read non-model bytes on this system (needs glibc's malloc): 0 is shown", self.name
            )
        self.meter.start()

    def pause_reading(self) -> None:
        """Exclude what the process takes from here to `resume_reading` from non-model data."""
        self.meter.pause()

    def resume_reading(self) -> None:
        """Go on after `pause_reading`; nothing otherwise."""
        self.meter.resume()

    def sample_nonmodel(self) -> None:
        """Take this moment's level into the reading; a thread does so inside long work."""
        self.meter.sample()

    def read_nonmodel_nbytes(self) -> int:
        """Highest non-model bytes since `start_reading`; 0 where ``meter.available`` is False."""
        self.meter.sample()
        return self.meter.peak_nbytes or 0

    def close(self) -> None:
        """Finish what was launched and stop the workers; idempotent."""
        self._streams.close()
        self.meter.stop()

    def _settle(self) -> None:
        """Enter arenas and homes that were freed or collected into the books."""
        self._homes.settle()
        self._orphaned_nbytes = max(0, self._orphaned_nbytes - self._arenas.settle())


def _check_size(nbytes: int) -> None:
    if nbytes < 0:
        raise HardwareError(f"a size is at least 0 bytes, not {nbytes}")
