"""Events of the CUDA device's streams and of its worker, and the work of one launch.

Making a CUDA event takes several times as long as recording one, so events are recorded again when their `CudaEvent`
has gone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from chunkc.ir.actions import Stream
from chunkc.runtime.devices.cuda_api import CudaApi
from chunkc.runtime.devices.worker_streams import Completion, Failure, Failures

_FEW_EVENTS: Final = 64


class CudaEvent:
    """Completion of work on the CUDA stream of ``key``; ``handle`` is None while the work is held back."""

    __slots__ = ("__weakref__", "_api", "_enqueue", "failures", "handle", "key")

    def __init__(self, api: CudaApi, failures: Failures, key: int, enqueue: Callable[[CudaEvent], None]) -> None:
        self._api = api
        self._enqueue = enqueue
        self.failures = failures
        self.handle: Any = None
        self.key = key

    def done(self) -> bool:
        return self.handle is not None and self._api.is_done(self.handle)

    def wait(self) -> None:
        if not self.done():
            self.failures.num_host_waits += 1
        self.enqueue()
        self._api.wait_on_host(self.handle)
        self.failures.raise_unreported()

    def enqueue(self) -> None:
        """See to it that the work is enqueued, waiting for the worker where the work is held back."""
        if self.handle is None:
            self._enqueue(self)

    def join(self) -> Failure | None:
        """Block a worker until the work, not held back, has finished; return a failure before it."""
        try:
            self._api.wait_on_host(self.handle)
        except RuntimeError as error:
            return Failure(error)
        return self.failures.unreported


@dataclass(slots=True)  # one for each launch, and a frozen one takes three times as long to make
class CudaWork:
    """Work of a CUDA stream; of a side stream it may wait for host work, or for what is held before it."""

    stream: Stream
    label: str
    waits: Sequence[CudaEvent | Completion]
    work: Callable[[], None]
    event: CudaEvent

    def is_ready(self) -> bool:
        """Whether all host work that it waits for has ended, and all else is enqueued."""
        return all(e.done() if isinstance(e, Completion) else e.handle is not None for e in self.waits)


class EventPool:
    """The API's events that stand, or have stood, for launches: twice as many as are held, or a few.

    No finalizer tells that one is free, since Dynamo may trace finalizers: all are looked through now and then.
    """

    def __init__(self) -> None:
        self._used: list[tuple[weakref.ref[CudaEvent], Any]] = []
        self._free: list[Any] = []
        self._look_at_num = _FEW_EVENTS

    def add(self, event: CudaEvent) -> None:
        self._used.append((weakref.ref(event), event.handle))

    def take_free(self) -> Any:
        """An event of the API whose `CudaEvent` has gone; None where none is known."""
        if not self._free and len(self._used) >= self._look_at_num:
            self._look()
        return self._free.pop() if self._free else None

    def _look(self) -> None:
        used, self._used = self._used, []  # a finalizer that comes between may launch, too
        for holder, event in used:
            if holder() is None:
                self._free.append(event)
            else:
                self._used.append((holder, event))
        self._look_at_num = max(_FEW_EVENTS, 2 * len(self._used))
