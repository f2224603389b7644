"""The device protocol of the executor: memory under a budget, streams, events and honest readings.

Two implementations: CUDA, and an emulated device that runs the same plans with real copies, real concurrency and hard
budgets on a machine without an accelerator. The executor knows only this protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from chunkc.ir.actions import Stream
from chunkc.ir.plan import Plan
from chunkc.runtime.devices.cpu_affinity import HostCores
from chunkc.runtime.devices.throttle import Timekeeper
from chunkc.runtime.update.cpu_update import Piece
from chunkc.runtime.update.rules import UpdateRule
from chunkc.runtime.update.update_inputs import StepInputs


class Event(Protocol):
    """Completion of one action. Waiting re-raises what the action raised."""

    def done(self) -> bool:
        """Whether the action has finished, without waiting."""
        ...

    def wait(self) -> None:
        """Block the host until the action has finished."""
        ...


class Update(Protocol):
    """A rule on one chunk, on one stream: called as the ``work`` of a launch there."""

    def update(self, inputs: StepInputs) -> None:
        """Update the active parameters and write param16 of all."""
        ...

    def restore(self) -> None:
        """Write param16 of all parameters from param32, over whatever the payload holds."""
        ...


Norm = Callable[[], None]
"""Measures one chunk: called as the ``work`` of a launch on the compute stream."""

Launch = Callable[[Stream, str, Sequence[Event], Callable[[], None]], Event]
"""`Device.launch`: stream, label, waits, work."""


class Device(Protocol):
    """A computing device with its host memory.

    Attributes:
        name: for messages, for example ``emulated-64m-2g``.
        torch_device: where arena tensors live.
        device_budget_nbytes, host_budget_nbytes: what one process may use, before any reservation.
        overhead_nbytes: what a device of this size cannot give to a model: the memory named is this more,
        leaves_slack: and, where this is true, the slack of its size (`chunkc.hardware.usable_memory`).
        kept_host_nbytes: of the host memory named, what the system and the process keep.
    """

    name: str
    torch_device: torch.device
    device_budget_nbytes: int
    host_budget_nbytes: int
    overhead_nbytes: int
    leaves_slack: bool
    kept_host_nbytes: int

    def free_device_nbytes(self) -> int:
        """Device bytes that no reservation holds."""
        ...

    def free_host_nbytes(self) -> int:
        """Host bytes that no home holds."""
        ...

    def reserve(self, nbytes: int) -> None:
        """Set device bytes aside for arena and non-model data of one model.

        Raises:
            HardwareError: when fewer are free.
        """
        ...

    def unreserve(self, nbytes: int) -> None:
        """Give bytes of ``reserve`` back."""
        ...

    def allocate_arena(self, nbytes: int) -> torch.Tensor:
        """``nbytes`` of device memory as uint8, aligned to 256 bytes; the caller has reserved them."""
        ...

    def free_arena(self, arena: torch.Tensor) -> None:
        """Give memory of ``allocate_arena`` back; no view of it may be used afterwards."""
        ...

    def allocate_home(self, nbytes: int, *, is_pinned: bool = True) -> torch.Tensor:
        """Allocate ``nbytes`` of host memory as uint8.

        The memory is zeroed, aligned, not inherited by forks, and fast to copy from and to. With ``is_pinned`` False
        the system gives the memory as it is filled: ``touch_home`` comes before the first write to a part, and
        ``pin_home`` before the first launch that copies.

        Raises:
            HardwareError: when the host budget does not hold them.
        """
        ...

    def touch_home(self, part: torch.Tensor) -> None:
        """The part of a home is about to be written for the first time: take its pages."""
        ...

    def pin_home(self, home: torch.Tensor) -> None:
        """The home is full, so take what is left of its pages and make copies fast; idempotent.

        Raises:
            HardwareError: when the system refuses; the home keeps what it holds.
        """
        ...

    def free_home(self, home: torch.Tensor) -> None:
        """Give memory of ``allocate_home`` back; no view of it may be used afterwards."""
        ...

    def num_allocations(self) -> int:
        """Arenas and homes allocated so far; a steady state adds none."""
        ...

    def num_host_syncs(self) -> int:
        """Return how often the host has waited for launched work so far.

        Calls of ``synchronize`` and waits of events count.
        """
        ...

    def stalled_s(self) -> Mapping[Stream, float]:
        """Seconds that the compute stream has waited so far, by the stream whose work it waited for.

        Only what the host sees: on CUDA its waits for the worker of updates, but none of the device for copies.
        """
        ...

    def recorder(self) -> Timekeeper | None:
        """Return the recorder of when actions run; None on a device where only torch's profiler can tell."""
        ...

    def make_update(
        self,
        stream: Stream,
        rule: UpdateRule,
        payload: torch.Tensor,
        states: Sequence[torch.Tensor],
        pieces: Sequence[Piece],
        gradient: torch.Tensor | None = None,
    ) -> Update:
        """The update of one chunk on ``stream``: COMPUTE over device memory, CPU over homes.

        Args:
            rule: the formula of an element.
            payload: grad16 before an update unless ``gradient`` is given, param16 after it.
            states: param32 and the rule's states, in float32.
            pieces: the parameters' elements in the chunk; what lies between them is neither read nor written.
            gradient: the gradient chunk where the overlay is not legal; it is only read.

        All tensors are contiguous, have one dimension and the same number of elements.

        Raises:
            ValueError: when a tensor or a piece breaks these rules.
        """
        ...

    def make_norm(self, gradient: torch.Tensor, pieces: Sequence[Piece], out: torch.Tensor) -> Norm:
        """Make the callable that measures the gradients of a chunk on the device.

        Args:
            gradient: device memory, contiguous, one dimension.
            pieces: the elements that are gradients; what lies between them is not read.
            out: float64 [2] in device memory, written: the sum of squares; and 1 where an element is infinite or NaN,
                else 0.
        """
        ...

    def use_cores(self, cores: HostCores) -> None:
        """Run updates on the CPU stream on ``cores`` from here on.

        Homes are touched first by threads on ``cores``. The call comes before the first work on that stream. Other
        threads of the process stay as they are.
        """
        ...

    def launch(self, stream: Stream, label: str, waits: Sequence[Event], work: Callable[[], None]) -> Event:
        """Carry out ``work`` on ``stream`` after ``waits``; work of one stream runs in the order of launching.

        ``work`` may only enqueue onto the device or use host memory that the plan orders. When a wait has failed,
        ``work`` does not run and its event fails with the same exception.
        """
        ...

    def paced_launch(self, plan: Plan) -> Launch | None:
        """Return `launch` for the actions of ``plan`` by their text, or None on a device without throttle."""
        ...

    def memory_text(self) -> str:
        """Return the bytes that stand on the device now, as text for messages."""
        ...

    def check_usable(self) -> None:
        """Raise where nothing can be launched and memory may be gone: on a closed device or in a forked child."""
        ...

    def freed(self, memory: torch.Tensor) -> None:
        """``memory`` (uint8, device) holds nothing now; debug settings fill it with NaN. Called in ``work``."""
        ...

    def synchronize(self) -> None:
        """Wait for everything launched, and re-raise the first exception of any stream."""
        ...

    def enqueue_exchanges(self) -> None:
        """See to it that exchanges launched so far take place without another call from this thread.

        Other ranks wait for them on their devices, whatever this thread does next: it may wait for those ranks.
        """
        ...

    def follow_caller(self, work: Callable[[], None]) -> Callable[[], None]:
        """Wrap ``work`` for another thread: its operators go where those of the calling thread go now."""
        ...

    def call_from_host(self, work: Callable[[], None]) -> None:
        """Call ``work``, which may wait for streams: here, or in a new thread where a stream calls this.

        For finalizers: the garbage collector runs on any thread, and a stream must not wait for itself.
        """
        ...

    def start_reading(self) -> None:
        """From here on the non-model bytes of the calling process are read against this moment's level."""
        ...

    def pause_reading(self) -> None:
        """Exclude what the process takes from here to ``resume_reading`` from non-model data."""
        ...

    def resume_reading(self) -> None:
        """Go on after ``pause_reading``; nothing otherwise."""
        ...

    def sample_nonmodel(self) -> None:
        """Take this moment's level into the reading; nothing where the allocator itself keeps the highest."""
        ...

    def read_nonmodel_nbytes(self) -> int:
        """Highest level of non-model bytes since ``start_reading``."""
        ...

    def allocator_peaks(self) -> Mapping[str, int]:
        """Return the highest bytes that a caching allocator has taken since ``start_reading``.

        The keys are the names of the metrics. The mapping is empty where there is no such allocator.
        """
        ...

    def close(self) -> None:
        """Stop workers; idempotent."""
        ...
