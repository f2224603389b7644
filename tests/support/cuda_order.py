"""Whether the calls that a CUDA device made keep the order that a plan asks for.

The record of launches and of API calls is replayed with vector clocks, as CUDA defines order: a stream's calls in
their order; an event's wait behind its record; a counter's wait behind the host work of that number; host work behind
the events that the worker slept on. What a launch is ordered behind is then compared with the waits of its action.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fake_cuda import Call, FakeCuda

from chunkc.ir.actions import Stream
from chunkc.runtime.cuda import CudaDevice
from chunkc.runtime.cuda_streams import HostCompletion
from chunkc.runtime.device import Event


@dataclass
class Launch:
    """One launch: what it was told to wait for, and the calls that it made on the caller's thread."""

    number: int
    stream: Stream
    label: str
    waits: tuple[int, ...]
    calls: list[Call] = field(default_factory=list)
    host_number: int = 0
    slept_on: frozenset[int] = frozenset()


class LaunchRecorder:
    """Stands in for ``launch`` of a device; ``launches`` in order."""

    def __init__(self, device: CudaDevice, api: FakeCuda) -> None:
        self.launches: list[Launch] = []
        self._number_of: dict[int, int] = {}
        self._events: list[Event] = []
        self._launch, self._api = device.launch, api

    def __call__(self, stream: Stream, label: str, waits: Sequence[Event], work: Callable[[], None]) -> Event:
        waited = tuple(self._number_of[id(e)] for e in waits if id(e) in self._number_of)
        launch = Launch(len(self.launches), stream, label, waited)
        self.launches.append(launch)
        begin = len(self._api.calls)
        event = self._launch(stream, label, waits, work)
        launch.calls = [c for c in self._api.calls[begin:] if c.kind != "host waits"]
        if isinstance(event, HostCompletion):
            launch.host_number = event.number
            launch.slept_on = frozenset(e.handle.number for e in waits if not isinstance(e, HostCompletion))
        self._events.append(event)  # so that no identity is used again
        self._number_of[id(event)] = launch.number
        return event


def faults(launches: Sequence[Launch], host_waits: frozenset[int]) -> list[str]:
    """Launches that are not ordered behind one of their waits.

    Args:
        launches: of one run, from a joined device on.
        host_waits: events that the worker really slept on.
    """
    known: dict[int, frozenset[int]] = {}  # stream -> launches that what it does next is behind
    recorded: dict[int, frozenset[int]] = {}  # event -> the same
    host: dict[int, frozenset[int]] = {0: frozenset()}  # counter -> the same
    found = []
    for launch in launches:
        if launch.stream is Stream.CPU:
            behind = host[launch.host_number - 1] if launch.host_number - 1 in host else frozenset()
            behind |= frozenset().union(*(recorded[e] for e in launch.slept_on & host_waits if e in recorded))
            host[launch.host_number] = behind | {launch.number}
        else:
            behind = frozenset()
            for call in launch.calls:
                before = known.get(call.stream, frozenset())
                if call.kind == "wait event":
                    known[call.stream] = before | recorded.get(call.value, frozenset())
                elif call.kind == "wait counter":
                    known[call.stream] = before | host.get(call.value, frozenset())
                elif call.kind == "run":
                    behind = before
                    known[call.stream] = before | {launch.number}
                elif call.kind == "record":
                    recorded[call.value] = before
        found += [f"{launch.label} is not behind {launches[wait].label}" for wait in launch.waits if wait not in behind]
    return found
