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
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NoReturn, Protocol

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

    __slots__ = ("error", "report")

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.report = 0


class Failures:
    """Failures of a device's workers; ``num_reports`` counts those that the host was given."""

    def __init__(self) -> None:
        self.num_reports = 0
        self.num_host_waits = 0
        self.unreported: Failure | None = None
        self._lock = threading.Lock()

    def record(self, failure: Failure, reports_at_launch: int) -> None:
        """Keep the first failure of work launched after report ``reports_at_launch``, unless reported by then."""
        with self._lock:
            if self.unreported is None and (failure.report == 0 or failure.report <= reports_at_launch):
                self.unreported = failure

    def report(self, failure: Failure) -> NoReturn:
        """Raise ``failure``, which the host gets now."""
        with self._lock:
            self.num_reports += 1
            failure.report = self.num_reports
            if self.unreported is failure:
                self.unreported = None
        raise failure.error

    def raise_unreported(self) -> None:
        """Raise the failure that was not reported yet, if any."""
        failure = self.unreported
        if failure is not None:
            self.report(failure)

    def take_unreported(self) -> Failure | None:
        """Take the failure that nobody will be given any more."""
        with self._lock:
            failure, self.unreported = self.unreported, None
            return failure


class Awaited(Protocol):
    def join(self) -> Failure | None:
        """Block until the event has happened; return how it failed."""


class Completion:
    """Event of one piece of work on ``stream``, if any; ``span`` is there where time is kept."""

    __slots__ = ("_failure", "_latch", "failures", "span", "stream")

    def __init__(
        self, failures: Failures, is_done: bool = False, span: Span | None = None, stream: Stream | None = None
    ) -> None:
        self.span = span
        self.stream = stream
        self.failures = failures
        self._failure: Failure | None = None
        self._latch = Latch(is_open=is_done)

    def done(self) -> bool:
        return self._latch.is_open

    def has_succeeded(self) -> bool:
        return self.done() and self._failure is None

    def wait(self) -> None:
        """Block the host until the work has finished; raises what it raised, each time."""
        if not self._latch.is_open:
            self.failures.num_host_waits += 1
        self.raise_failure()

    def raise_failure(self) -> None:
        """Wait without counting the wait: the compute stream's own."""
        failure = self.join()
        if failure is not None:
            self.failures.report(failure)

    def join(self) -> Failure | None:
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
        return self._random.uniform(0, self._max_delay_ms) if self._max_delay_ms > 0 else 0.0

    def pause(self) -> None:
        delay_ms = self.next_ms()
        if delay_ms > 0:
            time.sleep(delay_ms / 1000)


@dataclass(frozen=True, slots=True)
class QueuedWork:
    """Work in a queue; ``work`` None only marks how far the queue has come."""

    label: str
    waits: tuple[Awaited, ...]
    work: Callable[[], None] | None
    completion: Completion
    reports_at_launch: int


@dataclass(frozen=True, slots=True)
class WorkRunner:
    """Runs the work of one stream: pauses before and after, a context, and the keeping of its time."""

    delays: Delays
    long_work: AbstractContextManager[None]
    timekeeper: Timekeeper

    def attempt(self, label: str, work: Callable[[], None], location: str, span: Span | None) -> Failure | None:
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
            error.add_note(location)
            return Failure(error)
        self.delays.pause()
        return None


@dataclass(frozen=True, slots=True)
class _Worker:
    """The thread of one stream, which carries out its queue in order until it meets None."""

    items: queue.SimpleQueue[QueuedWork | None]
    thread: threading.Thread


