"""Streams of the CUDA device: everything is launched from the caller's thread, nothing makes that thread wait.

    stream    carried by
    compute   the CUDA stream that is current when the caller launches: kernels of the model see theirs as always
    h2d, d2h, comm   a CUDA stream each, which does not synchronise with the default stream
    cpu       one worker thread, in the order of launching

**What makes one piece of work happen before another.** Work of one stream runs in the order of launching. Between
streams, for a wait of ``b`` for ``a``:

    a on        b on      means                                              mechanism
    CUDA        CUDA      run reads a fetched slot; evict copies what a run  an event recorded behind ``a``, for which
                          or a stash wrote; fetch fills a slot that a run    the stream of ``b`` waits before ``b`` is
                          or an evict has freed                              enqueued
    CUDA        cpu       update reads the gradient that an evict brought    the worker sleeps on that event, whose
                          home; update overwrites a home that a fetch has    completion makes device writes to host
                          read                                               memory visible to the host
    cpu         CUDA      fetch reads the home that an update wrote          the stream waits for a *counter*, below
    cpu         cpu       updates share scratch and threads                  one worker
    caller      any       values that the user writes; tables of a step      blocking copies have finished; the others
                                                                             are on the compute stream already
    any         caller    reading a parameter                                ``synchronize``

Where the current stream changes between two launches on compute, the new one first waits for what the old one had.

**The counter.** The worker numbers its work and writes the number of each that has ended, also by an exception, into a
word of pinned memory; a stream that depends on work ``n`` waits until the word has reached ``n``
(``cuStreamWaitValue32``). So a fetch can be enqueued behind an update that has not begun, and a run behind that
fetch, while the host goes on. CUDA does not see this order, so the same stream also waits for the events on which
that work and all before it depend, as the driver's manual asks for. It cannot deadlock: whatever a piece of work
waits for was launched before it, so queues that share hardware are in an order that can be carried out. The cost is
a write to host memory for each update and a poll of it by the device's front end. Where the driver has no such wait
(it returns an error), the caller waits for the worker instead, which counts as a host wait.

**Failures** of the worker are told as `chunkc.runtime.streams` says. What waits for failed work on a CUDA stream does
run, over parameters as they were: the counter opens, so that nothing hangs, and the next launch or ``synchronize``
raises. Worker items that wait for an event fail in the meantime. Errors of CUDA itself raise where torch meets them.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from itertools import count
from typing import Any

from chunkc._torch_compat import profiler_range
from chunkc.errors import ChunkcError
from chunkc.ir.actions import Stream
from chunkc.runtime.cuda_api import Counter, CudaApi
from chunkc.runtime.debug_settings import DebugSettings
from chunkc.runtime.device import Event
from chunkc.runtime.streams import Completion, Delays, Failure, Failures, Item, Worker

_LOGGER = logging.getLogger("chunkc")
_SIDE_STREAMS = (Stream.H2D, Stream.D2H, Stream.COMM)


class CudaEvent:
    """Completion of work on a CUDA stream.

    Attributes:
        handle: the API's event.
        key: of the stream; ``number`` counts events of all streams, so that the later of two on one stream has more.
    """

    __slots__ = ("_api", "failures", "handle", "key", "number")

    def __init__(self, api: CudaApi, failures: Failures, handle: Any, key: int, number: int) -> None:
        self._api = api
        self.failures = failures
        self.handle = handle
        self.key = key
        self.number = number

    def done(self) -> bool:
        """Whether the work has finished, without waiting."""
        return self._api.is_done(self.handle)

    def wait(self) -> None:
        """Block the host until the work has finished; raises a failure that the host was not told."""
        if not self.done():
            self.failures.num_host_waits += 1
        self._api.wait_on_host(self.handle)
        self.failures.raise_untold()

    def join(self) -> Failure | None:
        """Block a worker until the work has finished; a failure there has been before it, or CUDA's."""
        try:
            self._api.wait_on_host(self.handle)
        except RuntimeError as error:
            return Failure(error)
        return self.failures.untold


class HostCompletion(Completion):
    """Event of one piece of the worker's work, for which streams can wait too.

    Attributes:
        number: the counter's when it has ended.
        behind: CUDA events before which it cannot end.
    """

    __slots__ = ("_counter", "behind", "failures", "number")

    def __init__(self, failures: Failures, counter: Counter, number: int, behind: tuple[CudaEvent, ...]) -> None:
        super().__init__(failures)
        self.failures = failures
        self._counter = counter
        self.number = number
        self.behind = behind

    def settle(self, failure: Failure | None) -> None:
        """Called once by the worker: opens the event on the host, then on the device."""
        super().settle(failure)
        self._counter.set(self.number)


