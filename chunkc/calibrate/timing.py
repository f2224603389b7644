"""Timing of activities by the host's clock, alone and while others run, by `launch` and `wait`.

A *batch* is several pieces launched back to back, timed from the first launch to the end of the last piece. Of several
short batches the fastest counts, since other programs only make batches longer. Activities in the background are each
kept going by a thread from before the first batch until after the last.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

from chunkc.calibrate.activities import Activity, nothing
from chunkc.ir.actions import Stream
from chunkc.runtime.devices.protocol import Device, Event, PlannedLaunch

_QUEUED: Final = 2  # pieces that a background launches ahead
_MAX_PIECES: Final = 256
_EMPTY_PIECES: Final = 64
_SWITCH_S: Final = 1e-4


@dataclass(frozen=True, slots=True)
class Length:
    """How long an activity is timed: batches of equal pieces."""

    num_pieces: int
    num_batches: int


@dataclass(frozen=True, slots=True)
class Timer:
    """Times activities on a device, in microseconds of one piece in the fastest batch.

    Attributes:
        batch_ms: wanted length of a batch; one piece may be longer.
        num_batches: batches of which the fastest counts; fewer of pieces that are longer than a batch should be.
        clock_ns: a clock in nanoseconds; tests give one of their own.
    """

    device: Device
    batch_ms: float
    num_batches: int
    clock_ns: Callable[[], int] = time.perf_counter_ns

    def length(self, activity: Activity) -> Length:
        """The length at which to time ``activity``; its first piece only warms up."""
        self._batch_us(activity, 1)
        piece_us = max(min(self._batch_us(activity, 1) for _ in range(3)), 1e-3)
        num_pieces = max(1, min(_MAX_PIECES, round(self.batch_ms * 1e3 / piece_us)))
        wanted_us = self.num_batches * self.batch_ms * 1e3
        num_batches = max(min(self.num_batches, 2), min(self.num_batches, round(wanted_us / (num_pieces * piece_us))))
        return Length(num_pieces, num_batches)

    def time_us(self, activity: Activity, length: Length) -> float:
        """Time of a piece when nothing else runs on the device."""
        return min(self._batch_us(activity, length.num_pieces) for _ in range(length.num_batches))

    def time_under_us(self, activity: Activity, others: Sequence[Activity], length: Length) -> float:
        """Time of a piece while ``others`` run, which are on other streams.

        Meanwhile threads hand Python's lock on within `_SWITCH_S`: the default of 5 ms is longer than most pieces take.
        """
        with ExitStack() as backgrounds:
            backgrounds.callback(sys.setswitchinterval, sys.getswitchinterval())
            sys.setswitchinterval(_SWITCH_S)
            for other in others:
                backgrounds.enter_context(background(self.device, other))
            return self.time_us(activity, length)

    def launch_us(self, stream: Stream) -> float:
        """Host time of one launch on ``stream`` among those of a program, without the end of the work."""
        return min(self._launches_us(stream) for _ in range(self.num_batches))

    def handoff_us(self) -> float:
        """Time of empty work that waits for empty work on the other copy stream: a chain to and fro."""
        return min(self._chain_us() for _ in range(self.num_batches))

    def _batch_us(self, activity: Activity, num_pieces: int) -> float:
        start_ns = self.clock_ns()
        for index in range(num_pieces):
            last = activity.launch(self.device, index)
        last.wait()
        return (self.clock_ns() - start_ns) / 1e3 / num_pieces

    def _launches_us(self, stream: Stream) -> float:
        launches = [PlannedLaunch(str(number), "nothing", stream, ()) for number in range(_EMPTY_PIECES)]
        works, events = nothing(stream).works * _EMPTY_PIECES, dict[str, Event]()
        start_ns = self.clock_ns()
        self.device.launch_all(launches, works, events)
        nanoseconds = self.clock_ns() - start_ns
        events[launches[-1].label].wait()
        return nanoseconds / 1e3 / _EMPTY_PIECES

    def _chain_us(self) -> float:
        works = {stream: nothing(stream) for stream in (Stream.H2D, Stream.D2H)}
        waits: tuple[Event, ...] = ()
        start_ns = self.clock_ns()
        for index in range(_EMPTY_PIECES):
            stream = Stream.D2H if index % 2 else Stream.H2D
            waits = (self.device.launch(stream, "nothing", waits, works[stream].works[0]),)
        waits[0].wait()
        return (self.clock_ns() - start_ns) / 1e3 / _EMPTY_PIECES


@contextmanager
def background(device: Device, activity: Activity) -> Iterator[None]:
    """Keep ``activity`` running inside a ``with`` block, entered once its first piece has finished.

    The error of a piece is raised when the block is left, unless the block itself raised.
    """
    has_begun, is_over, errors = threading.Event(), threading.Event(), list[BaseException]()

    def run() -> None:
        queued: deque[Event] = deque()
        try:
            activity.launch(device, 0).wait()
            has_begun.set()
            for index in itertools.takewhile(lambda _: not is_over.is_set(), itertools.count(1)):
                queued.append(activity.launch(device, index))
                if len(queued) > _QUEUED:
                    queued.popleft().wait()
            for event in queued:
                event.wait()
        except BaseException as error:  # the thread that times must get it, whatever it is
            errors.append(error)
        finally:
            has_begun.set()

    thread = threading.Thread(target=run, name=f"chunkc-calibrate-{activity.stream}", daemon=True)
    thread.start()
    has_begun.wait()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    if errors:
        raise errors[0]
