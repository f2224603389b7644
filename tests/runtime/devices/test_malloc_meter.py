"""The meter against allocations of known size, against operators with a short-lived temporary, and its own cost."""

import ctypes
import gc
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from awaiting import await_that

from chunkc._torch_compat.mkl import mkl_kept_reader
from chunkc.runtime.devices.host_slab import allocate_slab
from chunkc.runtime.devices.malloc_meter import NonModelMeter, malloc_reader

MIB = 2**20
KIB = 2**10

needs_glibc = pytest.mark.skipif(malloc_reader() is None, reason="malloc is not glibc's: no reading")


@pytest.fixture
def meter() -> Iterator[NonModelMeter]:
    made = NonModelMeter()
    yield made
    made.stop()


class Levels:
    def __init__(self, *levels: int) -> None:
        self.levels = list(levels)

    def __call__(self) -> int:
        return self.levels.pop(0) if len(self.levels) > 1 else self.levels[0]


def meter_threads() -> int:
    return sum(thread.name == "chunkc-meter" and thread not in BEFORE for thread in threading.enumerate())


BEFORE: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _count_from_here() -> None:
    BEFORE.clear()
    BEFORE.update(threading.enumerate())


def test_peak_is_the_highest_sample_above_the_baseline() -> None:
    meter = NonModelMeter(read=Levels(0, 100, 150, 400, 90))
    meter.start()
    assert meter.peak_nbytes == 0
    assert [meter.sample() for _ in range(3)] == [50, 300, 0]
    assert meter.peak_nbytes == 300


def test_held_bytes_are_subtracted_and_forgotten_by_start() -> None:
    meter = NonModelMeter(read=Levels(0, 100, 450, 500, 100, 130))
    meter.start()
    meter.held_nbytes = 300
    assert meter.held_nbytes == 300
    assert meter.sample() == 50
    meter.held_nbytes = -20
    assert meter.sample() == 420
    meter.start()
    assert (meter.held_nbytes, meter.peak_nbytes) == (0, 0)
    assert meter.sample() == 30


@needs_glibc
@pytest.mark.skipif(mkl_kept_reader() is None, reason="this build of torch has no MKL")
def test_buffers_that_mkl_keeps_are_no_models(meter: NonModelMeter) -> None:
    """Megabytes that the first product of a kind takes for all that follow in the process."""
    ctypes.PyDLL(torch._C.__file__).mkl_serv_free_buffers()  # as in a process that has multiplied nothing
    kept_nbytes = mkl_kept_reader() or (lambda: 0)
    left, right, product = (torch.ones(1024, 1024) for _ in range(3))
    assert kept_nbytes() == 0
    gc.collect()
    meter.start()
    torch.mm(left, right, out=product)
    assert kept_nbytes() > MIB
    assert (meter.sample() or 0) < 256 * KIB
    taken = torch.empty(4 * MIB, dtype=torch.uint8)
    assert taken.numel() <= (meter.sample() or 0) < taken.numel() + 256 * KIB


def test_without_a_reading_everything_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    meter = NonModelMeter()
    assert not meter.available
    meter.start()
    with meter.long_work():
        assert meter.sample() is None
    assert meter.peak_nbytes is None
    assert meter_threads() == 0


@needs_glibc
@pytest.mark.parametrize(
    "nbytes", [300 * KIB, *(pytest.param(n, marks=pytest.mark.slow) for n in (MIB, 64 * MIB)), 5 * MIB + 12]
)
def test_tensors_of_known_size_are_counted_exactly(meter: NonModelMeter, nbytes: int) -> None:
    gc.collect()
    meter.start()
    first = torch.empty(nbytes, dtype=torch.uint8)
    one = meter.sample()
    second = torch.empty(nbytes, dtype=torch.uint8)
    two = meter.sample()
    del first
    back = meter.sample()
    assert one is not None
    assert two is not None
    assert abs(one - nbytes) < 16 * KIB
    assert abs(two - 2 * nbytes) < 24 * KIB
    assert back is not None
    assert abs(back - nbytes) < 24 * KIB
    assert meter.peak_nbytes == two
    assert second.numel() == nbytes


