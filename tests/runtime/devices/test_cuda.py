"""The CUDA device beside plans: launching without waiting, failures, budgets, homes, readings, closing."""

import gc
import logging
import threading
from collections.abc import Callable

import pytest
import torch
from awaiting import once
from fake_cuda import GIB, FakeCuda
from layouts import layout_of

from chunkc.errors import ChunkcError, HardwareError
from chunkc.ir.actions import Stream
from chunkc.ir.tiers import Tier
from chunkc.runtime.devices.cuda import CudaDevice
from chunkc.runtime.devices.cuda_budget import MemoryLedger
from chunkc.runtime.devices.debug_settings import DebugSettings
from chunkc.runtime.devices.emulated import EmulatedDevice
from chunkc.runtime.storage.chunk_store import ChunkStore

MIB = 2**20


def device_on(api: FakeCuda, named: int = 3 * GIB, host: int = 64 * MIB, **settings: object) -> CudaDevice:
    return CudaDevice("fake", api, MemoryLedger(api), named, host, DebugSettings(**settings))  # type: ignore[arg-type]


def nothing() -> None:
    """Work."""


def kinds(api: FakeCuda, since: int = 0) -> list[tuple[str, int]]:
    return [(c.kind, c.stream) for c in api.calls[since:] if c.kind != "host waits"]


# --- launching --------------------------------------------------------------------------------------------------------


def test_the_device_never_waits_for_the_host() -> None:
    """All streams can finish while an update is stuck, so nothing that waits for the device waits for the worker."""
    api, stuck = FakeCuda(), threading.Event()
    device, fetched = device_on(api), list[int]()
    evict = device.launch(Stream.D2H, "evict", [], nothing)
    update = device.launch(Stream.CPU, "update", [evict], stuck.wait)  # type: ignore[arg-type]
    fetches = [device.launch(Stream.H2D, "fetch", [update], lambda: fetched.append(0))]
    fetches += [device.launch(Stream.H2D, f"fetch {i}", [], lambda i=i: fetched.append(i)) for i in (1, 2)]  # type: ignore[misc]
    ran = device.launch(Stream.COMPUTE, "run that needs no fetch", [evict], nothing)
    api.synchronize()
    assert ran.done() and not update.done() and not any(fetch.done() for fetch in fetches)
    assert fetched == [] and device.num_host_syncs() == 0 and device._streams.num_worker_waits == 0
    stuck.set()
    device.synchronize()
    assert fetched == [0, 1, 2], "in the order of launching"
    assert all(fetch.done() for fetch in fetches)


def test_what_is_held_back_is_enqueued_by_the_next_launch_that_finds_the_update_ended() -> None:
    api, hold = FakeCuda(), threading.Event()
    device = device_on(api)
    h2d = device._streams._side[Stream.H2D].key
    updates = [device.launch(Stream.CPU, "update", [], hold.wait)]  # type: ignore[arg-type]
    updates.append(device.launch(Stream.CPU, "update", [], (later := threading.Event()).wait))  # type: ignore[arg-type]
    begin = len(api.calls)
    for update in updates:
        device.launch(Stream.H2D, "fetch", [update], nothing)
    hold.set()
    updates[0].wait()
    device.launch(Stream.COMPUTE, "run", [], nothing)
    assert kinds(api, begin) == [("run", h2d), ("record", h2d), ("run", 0), ("record", 0)]
    later.set()
    device.synchronize()
    assert kinds(api, begin).count(("run", h2d)) == 2


def test_a_run_that_needs_what_is_held_back_waits_for_the_worker_and_for_no_more() -> None:
    api, hold = FakeCuda(), threading.Event()
    device, order = device_on(api), list[str]()
    first = device.launch(Stream.CPU, "update", [], lambda: order.append("update"))
    second = device.launch(Stream.CPU, "update", [], hold.wait)  # type: ignore[arg-type]
    fetches = [
        device.launch(Stream.H2D, "fetch", [update], lambda: order.append("fetch")) for update in (first, second)
    ]
    device.launch(Stream.COMPUTE, "run", [fetches[0]], lambda: order.append("run"))
    assert order == ["update", "fetch", "run"] and not second.done()
    num_waits = device._streams.num_worker_waits
    with once(lambda: device._streams.num_worker_waits > num_waits, hold.set):
        device.launch(Stream.COMPUTE, "run", [fetches[1]], lambda: order.append("run"))
    assert order == ["update", "fetch", "run", "fetch", "run"] and second.done()


