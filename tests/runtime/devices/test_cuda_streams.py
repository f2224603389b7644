"""Streams of the CUDA device around a wait for all of them."""

import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from fake_cuda import FakeCuda, FakeEvent, FakeStream

from chunkc.ir.actions import Stream
from chunkc.runtime.devices.cuda_api import CudaApi
from chunkc.runtime.devices.cuda_streams import CudaStreams
from chunkc.runtime.devices.debug_settings import DebugSettings
from chunkc.runtime.devices.protocol import Event, PlannedLaunch


def nothing() -> None:
    """Work."""


def test_the_first_launch_after_a_synchronize_puts_the_side_streams_behind_the_caller() -> None:
    api = FakeCuda()
    streams = CudaStreams("fake", api, DebugSettings())
    for _ in range(2):
        streams.synchronize()
        begin = len(api.calls)
        streams.launch(Stream.COMM, "gather", [], nothing)
        streams.launch(Stream.COMM, "gather", [], nothing)
        sides = [stream.key for stream in streams._side.values()]
        gather = [("run", sides[-1]), ("record", sides[-1])]
        assert [(call.kind, call.stream) for call in api.calls[begin:]] == [
            ("record", 0),
            *[("wait event", key) for key in sides],
            *gather * 2,
        ]


def test_a_launch_of_another_thread_puts_nothing_behind_what_the_caller_does_later() -> None:
    """A model that another thread trains launches after the caller's wait and before its write."""
    api = FakeCuda()
    streams = CudaStreams("fake", api, DebugSettings())
    streams.synchronize()
    other = threading.Thread(target=streams.launch, args=(Stream.H2D, "fetch of another model", [], nothing))
    other.start()
    other.join()
    begin = len(api.calls)
    streams.launch(Stream.COMM, "gather", [], nothing)
    sides = [stream.key for stream in streams._side.values()]
    followed = [("record", 0), *[("wait event", key) for key in sides]]
    assert [(call.kind, call.stream) for call in api.calls[begin:]][: len(followed)] == followed


def test_a_launch_that_fails_leaves_nothing_under_way_when_the_host_has_waited() -> None:
    api, hold, ran = FakeCuda(), threading.Event(), list[str]()
    streams = CudaStreams("fake", api, DebugSettings())
    update = streams.launch(Stream.CPU, "update", [], hold.wait)  # type: ignore[arg-type]

    def fetch() -> None:
        time.sleep(0.05)
        ran.append("fetch")

    streams.launch(Stream.H2D, "fetch", [update], fetch)
    streams.launch(Stream.COMM, "gather", [update], nothing)
    comm, run = streams._side[Stream.COMM], api.run

    def failing(stream: FakeStream, work: Callable[[], None]) -> None:
        if stream is comm:
            raise ValueError("on purpose")
        run(stream, work)

    api.run = failing  # type: ignore[method-assign]
    hold.set()
    with pytest.raises(ValueError, match="on purpose"):
        streams.synchronize()
    assert ran == ["fetch"]


# --- what a launch costs ----------------------------------------------------------------------------------------------


class CountedCuda(FakeCuda):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.asked: list[str] = []
        for name in (name for name in vars(CudaApi) if not name.startswith("_") and name != "torch_device"):
            setattr(self, name, partial(self._ask, name, getattr(self, name)))

    def _ask(self, name: str, method: Callable[..., Any], *args: Any) -> Any:
        self.asked.append(name)
        return method(*args)


def num_python_calls(work: Callable[[], object]) -> int:
    """Functions of Python that ``work`` enters, the fewest of a few times: a collection of garbage enters others."""
    found = []
    for _ in range(5):
        names = list[str]()
        sys.setprofile(lambda frame, kind, _: names.append(frame.f_code.co_name) if kind == "call" else None)  # noqa: B023
        try:
            work()
        finally:
            sys.setprofile(None)
        found.append(len(names))
    return min(found)


def test_a_launch_asks_cuda_for_no_more_than_it_needs() -> None:
    api = CountedCuda()
    streams = CudaStreams("fake", api, DebugSettings())
    fetched = streams.launch(Stream.H2D, "fetch", [], nothing)
    kept = [streams.launch(Stream.COMPUTE, "run", [], nothing)]

    def asked(stream: Stream, *waits: Any) -> list[str]:
        api.asked.clear()
        kept.append(streams.launch(stream, "work", waits, nothing))
        return api.asked[:]

    assert asked(Stream.COMPUTE) == ["current_stream", "run", "record"]
    assert asked(Stream.COMPUTE, kept[-1]) == ["current_stream", "run", "record"]
    assert asked(Stream.COMPUTE, fetched) == ["current_stream", "wait_event", "run", "record"]
    assert asked(Stream.H2D) == ["run", "record"]
    assert asked(Stream.H2D, kept[0]) == ["wait_event", "run", "record"]


@pytest.mark.parametrize("stream", [Stream.COMPUTE, Stream.H2D])
def test_a_launch_enters_few_functions(stream: Stream) -> None:
    api = FakeCuda(runs=False)
    api.run = api.record = lambda *_: None  # type: ignore[method-assign]
    streams = CudaStreams("fake", api, DebugSettings())
    streams.launch(stream, "before", [], nothing)
    assert num_python_calls(partial(streams.launch, stream, "work", [], nothing)) <= 18


