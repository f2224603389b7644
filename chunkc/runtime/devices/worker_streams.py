"""Streams and events of the emulated device.

The caller's thread computes, and one worker thread serves each other stream. Workers know their queue and the shared
`Failures`, never the device, so that an unused device can be collected and its workers stopped.

**Failures.** What ``work`` raises fails its event; whatever waits for that event does not run and fails likewise. The
failure is reported to the host once: by the next launch or `Streams.synchronize`, or by waiting for a failed event.
Work launched after the report that still waits for a failed event is a new mistake and is reported again.
"""

from __future__ import annotations

import logging
import os
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from chunkc._torch_compat.core import profiler_range
from chunkc.errors import ChunkcError
from chunkc.ir.actions import Stream
from chunkc.runtime.devices.latch import Latch
from chunkc.runtime.devices.protocol import Event
from chunkc.runtime.devices.throttle import Pace, Span, Timekeeper

_LOGGER = logging.getLogger("chunkc")


class Failure:
    """An exception on its way to the host, and the number of the report of it, counted from 1 (0: none)."""

    __slots__ = ("error", "telling")

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.telling = 0


class Failures:
    """Failures of a device's workers; ``num_reports`` counts those that the host was given."""

    def __init__(self) -> None:
        self.num_tellings = 0
        self.num_host_waits = 0
        self._lock = threading.Lock()
        self._untold: Failure | None = None

    def record(self, failure: Failure, launched_at: int) -> None:
        """Keep the first failure of work launched after report ``launched_at``, unless reported by then."""
        with self._lock:
            if self._untold is None and (failure.telling == 0 or failure.telling <= launched_at):
                self._untold = failure

    def told(self, failure: Failure) -> None:
        """Note that the host gets ``failure`` now."""
        with self._lock:
            self.num_tellings += 1
            failure.telling = self.num_tellings
            if self._untold is failure:
                self._untold = None

    def raise_untold(self) -> None:
        """Raise the failure that was not reported yet, if any."""
        failure = self._untold
        if failure is not None:
            self.told(failure)
            raise failure.error

    @property
    def untold(self) -> Failure | None:
        return self._untold

    def take_untold(self) -> Failure | None:
        """Take the failure that nobody will be given any more."""
        with self._lock:
            failure, self._untold = self._untold, None
            return failure


class Awaited(Protocol):
    """Something that a worker can wait for."""

    def join(self) -> Failure | None:
        """Block until the event has happened; return how it failed."""


class Completion:
    """Event of one piece of work on ``stream``, if any; ``span`` is there where time is kept."""

    __slots__ = ("_failure", "_failures", "_latch", "span", "stream")

    def __init__(
        self, failures: Failures, is_done: bool = False, span: Span | None = None, stream: Stream | None = None
    ) -> None:
        self.span = span
        self.stream = stream
        self._failures = failures
        self._failure: Failure | None = None
        self._latch = Latch(is_open=is_done)

    def done(self) -> bool:
        return self._latch.is_open

    def wait(self) -> None:
        """Block the host until the work has finished; raises what it raised, each time."""
        if not self._latch.is_open:
            self._failures.num_host_waits += 1
        self.raise_failure()

    def raise_failure(self) -> None:
        """Wait without counting the wait: the compute stream's own."""
        failure = self.join()
        if failure is not None:
            self._failures.told(failure)
            raise failure.error

    def join(self) -> Failure | None:
        """Block until the work has finished; return how it failed."""
        self._latch.wait()
        return self._failure

    def settle(self, failure: Failure | None) -> None:
        """Complete the event; called once, by whoever carried the work out."""
        self._failure = failure
        self._latch.open()


class Delays:
    """Seeded random pauses of one stream: uniform in [0, ``max_delay_ms``], none when that is 0."""

    def __init__(self, max_delay_ms: float, seed: int, stream: Stream) -> None:
        self._max_delay_ms = max_delay_ms
        self._random = random.Random(f"{seed}/{stream}")

    def next_ms(self) -> float:
        """The next delay of the sequence."""
        return self._random.uniform(0, self._max_delay_ms) if self._max_delay_ms > 0 else 0.0

    def pause(self) -> None:
        delay_ms = self.next_ms()
        if delay_ms > 0:
            time.sleep(delay_ms / 1000)


@dataclass(frozen=True, slots=True)
class Item:
    """Work in a queue; ``work`` None only marks how far the queue has come."""

    label: str
    waits: tuple[Awaited, ...]
    work: Callable[[], None] | None
    completion: Completion
    launched_at: int
    span: Span | None = None


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Surroundings of one stream's work: pauses before and after, a context, and the keeping of its time."""

    delays: Delays
    long_work: AbstractContextManager[None]
    timekeeper: Timekeeper

    def attempt(self, label: str, work: Callable[[], None], place: str, span: Span | None) -> Failure | None:
        """Carry ``work`` out, in its time and in a range of torch's profiler; return how it failed."""
        self.delays.pause()
        if span is not None:
            self.timekeeper.begin(span)
        begun_s = time.perf_counter()
        try:
            with self.long_work, profiler_range(label):
                work()
            if span is not None:
                self.timekeeper.end(span, time.perf_counter() - begun_s)
        except BaseException as error:  # whatever it is: the host must get it, and those that wait must not hang
            if span is not None:
                self.timekeeper.settle(span, time.perf_counter() - begun_s)
            error.add_note(place)
            return Failure(error)
        self.delays.pause()
        return None


class Worker:
    """The thread of one stream, which carries out its queue in order until it meets None."""

    def __init__(self, name: str, stream: Stream, failures: Failures, surroundings: Surroundings) -> None:
        self.items: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self.thread = threading.Thread(
            target=_serve,
            args=(self.items, f"stream {stream} of {name}", failures, surroundings),
            name=f"chunkc-{stream}",
            daemon=True,
        )
        self.thread.start()