def test_an_update_behind_what_is_held_back_sleeps_on_its_event() -> None:
    device, order = device_on(FakeCuda()), list[str]()
    update = device.launch(Stream.CPU, "update", [], lambda: order.append("update"))
    fetch = device.launch(Stream.H2D, "fetch", [update], lambda: order.append("fetch"))
    device.launch(Stream.CPU, "update", [fetch], lambda: order.append("update again"))
    device.synchronize()
    assert order == ["update", "fetch", "update again"]


def test_a_run_behind_a_failed_update_raises_instead() -> None:
    device, hold, ran = device_on(FakeCuda()), threading.Event(), list[str]()

    def fail_late() -> None:
        hold.wait()
        fail()

    update = device.launch(Stream.CPU, "update c3", [], fail_late)
    fetch = device.launch(Stream.H2D, "fetch c3", [update], nothing)
    threading.Timer(0.05, hold.set).start()
    with pytest.raises(ValueError, match="on purpose"):
        device.launch(Stream.COMPUTE, "run", [fetch], lambda: ran.append("run"))
    assert ran == []
    with pytest.raises(ValueError, match="on purpose"):
        device.launch(Stream.COMPUTE, "run", [update], lambda: ran.append("run"))


def test_a_closed_device_forgets_what_is_held_back() -> None:
    device, hold, ran = device_on(FakeCuda()), threading.Event(), list[str]()
    update = device.launch(Stream.CPU, "update", [], hold.wait)  # type: ignore[arg-type]
    fetch = device.launch(Stream.H2D, "fetch", [update], lambda: ran.append("fetch"))
    threading.Timer(0.05, hold.set).start()
    device.close()
    assert ran == [] and not fetch.done()
    with pytest.raises(ChunkcError, match="closed"):
        fetch.wait()


def test_work_of_one_stream_needs_no_event() -> None:
    api = FakeCuda()
    device = device_on(api)
    first = device.launch(Stream.H2D, "fetch", [], nothing)
    device.launch(Stream.H2D, "fetch again", [first], nothing)
    assert not [c for c in api.calls if c.kind == "wait event"]


def test_another_current_stream_waits_for_the_one_before() -> None:
    api = FakeCuda()
    device = device_on(api)
    device.launch(Stream.COMPUTE, "run", [], nothing)
    api.current = api.new_stream(is_inline=True)
    begin = len(api.calls)
    device.launch(Stream.COMPUTE, "run elsewhere", [], nothing)
    device.launch(Stream.COMPUTE, "run on", [], nothing)
    key = api.current.key
    assert kinds(api, begin) == [("record", 0), ("wait event", key), *[("run", key), ("record", key)] * 2]


def test_events_of_another_device_are_refused() -> None:
    device, other = device_on(FakeCuda()), device_on(FakeCuda())
    foreign = [other.launch(Stream.H2D, "fetch", [], nothing), other.launch(Stream.CPU, "update", [], nothing)]
    foreign.append(EmulatedDevice("emulated", 1, 1).launch(Stream.COMPUTE, "run", [], nothing))
    for event in foreign:
        for stream in (Stream.COMPUTE, Stream.CPU):
            with pytest.raises(ChunkcError, match="no event of fake"):
                device.launch(stream, "run", [event], nothing)


def test_a_profiler_sees_every_action_by_its_text() -> None:
    device, ran = device_on(FakeCuda()), list[str]()
    with torch.autograd.profiler.profile() as found:
        device.launch(Stream.COMPUTE, "run fwd.3 @compute", [], lambda: ran.append("ran"))
    assert "run fwd.3 @compute" in [event.name for event in found.function_events]
    assert ran == ["ran"]


# --- failures ---------------------------------------------------------------------------------------------------------


def fail() -> None:
    raise ValueError("on purpose")


