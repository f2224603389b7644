"""Whether the calls that a CUDA device made keep the order that a plan asks for.

Launches, what the caller does between programs, and API calls are one record, replayed with vector clocks as CUDA
defines order; what a launch is ordered behind is then compared with the waits of its action.
"""

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import pytest
from fake_cuda import Call, FakeCuda

from chunkc.ir.actions import Stream
from chunkc.runtime.devices.cuda import CudaDevice
from chunkc.runtime.devices.cuda_events import CudaEvent
from chunkc.runtime.devices.protocol import Event, PlannedLaunch, Work
from chunkc.runtime.devices.worker_streams import Completion


@dataclass(frozen=True)
class Launch:
    stream: Stream
    label: str
    waits: tuple[int, ...]
    is_on_host: bool


class Numbered:
    def __init__(self, work: Callable[[], None], number: int) -> None:
        self.number = number
        self._work = work

    def __call__(self) -> None:
        self._work()


class LaunchRecorder:
    """Stands in for ``launch`` and ``launch_all`` of a device; notes host launches, sleeps and joins among
    ``api.calls``.

    Work of the CUDA streams between two launches of the worker is launched by the device's own ``launch_all``, which
    uses events again; so launches of a program are known by their labels.
    """

    def __init__(self, device: CudaDevice, api: FakeCuda) -> None:
        self.launches: list[Launch] = []
        self._number_of: dict[int, int] = {}
        self._events: list[Event] = []
        self._launch, self._launch_all, self._api = device.launch, device.launch_all, api
        self._number_of_label: dict[str, int] = {}
        self._known: dict[str, Event] = {}
        self._by_caller: tuple[int, ...] = ()

    def between_programs(self, work: Callable[[], None]) -> None:
        """The caller does ``work`` on its stream, behind which everything that it launches later belongs."""
        number = len(self.launches)
        self.launches.append(Launch(Stream.COMPUTE, f"what the caller does ({number})", (), is_on_host=False))
        work()
        self._api.note("run", self._api.key(self._api.current_stream()), number)
        self._by_caller += (number,)

    def __call__(self, stream: Stream, label: str, waits: Sequence[Event], work: Callable[[], None]) -> Event:
        labels = [label for label, event in self._known.items() if any(event is wait for wait in waits)]
        waited = tuple(self._number_of[id(e)] for e in waits if id(e) in self._number_of)
        return self._single(stream, label, waits, work, waited + self._numbers(labels))

    def launch_all(self, launches: Sequence[PlannedLaunch], works: Sequence[Work], events: dict[str, Event]) -> None:
        self._known = events
        for is_on_host, group in itertools.groupby(
            zip(launches, works, strict=True), lambda pair: pair[0].stream is Stream.CPU
        ):
            if not is_on_host:
                self._program(list(group), events)
                continue
            for planned, work in group:
                waits = [events[label] for label in planned.waits if label in events]
                waited = self._numbers(label for label in planned.waits if label in events)
                self._number_of_label[planned.label] = len(self.launches)
                event = self._single(planned.stream, planned.text, waits, work, waited)
                events[planned.label] = event

    def _program(self, pairs: Sequence[tuple[PlannedLaunch, Work]], events: dict[str, Event]) -> None:
        works, launched = list[Work](), set(events)
        for planned, work in pairs:
            waited = self._numbers(label for label in planned.waits if label in launched)
            works.append(Numbered(work, len(self.launches)))
            self._number_of_label[planned.label] = len(self.launches)
            self.launches.append(Launch(planned.stream, planned.text, waited + self._by_caller, is_on_host=False))
            launched.add(planned.label)
        try:
            self._launch_all([planned for planned, _ in pairs], works, events)
        except BaseException:
            del self.launches[next(w.number for w, (p, _) in zip(works, pairs, strict=True) if p.label not in events) :]
            raise

    def _numbers(self, labels: Iterable[str]) -> tuple[int, ...]:
        return tuple(self._number_of_label[label] for label in labels if label in self._number_of_label)

    def _single(self, stream: Stream, label: str, waits: Sequence[Event], work: Work, waited: tuple[int, ...]) -> Event:
        number = len(self.launches)
        if stream is not Stream.CPU:  # what the worker reads and writes is in host memory, where copies are waited for
            waited += self._by_caller
        self.launches.append(Launch(stream, label, waited, stream is Stream.CPU))
        event = self._launch(stream, label, waits, Numbered(work, number))
        if stream is Stream.CPU:
            for slept in (e for e in waits if isinstance(e, CudaEvent)):
                self._api.note("sleeps on", number, slept.handle.number)
            self._api.note("host launch", -1, number)
        self._events.append(event)  # so that no identity is used again
        self._number_of[id(event)] = number
        return event

    def joined(self, event: Completion) -> None:
        if id(event) in self._number_of:
            self._api.note("joined", -1, self._number_of[id(event)])


def faults(launches: Sequence[Launch], calls: Sequence[Call]) -> list[str]:
    """Launches since the device was joined that are not ordered behind one of their waits, by all calls since."""
    really = {c.value for c in calls if c.kind == "host waits"}
    known: dict[int, frozenset[int]] = {}  # stream -> launches that what it does next is behind
    recorded: dict[int, frozenset[int]] = {}  # event -> the same
    slept: dict[int, frozenset[int]] = {}  # worker's launch -> what it slept on
    ended: dict[int, frozenset[int]] = {}  # worker's launch -> what has ended when it has
    on_host = last = frozenset[int]()  # what has ended for the caller; and when the worker ends its latest work
    behind: dict[int, frozenset[int]] = {}
    for call in calls:
        before = known.get(call.stream, frozenset()) | on_host
        if call.kind == "wait event":
            known[call.stream] = before | recorded.get(call.value, frozenset())
        elif call.kind == "run" and call.stream >= 0:
            behind[call.value] = before
            known[call.stream] = before | {call.value}
        elif call.kind == "record":
            recorded[call.value] = before
        elif call.kind == "sleeps on" and call.value in really:
            slept[call.stream] = slept.get(call.stream, frozenset()) | recorded.get(call.value, frozenset())
        elif call.kind == "host launch":
            behind[call.value] = last | slept.get(call.value, frozenset())
            ended[call.value] = last = behind[call.value] | {call.value}
        elif call.kind == "joined":
            on_host |= ended[call.value]
    return [
        f"{launch.label} is not behind {launches[wait].label}"
        for number, launch in enumerate(launches)
        for wait in launch.waits
        if wait not in behind[number]
    ]


def record(device: CudaDevice, api: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> LaunchRecorder:
    """Record from here on; no work of the worker is seen to be done when something is launched behind it."""
    monkeypatch.setattr(Completion, "done", lambda self: False)
    device.synchronize()
    api.calls.clear()
    recorder, launcher, join = LaunchRecorder(device, api), threading.current_thread(), Completion.join
    monkeypatch.setattr(device, "launch", recorder)
    monkeypatch.setattr(device, "launch_all", recorder.launch_all)

    def noted(self: Completion) -> object:
        failure = join(self)
        if threading.current_thread() is launcher:  # autograd calls backwards of host tensors on it too
            recorder.joined(self)
        return failure

    monkeypatch.setattr(Completion, "join", noted)
    return recorder


def found_faults(recorder: LaunchRecorder, device: CudaDevice, api: FakeCuda) -> list[str]:
    """`faults` of what was recorded, once all of it has run."""
    device.synchronize()
    return faults(recorder.launches, list(api.calls))