@needs_glibc
def test_an_operator_counts_its_output_and_held_bytes_hide_a_known_tensor(meter: NonModelMeter) -> None:
    left = torch.randn(512, 1024)
    torch.mm(left, left.T)  # thread pools and workspaces of the first call
    gc.collect()
    meter.start()
    held = torch.zeros(3 * MIB, dtype=torch.uint8)
    meter.held_nbytes = held.numel()
    product = torch.mm(left, left.T)
    level = meter.sample()
    assert level is not None
    assert abs(level - product.numel() * 4) < 64 * KIB


@needs_glibc
def test_slabs_are_no_part_of_it(meter: NonModelMeter) -> None:
    meter.start()
    memory, slab = allocate_slab(32 * MIB)
    memory.fill_(1)
    level = meter.sample()
    assert level is not None
    assert level < 64 * KIB
    slab.close()


@needs_glibc
def test_a_temporary_inside_long_work_is_seen(meter: NonModelMeter) -> None:
    matrix = torch.randn(600, 600)
    torch.mm(matrix, matrix)
    gc.collect()
    meter.start()
    with meter.long_work():
        time.sleep(0.02)
        temporary = torch.empty(32 * MIB, dtype=torch.uint8)
        until = time.perf_counter() + 60.0  # a busy machine lets the thread wait
        while (meter.peak_nbytes or 0) < 32 * MIB and time.perf_counter() < until:
            torch.mm(matrix, matrix)
        del temporary
    at_the_end = meter.sample()
    peak = meter.peak_nbytes
    assert at_the_end is not None
    assert peak is not None
    assert at_the_end < 8 * MIB, "samples at the ends alone would not have seen it"
    assert 32 * MIB <= peak < 40 * MIB


@needs_glibc
def test_without_the_thread_the_same_temporary_is_missed() -> None:
    meter = NonModelMeter(period_ms=0)
    meter.start()
    with meter.long_work():
        temporary = torch.empty(32 * MIB, dtype=torch.uint8)
        time.sleep(0.05)
        del temporary
    assert meter.peak_nbytes is not None
    assert meter.peak_nbytes < 8 * MIB
    assert meter_threads() == 0


@needs_glibc
def test_the_peak_inside_a_single_operator_is_seen(meter: NonModelMeter) -> None:
    """Sorting takes values and int64 indices, of which nothing is left when the work ends."""
    matrix = torch.randn(2048, 2048)
    gc.collect()
    meter.start()
    until = time.perf_counter() + 60.0  # where readings are slow, the thread waits longer than one operator takes
    while (meter.peak_nbytes or 0) <= 16 * MIB + 32 * MIB and time.perf_counter() < until:
        with meter.long_work():
            matrix.T.sort(dim=1).values[:, :1].clone()
    assert meter.peak_nbytes is not None
    assert meter.peak_nbytes > 16 * MIB + 32 * MIB


@needs_glibc
def test_the_thread_sleeps_wakes_and_stops(meter: NonModelMeter) -> None:
    meter.start()
    for _ in range(2):
        with meter.long_work(), meter.long_work():
            time.sleep(0.01)
        assert meter_threads() == 1
        time.sleep(0.4)  # long enough for the thread to go to sleep, so that the second round must wake it
    before = meter.peak_nbytes
    with meter.long_work():
        temporary = torch.empty(16 * MIB, dtype=torch.uint8)
        assert before is not None
        await_that(lambda: (meter.peak_nbytes or 0) >= before + 15 * MIB)
        del temporary
    meter.stop()
    assert meter_threads() == 0
    with meter.long_work():
        pass
    assert meter_threads() == 0, "stopped"
    meter.start()
    with meter.long_work():
        assert meter_threads() == 1, "started again"


@needs_glibc
def test_a_collected_meter_leaves_no_thread() -> None:
    meter = NonModelMeter()
    meter.start()
    with meter.long_work():
        assert meter_threads() == 1
    del meter
    gc.collect()
    assert meter_threads() == 0


@pytest.mark.long
@needs_glibc
def test_sampling_costs_about_a_percent_of_a_core(meter: NonModelMeter) -> None:
    meter.start()
    with meter.long_work():
        time.sleep(0.05)
        shares = []
        for _ in range(3):  # other threads of the process may take part of one
            begun_s, before = time.perf_counter(), time.process_time()
            time.sleep(0.5)
            shares.append((time.process_time() - before) / (time.perf_counter() - begun_s))
    assert min(shares) < 0.03, "aimed at 0.01; thrice that is a mistake and not noise"
