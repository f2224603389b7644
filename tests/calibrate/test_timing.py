"""Timing: by a clock of the test's own where the law is known, and beside activities that are known to interfere."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

import pytest

from chunkc.calibrate.activities import Activity
from chunkc.calibrate.fit import figure_of, fit_copies
from chunkc.calibrate.timing import Length, Timer, background
from chunkc.ir.actions import Stream
from chunkc.runtime.devices.emulated import EmulatedDevice
from chunkc.runtime.devices.protocol import Event

SIZES = tuple(4096 * 4**k for k in range(7))
LATENCY_US, GB_PER_S, LAUNCH_US = 8.0, 12.5, 2.0


class VirtualEvent:
    def __init__(self, device: VirtualDevice, end_us: float) -> None:
        self.device, self.end_us = device, end_us

    def done(self) -> bool:
        return self.device.now_us >= self.end_us

    def wait(self) -> None:
        self.device.now_us = max(self.device.now_us, self.end_us)


class VirtualDevice(EmulatedDevice):
    """Carries nothing out: a launch takes 2 us of the host, then its bytes keep the stream busy, with noise above."""

    def __init__(self, seed: int) -> None:
        super().__init__("virtual", 1 << 20, 1 << 20)
        self.now_us = 0.0
        self.free_us = dict.fromkeys(Stream, 0.0)
        self.rng = random.Random(seed)

    def launch(self, stream: Stream, label: str, waits: Sequence[Event], work: Callable[[], None]) -> Event:
        self.now_us += LAUNCH_US
        ready_us = max([self.now_us, self.free_us[stream], *(e.end_us for e in waits if isinstance(e, VirtualEvent))])
        nbytes = 0 if label == "nothing" else int(label)
        slow = self.rng.uniform(1.0, 1.02) * (3.0 if self.rng.random() < 0.02 else 1.0)
        self.free_us[stream] = ready_us + (LATENCY_US + nbytes / (GB_PER_S * 1e3)) * slow
        return VirtualEvent(self, self.free_us[stream])

    def clock_ns(self) -> int:
        return round(self.now_us * 1e3)


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    with closing(EmulatedDevice("emulated-1m-1m", 1 << 20, 1 << 20)) as made:
        yield made


def virtual_rounds(seed: int) -> tuple[list[float], list[float]]:
    device = VirtualDevice(seed)
    timer = Timer(device, 2.0, 8, device.clock_ns)
    copies = [Activity(Stream.H2D, str(nbytes), (lambda: None,)) for nbytes in SIZES]
    lengths = [timer.length(copy) for copy in copies]
    rounds = []
    for _ in range(15):
        times_us = [timer.time_us(copy, length) for copy, length in zip(copies, lengths, strict=True)]
        rounds.append(fit_copies(SIZES, times_us))
    return [latency for latency, _ in rounds], [bandwidth for _, bandwidth in rounds]


def test_the_law_of_a_device_is_recovered_through_its_noise() -> None:
    latency, bandwidth = (figure_of(values) for values in virtual_rounds(seed=1))
    assert latency.median == pytest.approx(LATENCY_US, rel=0.15)
    assert bandwidth.median == pytest.approx(GB_PER_S, rel=0.05)
    assert abs(latency.median - LATENCY_US) <= latency.spread
    assert abs(bandwidth.median - GB_PER_S) <= bandwidth.spread


@pytest.mark.long
def test_calibrations_of_a_noisy_device_agree_and_say_so_tightly() -> None:
    figures = [[figure_of(values) for values in virtual_rounds(seed)] for seed in range(8)]
    for latency, bandwidth in figures:
        assert latency.agrees_with(figures[0][0])
        assert bandwidth.agrees_with(figures[0][1])
        assert bandwidth.spread < 0.2 * bandwidth.median


def test_a_batch_fills_its_time_and_long_pieces_get_fewer_batches() -> None:
    device = VirtualDevice(seed=2)
    timer = Timer(device, 2.0, 8, device.clock_ns)
    short = timer.length(Activity(Stream.H2D, str(1 << 20), (lambda: None,)))  # about 94 us
    long = timer.length(Activity(Stream.H2D, str(1 << 28), (lambda: None,)))  # about 21 ms
    assert 15 <= short.num_pieces <= 25
    assert short.num_batches >= 6
    assert long == Length(num_pieces=1, num_batches=2)


def test_launches_and_handoffs_by_a_known_clock() -> None:
    device = VirtualDevice(seed=3)
    timer = Timer(device, 2.0, 8, device.clock_ns)
    assert timer.launch_us(Stream.H2D) == pytest.approx(LAUNCH_US)
    assert timer.handoff_us() >= LATENCY_US  # each waits for the one before, so nothing overlaps
    assert timer.handoff_us() < 2.5 * LATENCY_US


def test_pieces_take_turns(device: EmulatedDevice) -> None:
    seen: list[int] = []
    activity = Activity(Stream.H2D, "turns", tuple(lambda i=i: seen.append(i) for i in range(3)))  # type: ignore[misc]
    Timer(device, 2.0, 1).time_us(activity, Length(num_pieces=7, num_batches=2))
    assert seen == [0, 1, 2, 0, 1, 2, 0] * 2


def test_threads_hand_the_lock_of_python_on_at_once_while_others_run(device: EmulatedDevice) -> None:
    """And as before afterwards, also where a piece fails."""
    before_s, seen_s = sys.getswitchinterval(), []
    timer, other = Timer(device, 1.0, 1), Activity(Stream.D2H, "by", (lambda: None,))
    note = Activity(Stream.H2D, "of", (lambda: seen_s.append(sys.getswitchinterval()),))
    timer.time_under_us(note, [other], Length(num_pieces=1, num_batches=1))
    assert max(seen_s) < 1e-3 < before_s == sys.getswitchinterval()

    def fail() -> None:
        raise RuntimeError("a piece that fails")

    with pytest.raises(RuntimeError, match="that fails"):
        timer.time_under_us(note, [Activity(Stream.CPU, "by", (fail,))], Length(num_pieces=1, num_batches=1))
    assert sys.getswitchinterval() == before_s


class Sharing:
    def __init__(self) -> None:
        self.seen_s = {"of": -10.0, "by": -10.0}

    def work(self, name: str, other: str) -> Callable[[], None]:
        def work() -> None:
            self.seen_s[name] = time.monotonic()
            is_shared = self.seen_s[name] - self.seen_s[other] < 5.0
            time.sleep(60e-3 if is_shared else 20e-3)
            self.seen_s[name] = time.monotonic()

        return work


def factor(device: EmulatedDevice, of: Callable[[], None], by: Callable[[], None], stream: Stream) -> float:
    timer, length = Timer(device, 20.0, 5), Length(num_pieces=1, num_batches=5)
    activity = Activity(Stream.H2D, "of", (of,))
    alone_us = timer.time_us(activity, length)
    return timer.time_under_us(activity, [Activity(stream, "by", (by,))], length) / alone_us


@pytest.mark.parametrize("stream", [Stream.D2H, Stream.COMPUTE])
def test_activities_that_share_slow_each_other_and_others_do_not(device: EmulatedDevice, stream: Stream) -> None:
    sharing = Sharing()
    assert 1.8 < factor(device, sharing.work("of", "by"), sharing.work("by", "of"), stream)
    assert 0.55 < factor(device, lambda: time.sleep(20e-3), lambda: time.sleep(20e-3), stream) < 1.8


def test_a_background_runs_before_and_during_the_block_and_not_after(device: EmulatedDevice) -> None:
    done: list[float] = []

    def work() -> None:
        time.sleep(1e-3)
        done.append(time.monotonic())

    with background(device, Activity(Stream.CPU, "count", (work,))):
        assert len(done) >= 1
        begin = time.monotonic()
        while len(done) < 4 and time.monotonic() < begin + 30:
            time.sleep(1e-3)
        assert len(done) >= 4
    num_done = len(done)
    time.sleep(0.02)
    assert len(done) == num_done


@pytest.mark.parametrize("num_good", [0, 3])
def test_what_a_background_raises_is_raised(device: EmulatedDevice, num_good: int) -> None:
    calls: list[int] = []

    def work() -> None:
        calls.append(1)
        if len(calls) > num_good:
            raise ZeroDivisionError("in the background")

    with pytest.raises(ZeroDivisionError), background(device, Activity(Stream.CPU, "fails", (work,))):
        begin = time.monotonic()
        while len(calls) <= num_good and time.monotonic() < begin + 30:
            time.sleep(1e-3)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("chunkc-calibrate")]
