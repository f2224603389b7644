"""Streams of the CUDA device: the caller's thread launches all; the device never waits for the host.

    stream    carried by
    compute   the CUDA stream that is current when the caller launches: kernels of the model see theirs as always
    h2d, d2h, comm   a CUDA stream each, which does not synchronise with the default stream
    cpu       one worker thread, in the order of launching

Work of one stream runs in the order of launching. Between streams, for a wait of ``b`` for ``a``:

    a on        b on      means                                              mechanism
    CUDA        CUDA      run reads a fetched slot; evict copies what a run  an event recorded behind ``a``, for which
                          or a stash wrote; fetch fills a slot that a run    the stream of ``b`` waits before ``b`` is
                          or an evict has freed                              enqueued
    CUDA        cpu       update reads the gradient that an evict brought    the worker sleeps on that event, whose
                          home; update overwrites a home that a fetch has    completion makes device writes to host
                          read                                               memory visible to the host
    cpu         h2d, ...  fetch reads the home that an update wrote          ``b`` is *held back* on the host, below
    cpu         compute   backward ends behind updates of what no graph      the caller waits for the worker
                          reads, where a step decides
    cpu         cpu       updates share scratch and threads                  one worker
    caller      any       parameters and gradients that are read, written,   blocking copies have finished; the others
                          loaded or brought back between programs; tables    are on the compute stream, behind which the
                          of a step                                          side streams are put at the first launch of
                                                                             a thread after a ``synchronize``
    any         caller    reading a parameter                                ``synchronize``

**Holding back.** Work of a side stream that depends on unfinished host work waits in a queue on the host, and so does
what follows on that stream or waits for it on another. The first launch or ``synchronize`` that finds the host work
ended enqueues it. Where a run needs what is held back, the caller sleeps until the worker has come so far. At the end
of a program nothing stays held back on ``comm``, for which other ranks wait.

**Bounded run-ahead.** While the worker has work, the caller launches a segment only when all but the latest few have
finished on the device; until then the caller sleeps without the GIL, which the worker needs between two chunks.

**Why the device does not wait instead**, by ``cuStreamWaitValue32`` or a host function: the worker needs the GIL, and
calls of CUDA that wait for the device may hold it (launches once about a thousand are pending, allocations when memory
is short, loading a kernel). If a stream waited for the worker, such a call would never return.

**Failures** of the worker are reported as `worker_streams` says. What is held back behind failed work does run, over
parameters as they were, so that nothing hangs. Worker items that wait for an event fail in the meantime.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from sys import getrefcount
from typing import Any, Final, cast

from chunkc._torch_compat.core import is_profiling, profiler_range
from chunkc.errors import ChunkcError
from chunkc.ir.actions import Stream
from chunkc.runtime.devices.cuda_api import CudaApi
from chunkc.runtime.devices.cuda_events import CudaEvent, CudaWork, handles_of
from chunkc.runtime.devices.debug_settings import DebugSettings
from chunkc.runtime.devices.protocol import Event, PlannedLaunch, Work
from chunkc.runtime.devices.throttle import Timekeeper
from chunkc.runtime.devices.worker_streams import Completion, Delays, Workers, WorkRunner

_SIDE_STREAMS = (Stream.H2D, Stream.D2H, Stream.COMM)

MAX_SEGMENTS_UNDER_WAY: Final = 4
"""Segments launched and not finished while the worker updates: enough to keep the device busy, few kernels pending."""


def _num_references_of_one_name() -> int:
    event = object()
    return getrefcount(event)


_NUM_REFERENCES_OF_ONE_NAME: Final = _num_references_of_one_name()
"""What ``getrefcount`` says of an object that one local name alone holds: other versions of Python count others."""


class _ThreadState(threading.local):
    """State of one launching thread: the latest ``synchronize`` behind which it has put the side streams."""

    followed: object | None = None


class CudaStreams:
    """The five streams of one CUDA device. ``num_worker_waits`` counts the caller's sleeps for the worker."""

    def __init__(self, name: str, api: CudaApi, settings: DebugSettings) -> None:
        self.num_synchronizes = 0
        self.num_worker_waits = 0
        self.worker_waits_s = 0.0
        self._name = name
        self._api = api
        self._settings = settings
        self._delays = {s: Delays(settings.max_delay_ms, settings.seed, s) for s in Stream}
        self._has_delays = settings.max_delay_ms > 0
        self._side = {stream: api.new_stream() for stream in _SIDE_STREAMS}
        self._side_key = {stream: api.key(side) for stream, side in self._side.items()}
        self._compute = api.current_stream()
        self._compute_key = api.key(self._compute)
        self._held: dict[int, deque[CudaWork]] = {key: deque() for key in self._side_key.values()}
        self._side_targets = {stream: (side, self._side_key[stream]) for stream, side in self._side.items()}
        self._segments: deque[CudaEvent | Completion] = deque()
        self._latest_on_host: Completion | None = None
        self._is_enqueuing = False
        self._latest_synchronize: object | None = None
        self._thread_state = _ThreadState()
        runner = WorkRunner(self._delays[Stream.CPU], nullcontext(), Timekeeper())
        self._workers = Workers(name, "and CUDA does not", {Stream.CPU: runner})
        self.failures = self._workers.failures
        self.check_usable = self._workers.check_usable
        self.call_from_host = self._workers.call_from_host
        self._lock = threading.RLock()

    def launch(self, stream: Stream, label: str, waits: Sequence[Event], work: Callable[[], None]) -> Event:
        """Launch work as `Device.launch` says; raises `ChunkcError` for events of another device, too."""
        self.check_usable()
        for event in waits:
            if not isinstance(event, CudaEvent | Completion) or event.failures is not self.failures:
                raise ChunkcError(f"{label} waits for {event!r}, which is no event of {self._name}")
        return self._launch(stream, label, cast(Sequence[CudaEvent | Completion], waits), work)

    def launch_all(self, launches: Sequence[PlannedLaunch], works: Sequence[Work], events: dict[str, Event]) -> None:
        """Launch works as `Device.launch_all` says; what nothing holds back is enqueued right here."""
        self.check_usable()
        is_plain = not self._settings.synchronous and not self._has_delays and not is_profiling()
        api, failures, (held_0, held_1, held_2) = self._api, self.failures, self._held.values()
        known = cast(dict[str, CudaEvent | Completion], events)
        with self._lock:
            self._follow_latest()
            followed, current = self._latest_synchronize, self._current()
            targets = {**self._side_targets, Stream.COMPUTE: (current, self._compute_key), Stream.CPU: (None, 0)}
            for planned, work in zip(launches, works, strict=True):
                waits = [known[label] for label in planned.waits if label in known]
                event = known.pop(planned.label, None)
                if not isinstance(event, CudaEvent) or getrefcount(event) > _NUM_REFERENCES_OF_ONE_NAME:
                    event = None
                target, key = targets[planned.stream]
                if planned.is_segment:
                    self._bound_run_ahead()
                is_held = held_0 or held_1 or held_2 or self._latest_synchronize is not followed
                handles = None if is_held or target is None or not is_plain else handles_of(waits, key)
                if handles is None or failures.unreported is not None:
                    known[planned.label] = self._launch(planned.stream, planned.text, waits, work, event)
                    followed = self._thread_state.followed
                else:
                    event = self._new_event(key) if event is None else event
                    try:
                        for handle in handles:
                            api.wait_event(target, handle)
                        api.run(target, work)
                        event.handle, event.key = api.record(target, event.handle), key
                    except BaseException as error:
                        self._note_place(error, planned.stream, planned.text)
                        raise
                    known[planned.label] = event
                if planned.is_segment:
                    self._segments.append(known[planned.label])

    def follow(self) -> None:
        """Order all side streams behind the work on the current stream, now and until the next launch."""
        with self._lock:
            self._put_sides_behind(self._current())
            self._latest_synchronize = object()

    def _put_sides_behind(self, compute: Any) -> None:
        event = self._api.record(compute)
        for side in self._side.values():
            self._api.wait_event(side, event)

    def synchronize(self) -> None:
        """Wait for everything launched; raise the first failure that was not reported."""
        self.check_usable()
        self.num_synchronizes += 1
        self._latest_synchronize = object()
        self._workers.join()
        self._segments.clear()
        self._latest_on_host = None
        try:
            for key in self._held:
                self._enqueue_held(key)
        finally:  # whoever recovers from what raises there works on memory that nothing else may touch meanwhile
            self._api.synchronize()
        self.failures.raise_unreported()

    def enqueue_exchanges(self) -> None:
        """Hold nothing back on ``comm``; the caller sleeps until the worker has come so far."""
        self._enqueue_held(self._side_key[Stream.COMM])

    def close(self, timeout_s: float | None = None) -> None:
        """Finish what was launched and stop the worker; idempotent, without effect in a forked child."""
        self._segments.clear()
        if self._workers.close(timeout_s):
            for held in self._held.values():
                held.clear()  # nobody is left to ask for it
            with suppress(RuntimeError):  # a broken device has nothing under way
                self._api.synchronize()

    def _launch(
        self,
        stream: Stream,
        label: str,
        waits: Sequence[CudaEvent | Completion],
        work: Callable[[], None],
        used: CudaEvent | None = None,
    ) -> CudaEvent | Completion:
        """Launch work, with ``used`` as its event if it is work of a CUDA stream."""
        self.failures.raise_unreported()
        event: CudaEvent | Completion
        if stream is Stream.CPU:
            event = self._launch_on_host(label, waits, work)
        else:
            event = self._launch_on_device(stream, label, waits, work, used)
        if self._settings.synchronous:
            self.synchronize()
        return event

    def _launch_on_device(
        self,
        stream: Stream,
        label: str,
        waits: Sequence[CudaEvent | Completion],
        work: Callable[[], None],
        used: CudaEvent | None,
    ) -> CudaEvent:
        for event in waits:
            if isinstance(event, Completion) and event.done():
                event.raise_failure()
        with self._lock:
            target, key = self._side_targets.get(stream) or (self._current(), self._compute_key)
            if used is not None:
                used.renew(key)
            item = CudaWork(stream, label, waits, work, used or self._new_event(key))
            self._follow_latest()
            for other, held in self._held.items():
                if held:
                    self._enqueue_held(other, only_ready=True)
            if stream in self._side and (self._held[key] or not item.is_ready()):
                self._held[key].append(item)
            else:
                for event in waits:
                    self._await(event)
                self.failures.raise_unreported()
                self._enqueue(item, target)
        return item.event

    def _bound_run_ahead(self) -> None:
        """Before a segment is launched, sleep until few are under way, if the worker has something to do.

        With about 1,000 kernels pending, launching one more blocks with the GIL held, for which the worker waits.
        """
        if len(self._segments) < MAX_SEGMENTS_UNDER_WAY:
            return
        oldest = self._segments.popleft()
        is_worker_busy = self._latest_on_host is not None and not self._latest_on_host.done()
        if is_worker_busy and not oldest.done():
            oldest.join()

    def _new_event(self, key: int) -> CudaEvent:
        return CudaEvent(self._api, self.failures, key, self._enqueue_event)

    def _follow_latest(self) -> None:
        """Put the side streams behind the latest ``synchronize``, once for each launching thread."""
        if self._thread_state.followed is not self._latest_synchronize:
            self._put_sides_behind(self._current())
            self._thread_state.followed = self._latest_synchronize

    def _enqueue_event(self, event: CudaEvent) -> None:
        self._enqueue_held(event.key, event)
        if event.handle is None:
            raise ChunkcError(f"{self._name} was closed, or interrupted, before what is waited for was enqueued")

    def _enqueue_held(self, key: int, until: CudaEvent | None = None, *, only_ready: bool = False) -> None:
        """Enqueue held-back work of a stream in order: all, as far as ``until``, or as far as nothing waits."""
        with self._lock:
            held = self._held[key]
            while held and not self._is_enqueuing and (until is None or until.handle is None):
                item = held[0]
                if only_ready and not item.is_ready():
                    return
                for event in item.waits:
                    self._await(event)
                if held and held[0] is item:  # a finaliser may have come here while this thread waited
                    held.popleft()
                    self._enqueue(item, self._side[item.stream])

    def _await(self, event: CudaEvent | Completion) -> None:
        """Have the caller sleep until the device can be told to wait for ``event``."""
        if isinstance(event, CudaEvent):
            event.enqueue()
        elif not event.done():
            self.num_worker_waits += 1
            begun_s = time.perf_counter()
            event.join()
            self.worker_waits_s += time.perf_counter() - begun_s

    def _enqueue(self, item: CudaWork, target: Any) -> None:
        """Enqueue ``item``, for which everything that it waits for is enqueued, or has ended on the host."""
        self._is_enqueuing, before = True, self._is_enqueuing  # a finaliser must not come between work and event
        try:
            for event in item.waits:  # host work has ended already, also where it failed
                if isinstance(event, CudaEvent) and event.key != item.event.key:
                    self._api.wait_event(target, event.handle)
            if self._has_delays or is_profiling():
                self._run_visibly(item, target)
            else:
                self._api.run(target, item.work)
            item.event.handle = self._api.record(target, item.event.spare)
        except BaseException as error:
            self._note_place(error, item.stream, item.label)
            raise
        finally:
            self._is_enqueuing = before

    def _note_place(self, error: BaseException, stream: Stream, label: str) -> None:
        error.add_note(f"in {label} on stream {stream} of {self._name}")

    def _run_visibly(self, item: CudaWork, target: Any) -> None:
        self._pause(item.stream, target)
        with profiler_range(item.label):
            self._api.run(target, item.work)
        self._pause(item.stream, target)

    def _current(self) -> Any:
        """The caller's stream, behind the one of the launch before it. The lock is held."""
        current = self._api.current_stream()
        if current is not self._compute:
            key = self._api.key(current)
            if key != self._compute_key:
                self._api.wait_event(current, self._api.record(self._compute))
            self._compute, self._compute_key = current, key
        return current

    def _launch_on_host(
        self, label: str, waits: Sequence[CudaEvent | Completion], work: Callable[[], None]
    ) -> Completion:
        for event in waits:
            if isinstance(event, CudaEvent):
                event.enqueue()  # the worker can only sleep on what is recorded
        completion = self._latest_on_host = Completion(self.failures)
        self._workers.put(Stream.CPU, label, tuple(waits), work, completion)
        return completion

    def _pause(self, stream: Stream, target: Any) -> None:
        delay_ms = self._delays[stream].next_ms()
        if delay_ms:
            self._api.sleep(target, delay_ms)