class Workers:
    """Worker threads of one device, each started at the first work of its stream."""

    def __init__(self, name: str, lost_in_fork: str, runners: Mapping[Stream, WorkRunner]) -> None:
        self.failures = Failures()
        self._name, self._lost_in_fork, self._runners = name, lost_in_fork, runners
        self._workers: dict[Stream, _Worker] = {}
        self._lock = threading.RLock()  # a finalizer may close the device anywhere
        self._is_closed = False
        self._pid = os.getpid()

    def check_usable(self) -> None:
        """Raise after `close` and in a forked child."""
        if self._is_closed:
            raise ChunkcError(f"{self._name} is closed: compile the model again to go on")
        if os.getpid() != self._pid:
            raise ChunkcError(
                f"{self._name} belongs to process {self._pid}, {self._lost_in_fork} survive the fork into "
                f"{os.getpid()}: use the model in the process that compiled it, or start workers by 'spawn'"
            )

    def put(
        self, stream: Stream, label: str, waits: tuple[Awaited, ...], work: Callable[[], None], completion: Completion
    ) -> None:
        self._worker(stream).items.put(QueuedWork(label, waits, work, completion, self.failures.num_reports))

    def join(self) -> None:
        """Wait until all workers have carried out what they were given."""
        marks = []
        for worker in list(self._workers.values()):
            marks.append(Completion(self.failures))
            worker.items.put(QueuedWork("synchronize", (), None, marks[-1], 0))
        for mark in marks:
            mark.join()

    def call_from_host(self, work: Callable[[], None]) -> None:
        """Call ``work``; in a thread of its own where a worker calls this, which would wait for itself."""
        if any(worker.thread is threading.current_thread() for worker in list(self._workers.values())):
            threading.Thread(target=work, name="chunkc-host").start()
        else:
            work()

    def close(self, timeout_s: float | None = None) -> bool:
        """Finish what was launched and stop the threads; return whether they were open in this process."""
        if os.getpid() != self._pid:
            return False
        with self._lock:
            was_open, self._is_closed = not self._is_closed, True
        for worker in self._workers.values():
            if was_open:
                worker.items.put(None)
        for worker in self._workers.values():
            if worker.thread is not threading.current_thread():
                worker.thread.join(timeout_s)
        failure = self.failures.take_unreported()
        if failure is not None:
            _LOGGER.error("%s was closed before this failure was seen", self._name, exc_info=failure.error)
        return was_open

    def _worker(self, stream: Stream) -> _Worker:
        worker = self._workers.get(stream)
        if worker is not None:
            return worker
        with self._lock:
            self.check_usable()
            if stream not in self._workers:
                items: queue.SimpleQueue[QueuedWork | None] = queue.SimpleQueue()
                args = (items, f"stream {stream} of {self._name}", self.failures, self._runners[stream])
                thread = threading.Thread(target=_serve, args=args, name=f"chunkc-{stream}", daemon=True)
                thread.start()
                self._workers[stream] = _Worker(items, thread)
            return self._workers[stream]


def _serve(items: queue.SimpleQueue[QueuedWork | None], location: str, failures: Failures, runner: WorkRunner) -> None:
    with torch.no_grad():
        while (item := items.get()) is not None:
            failure = next(filter(None, (event.join() for event in item.waits)), None)
            if failure is None and item.work is not None:
                failure = runner.attempt(item.label, item.work, f"in {item.label} on {location}", item.completion.span)
            if failure is not None:
                failures.record(failure, item.reports_at_launch)
            item.completion.settle(failure)
            del item, failure  # an idle worker keeps nothing alive


class Streams:
    """The five streams of one emulated device; the compute stream has one caller at a time.

    ``synchronous``: carry everything out at its launch, on the calling thread. ``stalled_s``: how long the compute
    stream has waited so far, by the stream whose work it waited for.
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
        self.num_synchronizes = 0
        self.stalled_s: dict[Stream, float] = {}
        self._name = name
        self._synchronous = synchronous
        self._timekeeper = timekeeper or Timekeeper()
        self._runners = {
            stream: WorkRunner(Delays(max_delay_ms, seed, stream), long_work, self._timekeeper) for stream in Stream
        }
        self._workers = Workers(name, "its workers did not", self._runners)
        self.failures = self._workers.failures
        self.check_usable = self._workers.check_usable
        self.call_from_host = self._workers.call_from_host
        self.close = self._workers.close

    def launch(
        self,
        stream: Stream,
        label: str,
        waits: Sequence[Event],
        work: Callable[[], None],
        pace: Pace | None = None,
    ) -> Completion:
        """Launch work as `Device.launch` says, at ``pace`` if throttled; waits are events of emulated devices."""
        self.check_usable()
        self.failures.raise_unreported()
        completions = tuple(self._checked(event, label) for event in waits)
        is_inline = stream is Stream.COMPUTE or self._synchronous
        span = self._timekeeper.launch(stream, label, (c.span for c in completions), pace, is_inline)
        if is_inline:
            return self._run_inline(stream, label, completions, work, span)
        completion = Completion(self.failures, span=span, stream=stream)
        self._workers.put(stream, label, completions, work, completion)
        return completion

    def synchronize(self) -> None:
        """Wait for everything launched, and raise the first failure that was not reported."""
        self.check_usable()
        self.num_synchronizes += 1
        self._workers.join()
        self.failures.raise_unreported()

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
        location = f"in {label} on stream {stream} of {self._name}"
        failure = self._runners[stream].attempt(label, work, location, span)
        if failure is not None:
            self.failures.report(failure)
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

    def _checked(self, event: Event, label: str) -> Completion:
        if not isinstance(event, Completion):
            raise ChunkcError(
                f"{label} waits for {event!r}, which is no event of {self._name} or another emulated device"
            )
        return event