@pytest.mark.parametrize("stream", [Stream.COMPUTE, Stream.H2D])
def test_a_planned_launch_enters_a_few_functions(stream: Stream) -> None:
    api = FakeCuda(runs=False)
    api.run = api.record = lambda *_: "event"  # type: ignore[assignment, method-assign, return-value]
    streams, events = CudaStreams("fake", api, DebugSettings()), dict[str, Event]()
    labels = [f"f{number}" for number in range(11)]
    planned = [PlannedLaunch(label, "work", stream, (before,)) for before, label in pairwise(labels)]
    streams.launch_all(planned, [nothing] * 10, events)
    of_ten = num_python_calls(partial(streams.launch_all, planned, [nothing] * 10, events))
    of_none = num_python_calls(partial(streams.launch_all, [], [], events))
    assert of_ten - of_none <= 10 * 4, "CUDA's two, the list of waits, and a look at them"


@pytest.mark.parametrize("num_held", [1, 100])
def test_events_are_used_again_when_nobody_holds_them(num_held: int) -> None:
    api = FakeCuda(runs=False)
    used, record = list[FakeEvent | None](), api.record

    def recording(stream: FakeStream, event: FakeEvent | None = None) -> FakeEvent:
        used.append(event)
        return record(stream, event)

    api.record = recording  # type: ignore[method-assign]
    streams = CudaStreams("fake", api, DebugSettings())
    planned, events = PlannedLaunch("f0", "fetch c0 -> d0", Stream.H2D, ("f1",)), dict[str, Event]()
    held = list[Event]()
    for number in range(1000):
        streams.launch_all([planned], [nothing], events)
        if number < num_held:
            held.append(events["f0"])
    assert len({event.handle.number for event in held}) == num_held  # type: ignore[attr-defined]
    assert sum(event is None for event in used) == num_held + 1


def test_an_event_that_only_a_held_launch_or_the_worker_holds_is_not_used_again() -> None:
    """The double refuses to be asked for an event that was used again."""
    api, hold, ran = FakeCuda(), threading.Event(), list[str]()
    streams = CudaStreams("fake", api, DebugSettings())
    streams.launch(Stream.CPU, "update c1", [], hold.wait)  # type: ignore[arg-type]
    evict, events = PlannedLaunch("b0", "evict c0", Stream.D2H, ()), dict[str, Event]()
    update = PlannedLaunch("s0", "update c0", Stream.CPU, ("b0",))
    fetch = PlannedLaunch("f0", "fetch c0 -> d0", Stream.H2D, ("s0", "b0"))
    works = [partial(time.sleep, 0.05), partial(ran.append, "update"), partial(ran.append, "fetch")]
    streams.launch_all([evict, update, fetch], works, events)
    for _ in range(100):
        streams.launch_all([evict], [nothing], events)
    hold.set()
    streams.synchronize()
    assert ran == ["update", "fetch"]
    streams.close()


@pytest.mark.parametrize(("is_worker_busy", "num_waits"), [(True, 2), (False, 0)])
def test_few_segments_are_under_way_while_the_worker_is_busy(is_worker_busy: bool, num_waits: int) -> None:
    api, hold = FakeCuda(), threading.Event()
    api.is_done = lambda event: False  # type: ignore[method-assign]
    streams, events = CudaStreams("fake", api, DebugSettings()), dict[str, Event]()
    if is_worker_busy:
        streams.launch(Stream.CPU, "update", [], hold.wait)  # type: ignore[arg-type]
    segments = [PlannedLaunch(f"f{i}", f"run fwd.{i}", Stream.COMPUTE, (), is_segment=True) for i in range(6)]
    streams.launch_all(segments, [nothing] * 6, events)
    waited = [call.value for call in api.calls if call.kind == "host waits"]
    assert waited == [events[f"f{i}"].handle.number for i in range(num_waits)]  # type: ignore[attr-defined]
    hold.set()
    streams.synchronize()
    streams.close()


def test_side_streams_follow_what_was_joined_in_the_middle_of_a_program() -> None:
    """Whatever is launched first behind a ``synchronize``, which a finalizer may call anywhere."""
    api = FakeCuda()
    streams, events = CudaStreams("fake", api, DebugSettings()), dict[str, Event]()
    program = [
        PlannedLaunch("f0", "run fwd.0", Stream.COMPUTE, ()),
        PlannedLaunch("f1", "update c0", Stream.CPU, ()),
        PlannedLaunch("f2", "fetch c0 -> d0", Stream.H2D, ()),
    ]
    streams.launch_all(program, [streams.synchronize, nothing, nothing], events)
    joined = max(number for number, call in enumerate(api.calls) if call.kind == "synchronize")
    behind = [call.kind for call in api.calls[joined:] if call.kind in ("wait event", "run")]
    assert behind == ["wait event"] * 3 + ["run"], "all side streams, before the fetch"
    streams.close()


def test_a_wait_that_fails_says_where() -> None:
    api = FakeCuda(runs=False)
    streams, events = CudaStreams("fake", api, DebugSettings()), dict[str, Event]()
    program = [
        PlannedLaunch("f0", "run fwd.0", Stream.COMPUTE, ()),
        PlannedLaunch("f1", "evict c3", Stream.D2H, ("f0",)),
    ]

    def broken(stream: FakeStream, event: FakeEvent) -> None:
        raise RuntimeError("CUDA error")

    streams.launch_all(program[:1], [nothing], events)
    api.wait_event = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError) as raised:
        streams.launch_all(program[1:], [nothing], events)
    assert raised.value.__notes__ == ["in evict c3 on stream d2h of fake"]
