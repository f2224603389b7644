"""The device protocol of the executor: memory under a budget, streams, events and honest readings.

CUDA implements it, and an emulated device with real copies, real concurrency and hard budgets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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

    def done(self) -> bool: ...

    def wait(self) -> None:
        """Block the host until the action has finished."""


class Update(Protocol):
    """A rule on one chunk, on one stream: called as the ``work`` of a launch there."""

    def update(self, inputs: StepInputs) -> None:
        """Update the active parameters and write param16 of all."""
        ...

    def restore(self) -> None:
        """Write param16 of all parameters from param32, over whatever the payload holds."""
        ...


Norm = Callable[[], None]
"""Measures one chunk: called as the ``work`` of a launch; all of one job on the same stream."""

Work = Callable[[], None]

Launch = Callable[[Stream, str, Sequence[Event], Work], Event]
"""`Device.launch`: stream, label, waits, work."""


@dataclass(frozen=True, slots=True)
class PlannedLaunch:
    """A launch that is known before it happens.

    ``waits``: labels of the launches that its work waits for; ``is_segment``: whether it launches a segment's kernels.
    """

    label: str
    text: str
    stream: Stream
    waits: tuple[str, ...]
    is_segment: bool = False


def launch_each(
    launch: Launch, launches: Sequence[PlannedLaunch], works: Sequence[Work], events: dict[str, Event]
) -> None:
    """`Device.launch_all` by one call of ``launch`` for each of ``launches``."""
    for planned, work in zip(launches, works, strict=True):
        waits = [events[label] for label in planned.waits if label in events]
        events.pop(planned.label, None)
        events[planned.label] = launch(planned.stream, planned.text, waits, work)


class Device(Protocol):
    """A computing device with its host memory.

    Attributes:
        device_budget_nbytes, host_budget_nbytes: what one process may use, before any reservation.
        overhead_nbytes: what a device of this size cannot give to a model: the memory named is this more,
        leaves_slack: and, where this is true, the slack of its size (`chunkc.hardware.usable_memory`).
        kept_host_nbytes: of the host memory named, what the system and the process keep.
        reading_error_nbytes: of others that a reading of non-model bytes may have taken in.
    """

    name: str
    torch_device: torch.device
    device_budget_nbytes: int
    host_budget_nbytes: int
    overhead_nbytes: int
    leaves_slack: bool
    kept_host_nbytes: int
    reading_error_nbytes: int

    def free_device_nbytes(self) -> int: ...

    def free_host_nbytes(self) -> int: ...

    def reserve(self, nbytes: int) -> None:
        """Set device bytes aside for one model; raises `HardwareError` when fewer are free."""

    def unreserve(self, nbytes: int) -> None: ...

    def allocate_arena(self, nbytes: int) -> torch.Tensor:
        """Allocate uint8 device memory, aligned to 256 bytes; raises `HardwareError` beyond what is reserved."""

    def free_arena(self, arena: torch.Tensor) -> None:
        """Give an arena back; no view of it may be used afterwards."""

    def allocate_home(self, nbytes: int, *, is_pinned: bool = True) -> torch.Tensor:
        """Allocate zeroed, page-aligned uint8 host memory, which forks do not inherit, within the host budget.

        With ``is_pinned`` False its pages come as it is filled: ``touch_home`` before the first write to a part,
        ``pin_home`` before the first launch that copies. Raises `HardwareError` beyond the budget.
        """

    def touch_home(self, part: torch.Tensor) -> None:
        """Take the pages of a part of a home, before its first write."""

    def pin_home(self, home: torch.Tensor) -> None:
        """Take the pages that are left of a full home and pin it; idempotent; may raise `HardwareError`."""

    def discard_home(self, part: torch.Tensor) -> None:
        """Give the pages of a part of a home back, which is pinned no more; the whole is to be freed soon."""

    def free_home(self, home: torch.Tensor) -> None:
        """Give a home back now; views read zeros and must not be written."""

    def num_allocations(self) -> int:
        """Arenas and homes allocated so far; a steady state adds none."""

    def num_host_syncs(self) -> int:
        """Calls of ``synchronize``, and waits of events that blocked the host, so far."""

    def stalled_s(self) -> Mapping[Stream, float]:
        """Seconds that the host saw the compute stream wait so far, by the stream that it waited for."""

    def recorder(self) -> Timekeeper | None:
        """The recorder of when actions run; None on a device where only torch's profiler can tell."""

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
        """The update of one chunk on ``stream``: COMPUTE over device memory, CPU over homes.

        Args:
            rule: the formula of an element.
            payload: grad16 before an update unless ``gradient`` is given, param16 after it.
            states: param32 and the rule's lists, in their dtypes (`chunkc.ir.state_spec`).
            pieces: the parameters' elements in the chunk; what lies between them is neither read nor written.
            gradient: the gradient chunk where the overlay is not legal; it is only read.
            target: payload and states of a second home, on CPU alone: the update is a `SecondHomeUpdate`, which writes
                there and leaves ``payload`` and ``states`` as they are.

        All tensors are contiguous, have one dimension and the same number of elements, scales one for each block.

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
        """Run updates on the CPU stream, and touch homes first, on ``cores``; called before other work there."""

    def launch(self, stream: Stream, label: str, waits: Sequence[Event], work: Callable[[], None]) -> Event:
        """Carry out ``work`` on ``stream`` after ``waits``; work of one stream runs in the order of launching.

        ``work`` may only enqueue onto the device or use host memory that the plan orders. After a failed wait it does
        not run and its event fails alike. Raises an unreported failure, and `ChunkcError` as ``check_usable``.
        """

    def launch_all(self, launches: Sequence[PlannedLaunch], works: Sequence[Work], events: dict[str, Event]) -> None:
        """Launch each of ``works`` in turn as ``launch`` does, and keep its event in ``events`` by its label.

        Waits for labels without an event are none. An event that a new one replaces may be used again where nobody else
        holds it. What raises has no event.
        """

    def paced_launch(self, plan: Plan) -> Launch | None:
        """`launch` for the actions of ``plan`` by their text, or None on a device without throttle."""

    def memory_text(self) -> str:
        """The bytes that stand on the device now, as text for messages."""

    def check_usable(self) -> None:
        """Raise `ChunkcError` where nothing can be launched: on a closed device or in a forked child."""

    def freed(self, memory: torch.Tensor | torch.UntypedStorage) -> None:
        """Note that device memory, bytes or a storage, holds nothing now; called in ``work``.

        Debug settings fill it.
        """

    def synchronize(self) -> None:
        """Wait for everything launched, and raise the first exception that was not reported."""

    def enqueue_exchanges(self) -> None:
        """Let exchanges launched so far take place without another call: other ranks wait for them."""

    def follow_caller(self, work: Callable[[], None]) -> Callable[[], None]:
        """Wrap ``work`` for another thread: its operators go where those of the calling thread go now."""

    def call_from_host(self, work: Callable[[], None]) -> None:
        """Call ``work``, which may wait for streams: in a new thread where a stream calls this (finalizers)."""

    def start_reading(self) -> None:
        """Read the non-model bytes of the process against this moment's level from here on."""

    def pause_reading(self) -> None:
        """Exclude what the process takes from here to ``resume_reading`` from non-model data."""

    def resume_reading(self) -> None: ...

    def sample_nonmodel(self) -> None:
        """Take this moment's level into the reading."""

    def read_nonmodel_nbytes(self) -> int: ...

    def allocator_peaks(self) -> Mapping[str, int]:
        """Highest bytes of a caching allocator's blocks since ``start_reading``, by metric; empty without one."""

    def close(self) -> None:
        """Finish what was launched, stop workers and free homes; idempotent."""