class CudaStreams:
    """The five streams of one CUDA device; see the module docstring. Threads may launch at the same time.

    Args:
        name: of the device, for messages.
        api: CUDA.
        settings: delays, and whether everything is waited for at its launch.
    """

    def __init__(self, name: str, api: CudaApi, settings: DebugSettings) -> None:
        self.failures = Failures()
        self.num_synchronizes = 0
        self._name = name
        self._api = api
        self._settings = settings
        self._delays = {s: Delays(settings.max_delay_ms, settings.seed, s) for s in Stream}
        self._side = {stream: api.new_stream() for stream in _SIDE_STREAMS}
        self._compute = api.current_stream()
        self._counter = api.new_counter()
        self._num_host = 0
        self._event_numbers = count(1)
        self._behind: dict[int, CudaEvent] = {}
        self._passed: dict[int, int] = {}
        self._worker: Worker | None = None
        self._lock = threading.RLock()
        self._is_closed = False
        self._pid = os.getpid()

    def launch(self, stream: Stream, label: str, waits: Sequence[Event], work: Callable[[], None]) -> Event:
        """As `chunkc.runtime.device.Device.launch`; raises an earlier failure that the host was not told.

        Raises:
            ChunkcError: after `close`, in a forked child, and for events of another device.
        """
        self.check_usable()
        self.failures.raise_untold()
        event = (
            self._launch_on_host(label, waits, work)
            if stream is Stream.CPU
            else self._enqueue(stream, label, waits, work)
        )
        if self._settings.synchronous:
            self.synchronize()
        return event

    def follow(self) -> None:
        """Order all side streams behind what is on the current stream now."""
        current = self._current()
        event = self._api.record(current)
        for side in self._side.values():
            self._api.wait_event(side, event)

    def synchronize(self) -> None:
        """Wait for everything launched; raise the first failure the host was not told."""
        self.check_usable()
        self.num_synchronizes += 1
        self._join_worker()
        self._api.synchronize()
        self._behind.clear()
        self.failures.raise_untold()

    def call_from_host(self, work: Callable[[], None]) -> None:
        """Call ``work``; in a thread of its own where the worker calls this, which would wait for itself."""
        if self._worker is not None and self._worker.thread is threading.current_thread():
            threading.Thread(target=work, name="chunkc-host").start()
        else:
            work()

    def check_usable(self) -> None:
        """Raise after `close` and in a forked child."""
        if self._is_closed:
            raise ChunkcError(f"{self._name} is closed: compile the model again to go on")
        if os.getpid() != self._pid:
            raise ChunkcError(
                f"{self._name} belongs to process {self._pid}, and CUDA does not survive the fork into {os.getpid()}: "
                "use the model in the process that compiled it, or start workers by 'spawn'"
            )

    def close(self, timeout_s: float | None = None) -> None:
        """Finish what was launched, wait for the device, and stop the worker; idempotent, nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            worker, is_closed, self._is_closed = self._worker, self._is_closed, True
        if worker is not None:
            if not is_closed:
                worker.items.put(None)
            if worker.thread is not threading.current_thread():
                worker.thread.join(timeout_s)
        self._counter.set(self._num_host)  # whatever still waits for the worker would wait for ever
        if not is_closed:
            with suppress(RuntimeError):  # a broken device has nothing under way
                self._api.synchronize()
        failure = self.failures.take_untold()
        if failure is not None:
            _LOGGER.error("%s was closed before this failure was seen", self._name, exc_info=failure.error)

    def _enqueue(self, stream: Stream, label: str, waits: Sequence[Event], work: Callable[[], None]) -> CudaEvent:
        target = self._side[stream] if stream in self._side else self._current()
        key = self._api.key(target)
        for event in waits:
            self._order(target, key, self._own(event, label))
        self._pause(stream, target)
        try:
            with profiler_range(label):
                self._api.run(target, work)
        except BaseException as error:
            error.add_note(f"in {label} on stream {stream} of {self._name}")
            raise
        self._pause(stream, target)
        return CudaEvent(self._api, self.failures, self._api.record(target), key, next(self._event_numbers))

    def _current(self) -> Any:
        """The caller's stream, behind the one of the launch before it."""
        current = self._api.current_stream()
        if self._api.key(current) != self._api.key(self._compute):
            self._api.wait_event(current, self._api.record(self._compute))
            self._compute = current
        return current

    def _order(self, target: Any, key: int, event: CudaEvent | HostCompletion) -> None:
        """What is enqueued on ``target`` from here on runs after ``event``."""
        if isinstance(event, CudaEvent):
            if event.key != key:
                self._api.wait_event(target, event.handle)
            return
        if event.done():
            event.raise_failure()
            return
        if self._passed.get(key, 0) >= event.number:
            return
        for before in event.behind:
            self._order(target, key, before)
        if self._api.wait_counter(target, self._counter, event.number):
            self._passed[key] = event.number
        else:
            event.wait()

    def _launch_on_host(self, label: str, waits: Sequence[Event], work: Callable[[], None]) -> HostCompletion:
        owned = tuple(self._own(event, label) for event in waits)

        def ranged() -> None:
            with profiler_range(label):
                work()

        with self._lock:  # the worker's work is numbered in the order of its queue
            for event in owned:
                if isinstance(event, CudaEvent):
                    latest = self._behind.setdefault(event.key, event)
                    if event.number > latest.number:
                        self._behind[event.key] = event
            self._num_host += 1
            completion = HostCompletion(self.failures, self._counter, self._num_host, tuple(self._behind.values()))
            self._require_worker().items.put(Item(label, owned, ranged, completion, self.failures.num_tellings))
        return completion

    def _join_worker(self) -> None:
        if self._worker is not None:
            mark = Completion(self.failures)
            self._worker.items.put(Item("synchronize", (), None, mark, 0))
            mark.join()

    def _require_worker(self) -> Worker:
        with self._lock:
            if self._worker is None:
                self._worker = Worker(self._name, Stream.CPU, self.failures, self._delays[Stream.CPU], nullcontext())
            return self._worker

    def _pause(self, stream: Stream, target: Any) -> None:
        delay_ms = self._delays[stream].next_ms()
        if delay_ms:
            self._api.sleep(target, delay_ms)

    def _own(self, event: Event, label: str) -> CudaEvent | HostCompletion:
        if isinstance(event, CudaEvent | HostCompletion) and event.failures is self.failures:
            return event
        raise ChunkcError(f"{label} waits for {event!r}, which is no event of {self._name}")