def test_a_failure_of_the_worker_is_told_once_and_lets_nothing_hang() -> None:
    api = FakeCuda()
    device, hold, ran = device_on(api), threading.Event(), threading.Event()

    def fail_late() -> None:
        hold.wait()
        fail()

    update = device.launch(Stream.CPU, "update c3", [], fail_late)
    fetch = device.launch(Stream.H2D, "fetch c3", [update], nothing)
    with once(lambda: device._streams.num_worker_waits == 1, hold.set):
        device.launch(Stream.CPU, "update c3 again", [fetch], ran.set)
    with pytest.raises(ValueError, match="on purpose") as caught:
        device.synchronize()
    assert any("update c3" in note for note in caught.value.__notes__)
    assert not ran.is_set(), "what waits for failed work through a stream fails too"
    device.synchronize()
    device.launch(Stream.CPU, "update", [], ran.set)
    device.synchronize()
    assert ran.is_set()


def test_a_failure_at_launch_names_the_action() -> None:
    device = device_on(FakeCuda())
    with pytest.raises(ValueError, match="on purpose") as caught:
        device.launch(Stream.COMPUTE, "run fwd.3", [], fail)
    assert caught.value.__notes__ == ["in run fwd.3 on stream compute of fake"]


def test_a_closed_device_refuses_and_opens_what_waits() -> None:
    api, before = FakeCuda(), set(threading.enumerate())
    device = device_on(api)
    done = device.launch(Stream.CPU, "update", [], nothing)
    device.launch(Stream.H2D, "fetch", [done], nothing)
    device.close()
    device.close()
    with pytest.raises(ChunkcError, match="closed"):
        device.launch(Stream.H2D, "fetch", [], nothing)
    assert "chunkc-cpu" not in [thread.name for thread in set(threading.enumerate()) - before]


# --- memory -----------------------------------------------------------------------------------------------------------


def test_an_arena_stays_within_its_reservation_and_is_handed_to_all_streams() -> None:
    api = FakeCuda()
    device = device_on(api, poison=True)
    with pytest.raises(HardwareError, match="reserve before allocating"):
        device.allocate_arena(4096)
    device.reserve(8192)
    begin = len(api.calls)
    arena = device.allocate_arena(4096)
    assert arena.data_ptr() % 256 == 0 and arena.view(torch.float32).isnan().all()
    assert sorted(kinds(api, begin)) == sorted(
        [("release cached", -1), ("allocate", -1), ("record", 0)]
        + [("wait event", stream.key) for stream in device._streams._side.values()]
    )
    with pytest.raises(HardwareError, match="of which arenas hold 4096"):
        device.allocate_arena(8192)
    device.free_arena(arena)
    del arena
    device.allocate_arena(8192)
    assert device.num_allocations() == 2


def test_an_arena_that_the_gpu_does_not_have_is_refused_with_numbers() -> None:
    api = FakeCuda(has_no_memory=True)
    device = device_on(api)
    device.reserve(GIB)
    with pytest.raises(HardwareError, match=rf"{GIB} bytes of the arena.*of {11 * GIB} free"):
        device.allocate_arena(GIB)


def test_homes_are_pinned_exactly_and_unpinned_before_they_go() -> None:
    api = FakeCuda()
    device = device_on(api)
    home = device.allocate_home(3 * MIB + 5)
    assert api.pinned == {home.data_ptr(): 3 * MIB + 4096}
    assert home.numel() == 3 * MIB + 5 and not home.any()
    assert device.free_host_nbytes() == 61 * MIB - 5
    home.fill_(7)
    device.free_home(home)
    assert not api.pinned and not home.any() and device.free_host_nbytes() == 64 * MIB
    with pytest.raises(HardwareError, match="already freed"):
        device.free_home(home)
    with pytest.raises(HardwareError, match="a home of 67108865 bytes"):
        device.allocate_home(64 * MIB + 1)


def test_a_home_that_cuda_does_not_pin_takes_nothing() -> None:
    api = FakeCuda(refuses_to_pin=True)
    device = device_on(api)
    with pytest.raises(HardwareError, match="does not pin"):
        device.allocate_home(MIB)
    assert device.free_host_nbytes() == 64 * MIB


