"""Events of the CUDA device's streams and of its worker, and the work of one launch.

Making a CUDA event takes several times as long as recording one, so the launch of an action records the event of its
launch before again, unless somebody holds that one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from chunkc.ir.actions import Stream
from chunkc.runtime.devices.cuda_api import CudaApi
from chunkc.runtime.devices.worker_streams import Completion, Failure, Failures


class CudaEvent:
    """Completion of work on the CUDA stream of ``key``.

    ``handle``: the API's event, None while the work is held back; ``spare`` is then one to record again.
    """

    __slots__ = ("_api", "_enqueue", "failures", "handle", "key", "spare")

    def __init__(self, api: CudaApi, failures: Failures, key: int, enqueue: Callable[[CudaEvent], None]) -> None:
        self._api = api
        self._enqueue = enqueue
        self.failures = failures
        self.handle: Any = None
        self.spare: Any = None
        self.key = key

    def renew(self, key: int) -> None:
        """Stand for work that is about to be launched; nobody holds this event for the work before."""
        self.spare, self.handle, self.key = self.handle, None, key

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


def handles_of(waits: Sequence[CudaEvent | Completion], key: int) -> list[Any] | None:
    """The API's events that the stream of ``key`` waits for; None where one is held back or failed."""
    handles = []
    for event in waits:
        if isinstance(event, CudaEvent):
            if event.handle is None:
                return None
            if event.key != key:
                handles.append(event.handle)
        elif not event.has_succeeded():
            return None
    return handles