def _serve(items: queue.SimpleQueue[Item | None], place: str, failures: Failures, surroundings: Surroundings) -> None:
    with torch.no_grad():
        while (item := items.get()) is not None:
            failure = next(filter(None, (event.join() for event in item.waits)), None)
            if failure is None and item.work is not None:
                failure = surroundings.attempt(item.label, item.work, f"in {item.label} on {place}", item.span)
            if failure is not None:
                failures.record(failure, item.launched_at)
            item.completion.settle(failure)
            del item, failure  # an idle worker keeps nothing alive


class Streams:
    """The five streams of one emulated device; the compute stream has one caller at a time.

    ``synchronous``: carry everything out at its launch, on the calling thread. ``long_work`` is entered around work.
    ``stalled_s``: how long the compute stream has waited so far, by the stream whose work it waited for.
    """

    def __init__(
        self,
        name: str,
        *,
        max_delay_ms: float,
        seed: int,
        synchronous: bool,
        long_work: AbstractContextManager[None],
        timekeeper: Timekeeper | None = None,
    ) -> None:
        self.failures = Failures()
        self.num_synchronizes = 0
        self.stalled_s: dict[Stream, float] = {}
        self._name = name
        self._synchronous = synchronous
        self._timekeeper = timekeeper or Timekeeper()
        self._surroundings = {
            stream: Surroundings(Delays(max_delay_ms, seed, stream), long_work, self._timekeeper) for stream in Stream
        }
        self._workers: dict[Stream, Worker] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        self._pid = os.getpid()

    def launch(
        self,
        stream: Stream,
        label: str,
        waits: Sequence[Event],
        work: Callable[[], None],
        pace: Pace | None = None,
    ) -> Completion:
        """Launch work as `Device.launch` says, at ``pace`` if throttled.

        Raises `ChunkcError` for events of no emulated device, too, and in synchronous mode for unfinished ones.
        """
        self.check_usable()
        self.failures.raise_untold()
        completions = tuple(self._own(event, label) for event in waits)
        is_inline = stream is Stream.COMPUTE or self._synchronous
        span = self._timekeeper.launch(stream, label, (c.span for c in completions), pace, is_inline)
        if is_inline:
            return self._run_inline(stream, label, completions, work, span)
        completion = Completion(self.failures, span=span, stream=stream)
        item = Item(label, completions, work, completion, self.failures.num_tellings, span)
        self._worker(stream).items.put(item)
        return completion

    def synchronize(self) -> None:
        """Wait for everything launched, and raise the first failure that was not reported."""
        self.check_usable()
        self.num_synchronizes += 1
        marks = []
        for worker in list(self._workers.values()):
            marks.append(Completion(self.failures))
            worker.items.put(Item("synchronize", (), None, marks[-1], 0))
        for mark in marks:
            mark.join()
        self.failures.raise_untold()

    def call_from_host(self, work: Callable[[], None]) -> None:
        if any(worker.thread is threading.current_thread() for worker in list(self._workers.values())):
            threading.Thread(target=work, name="chunkc-host").start()
        else:
            work()

    def close(self, timeout_s: float | None = None) -> None:
        """Finish what was launched and stop the workers; idempotent, without effect in a forked child."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                for worker in self._workers.values():
                    worker.items.put(None)
        for worker in self._workers.values():
            if worker.thread is not threading.current_thread():
                worker.thread.join(timeout_s)
        failure = self.failures.take_untold()
        if failure is not None:
            _LOGGER.error("%s was closed before this failure was seen", self._name, exc_info=failure.error)

    def _run_inline(
        self,
        stream: Stream,
        label: str,
        waits: tuple[Completion, ...],
        work: Callable[[], None],
        span: Span | None,
    ) -> Completion:
        for event in waits:
            if self._synchronous and not event.done():
                raise ChunkcError(f"{label} on stream {stream} of {self._name} waits for work that has not run")
            self._await(event)
        place = f"in {label} on stream {stream} of {self._name}"
        failure = self._surroundings[stream].attempt(label, work, place, span)
        if failure is not None:
            self.failures.told(failure)
            raise failure.error
        return Completion(self.failures, is_done=True, span=span)

    def _await(self, event: Completion) -> None:
        """Have the compute stream wait for ``event``, and count the time by the stream of ``event``."""
        if event.done() or event.stream is None:
            event.raise_failure()
            return
        begun_s = time.perf_counter()
        try:
            event.raise_failure()
        finally:
            before_s = self.stalled_s.get(event.stream, 0.0)
            self.stalled_s[event.stream] = before_s + time.perf_counter() - begun_s

    def _worker(self, stream: Stream) -> Worker:
        worker = self._workers.get(stream)
        if worker is not None:
            return worker
        with self._lock:
            self.check_usable()
            if stream not in self._workers:
                self._workers[stream] = Worker(self._name, stream, self.failures, self._surroundings[stream])
            return self._workers[stream]

    def _own(self, event: Event, label: str) -> Completion:
        if not isinstance(event, Completion):
            raise ChunkcError(
                f"{label} waits for {event!r}, which is no event of {self._name} or another emulated device"
            )
        return event

    def check_usable(self) -> None:
        if self._is_closed:
            raise ChunkcError(f"{self._name} is closed: compile the model again to go on")
        if os.getpid() != self._pid:
            raise ChunkcError(
                f"{self._name} belongs to process {self._pid}, its workers did not survive the fork into "
                f"{os.getpid()}: use the model in the process that compiled it, or start workers by 'spawn'"
            )