def test_large_homes_are_touched_by_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, zero = set[str](), torch.Tensor.zero_

    def spy(memory: torch.Tensor) -> torch.Tensor:
        threads.add(threading.current_thread().name)
        return zero(memory)

    monkeypatch.setattr("chunkc.runtime.devices.pinned_memory._TOUCHED_NBYTES", MIB)
    monkeypatch.setattr(torch.Tensor, "zero_", spy)
    device_on(FakeCuda()).allocate_home(16 * MIB)
    assert threads and all(name.startswith("chunkc-touch") for name in threads)


def test_a_device_that_nobody_uses_any_more_unpins_its_homes() -> None:
    api = FakeCuda()
    device = device_on(api)
    home = device.allocate_home(MIB)
    device.launch(Stream.CPU, "update", [], nothing)
    del device
    gc.collect()
    assert not api.pinned
    kinds_since = [c.kind for c in api.calls]
    assert kinds_since.index("synchronize") < kinds_since.index("unregister"), "nothing copies any more"
    assert home.numel() == MIB, "its views may stay"


def test_readings_are_peaks_above_the_baseline() -> None:
    api = FakeCuda()
    device = device_on(api)
    assert device.read_nonmodel_nbytes() == 0
    api.requested.update(current=100)
    device.start_reading()
    api.requested.update(current=150, peak=180)
    device.sample_nonmodel()
    assert device.read_nonmodel_nbytes() == 80
    device.pause_reading()
    api.requested.update(current=1150, peak=5000)
    assert device.read_nonmodel_nbytes() == 80
    device.resume_reading()  # the 1000 taken meanwhile stay out
    assert device.read_nonmodel_nbytes() == 80
    api.requested.update(current=1200, peak=1190)
    assert device.read_nonmodel_nbytes() == 90
    device.start_reading()
    assert device.read_nonmodel_nbytes() == 0


def test_blocks_are_stated_beside_the_bytes_of_tensors() -> None:
    """A tensor of 20.2 MiB takes a block of 22 MiB, of which up to 1 MiB is not worth splitting off."""
    api = FakeCuda()
    device = device_on(api)
    device.start_reading()
    api.requested.update(current=0, peak=202 * MIB // 10)
    api.allocated.update(current=0, peak=21 * MIB)
    api.reserved.update(current=22 * MIB, peak=22 * MIB)
    assert device.read_nonmodel_nbytes() == 202 * MIB // 10
    assert device.allocator_peaks() == {"allocated_peak_nbytes": 21 * MIB, "reserved_peak_nbytes": 22 * MIB}
    assert device.memory_text().startswith(f"0 bytes requested in blocks of 0, {22 * MIB} reserved by torch")


def test_fragments_past_the_budget_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    api = FakeCuda()
    api.allocated["current"] = api.reserved["current"] = MIB
    device = device_on(api)
    api.reserved["peak"] = MIB + device.device_budget_nbytes
    with caplog.at_level(logging.WARNING, logger="chunkc"):
        device.read_nonmodel_nbytes()
        assert not caplog.records
        api.reserved["peak"] += 1
        device.read_nonmodel_nbytes()
        device.read_nonmodel_nbytes()
    assert [r.getMessage().count("expandable_segments:True") for r in caplog.records] == [1]


def test_synchronous_mode_leaves_nothing_under_way() -> None:
    device, done = device_on(FakeCuda(), synchronous=True), list[str]()
    works: list[tuple[Stream, Callable[[], None]]] = [
        (stream, lambda s=stream: done.append(str(s)))  # type: ignore[misc]
        for stream in (Stream.H2D, Stream.CPU, Stream.D2H)
    ]
    for number, (stream, work) in enumerate(works, 1):
        device.launch(stream, str(stream), [], work)
        assert len(done) == number


def test_a_store_that_does_not_get_all_its_homes_gives_back_those_it_got() -> None:
    layout = layout_of([(13, 7), (200,)], "bfloat16")
    api = FakeCuda()
    device = device_on(api, host=layout.nbytes_in(Tier.HOST) - 1)
    with pytest.raises(HardwareError, match="host bytes are free"):
        ChunkStore(layout, device)
    assert not api.pinned and device.free_host_nbytes() == layout.nbytes_in(Tier.HOST) - 1
