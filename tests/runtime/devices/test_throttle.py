"""Paced time: by a clock that the test turns, and on devices in real time, where only bounds from below are sure."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from chunkc.ir.actions import Stream
from chunkc.runtime.devices.debug_settings import DebugSettings
from chunkc.runtime.devices.emulated import EmulatedDevice
from chunkc.runtime.devices.throttle import Pace, PaceLaw, Span, Timekeeper

MIB = 2**20
H2D, D2H, CPU, COMPUTE = Stream.H2D, Stream.D2H, Stream.CPU, Stream.COMPUTE
Launch = Callable[..., Any]


def law(**alone_ms: float) -> PaceLaw:
    """Every action takes ``alone_ms``, half as fast as alone where another runs, by text."""

    def speeds(uses: tuple[str, ...]) -> tuple[float, ...]:
        assert all(use in alone_ms for use in uses)
        return (1.0 if len(uses) == 1 else 0.5,) * len(uses)

    return PaceLaw(lambda _: {text: Pace(ms, text) for text, ms in alone_ms.items()}, speeds)


class Hand:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Desk:
    def __init__(self) -> None:
        self.hand = Hand()
        self.keeper = Timekeeper(law(any=1.0), clock=self.hand)

    def at(self, ms: float) -> Desk:
        self.hand.now_s = ms * 1e-3
        return self

    def launch(self, stream: Stream, alone_ms: float | None, *waits: Span) -> Span:
        pace = None if alone_ms is None else Pace(alone_ms, "any")
        span = self.keeper.launch(stream, "", waits, pace, stream is COMPUTE)
        assert span is not None
        return span

    def begin(self, stream: Stream, alone_ms: float | None, *waits: Span) -> Span:
        span = self.launch(stream, alone_ms, *waits)
        self.keeper.begin(span)
        return span

    def end(self, span: Span, work_ms: float = 0.0) -> tuple[float, float]:
        self.keeper.end(span, work_ms * 1e-3)
        return span.start_s * 1e3, span.end_s * 1e3


# --- by the clock of the hand -----------------------------------------------------------------------------------------


def test_an_action_takes_its_time_or_that_of_its_work() -> None:
    desk = Desk()
    short, long = desk.at(5).begin(H2D, 10), desk.begin(D2H, None)
    assert desk.at(100).end(short, work_ms=3) == pytest.approx((5, 15))
    assert desk.end(long, work_ms=4) == pytest.approx((5, 9))
    slow = desk.begin(H2D, 10)
    assert desk.at(200).end(slow, work_ms=30) == pytest.approx((100, 130))


def test_actions_that_run_together_slow_each_other_while_they_do() -> None:
    desk = Desk()
    first = desk.at(0).begin(H2D, 40)
    second = desk.at(10).begin(CPU, 20)
    assert desk.at(100).end(second) == pytest.approx((10, 50))
    assert desk.end(first) == pytest.approx((0, 60)), "10 alone, 20 in 40 beside the other, 10 alone"


def test_an_action_starts_where_the_last_of_what_it_waits_for_ended() -> None:
    desk = Desk()
    fetch = desk.at(0).begin(H2D, 10)
    evict = desk.begin(D2H, 4)
    run, behind = desk.launch(COMPUTE, 2, fetch, evict), desk.launch(H2D, 2, evict)
    desk.at(30).end(evict)
    desk.end(fetch)
    desk.keeper.begin(run)
    desk.keeper.begin(behind)
    assert (evict.end_s, fetch.end_s) == pytest.approx((0.008, 0.014))
    assert (run.start_s, run.cause) == (fetch.end_s, fetch.number)
    assert (behind.start_s, behind.cause) == (fetch.end_s, fetch.number), "its stream was not free before"
    late = desk.begin(CPU, 1, evict)
    assert (late.start_s, late.cause) == (0.030, None), "the host launched it after all that"


def test_threads_that_wake_up_late_catch_up() -> None:
    desk = Desk()
    first = desk.at(0).begin(COMPUTE, 10)
    assert desk.at(13).end(first, work_ms=1) == pytest.approx((0, 10))
    second = desk.at(14).begin(COMPUTE, 10)
    assert second.start_s == pytest.approx(0.011), "a millisecond after the first, as the host is three behind"
    assert desk.at(21.5).end(second, work_ms=1) == pytest.approx((11, 21))
    bookkeeping = desk.begin(COMPUTE, 0)
    assert desk.at(21.6).end(bookkeeping, work_ms=0.1) == pytest.approx((21, 21.1)), "late by 0.5 still"
    copy = desk.begin(H2D, 10)
    assert desk.at(40).end(copy) == pytest.approx((21.1, 31.1))
    assert (second.host_cause, copy.host_cause) == (first.number, bookkeeping.number)


def test_nothing_is_kept_unless_somebody_asks() -> None:
    keeper = Timekeeper()
    assert keeper.launch(COMPUTE, "run", (), None, True) is None
    keeper.records = []
    span = keeper.launch(COMPUTE, "run", (None,), None, True)
    assert span is not None
    keeper.begin(span)
    keeper.end(span, 0.0)
    assert keeper.records == [span]
    assert span.start_s == span.end_s >= span.launched_s


# --- on devices -------------------------------------------------------------------------------------------------------


@pytest.fixture
def throttled() -> Iterator[EmulatedDevice]:
    made = EmulatedDevice("emulated-1m-1m", MIB, MIB, law=law(fetch=30.0, run=30.0, evict=30.0, drop=0.0))
    yield made
    made.close()


def paced(device: EmulatedDevice) -> Launch:
    launch = device.paced_launch(None)  # type: ignore[arg-type]
    assert launch is not None
    return launch


def nothing() -> None:
    return None


def fail() -> None:
    raise ZeroDivisionError


def test_a_device_without_a_law_paces_nothing() -> None:
    device = EmulatedDevice("emulated-1m-1m", MIB, MIB)
    assert device.paced_launch(None) is None  # type: ignore[arg-type]
    device.close()


def test_work_comes_first_and_its_event_when_it_is_due(throttled: EmulatedDevice) -> None:
    done: list[float] = []
    launch, begun_s = paced(throttled), time.perf_counter()
    fetch = launch(H2D, "fetch", [], lambda: done.append(time.perf_counter()))
    launch(COMPUTE, "run", [fetch], lambda: done.append(time.perf_counter()))
    assert time.perf_counter() - begun_s >= 0.06 - 1e-6
    assert done[1] - begun_s >= 0.03 - 1e-6, "the event was waited for, not only reckoned with"


@pytest.mark.parametrize("synchronous", (False, True))
def test_streams_run_beside_each_other_but_in_turn_if_synchronous(synchronous: bool) -> None:
    settings = DebugSettings(synchronous=synchronous)
    device = EmulatedDevice("emulated-1m-1m", MIB, MIB, settings, law(hold=0.0, fetch=100.0, evict=100.0))
    spans, gate = [], threading.Event()
    launch, device.timekeeper.records = paced(device), spans
    if synchronous:
        gate.set()
    hold = launch(CPU, "hold", [], lambda: (gate.wait(), None)[1])
    begun_s = time.perf_counter()
    launch(H2D, "fetch", [hold], nothing)
    launch(D2H, "evict", [hold], nothing)
    gate.set()
    device.synchronize()
    _, fetch, evict = sorted(spans, key=lambda s: s.number)
    assert (evict.start_s >= fetch.end_s) == synchronous
    assert time.perf_counter() - begun_s >= 0.18, "at half speed together, or in turn; less what one was late"
    device.close()


def test_work_that_fails_is_not_waited_for_and_leaves_the_streams_going(throttled: EmulatedDevice) -> None:
    spans = throttled.timekeeper.records = []
    launch = paced(throttled)
    failed = launch(H2D, "fetch", [], fail)
    launch(D2H, "evict", [failed], nothing)
    with pytest.raises(ZeroDivisionError):
        throttled.synchronize()
    launch(H2D, "fetch", [], nothing).wait()
    with pytest.raises(ZeroDivisionError):
        launch(COMPUTE, "run", [], fail)
    launch(COMPUTE, "run", [], nothing)
    assert [s.label for s in spans] == ["fetch", "fetch", "run", "run"]
    assert spans[0].end_s - spans[0].start_s < 0.03
    assert all(s.end_s - s.start_s >= 0.03 - 1e-6 for s in (spans[1], spans[3]))
    assert spans[3].cause is None
