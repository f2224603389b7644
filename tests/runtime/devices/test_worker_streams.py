"""Order, waits, failures and threads of the emulated streams. Blocking work is released by the tests, never timed."""

import gc
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch
from awaiting import once
from child_environment import environment

from chunkc.errors import ChunkcError
from chunkc.ir.actions import Stream
from chunkc.runtime.devices.debug_settings import DebugSettings
from chunkc.runtime.devices.emulated import EmulatedDevice

WORKERS = [stream for stream in Stream if stream is not Stream.COMPUTE]
MIB = 2**20


class Broken(Exception):
    """What failing work raises here."""


def fail() -> None:
    raise Broken


def nothing() -> None:
    return None


def chunkc_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("chunkc-")}


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    made = EmulatedDevice("emulated-1m-1m", MIB, MIB)
    yield made
    made.close()


@pytest.mark.parametrize("stream", WORKERS)
def test_one_stream_is_first_in_first_out(device: EmulatedDevice, stream: Stream) -> None:
    order: list[int] = []
    gate = threading.Event()
    device.launch(stream, "f0", [], lambda: (gate.wait(), None)[1])
    events = [device.launch(stream, f"f{i}", [], lambda i=i: order.append(i)) for i in range(200)]
    assert not any(event.done() for event in events)
    assert order == []
    gate.set()
    device.synchronize()
    assert order == list(range(200))
    assert all(event.done() for event in events)


def test_streams_run_at_the_same_time(device: EmulatedDevice) -> None:
    barrier = threading.Barrier(len(WORKERS) + 1, timeout=30)
    for stream in WORKERS:
        device.launch(stream, "f0", [], lambda: (barrier.wait(), None)[1])
    device.launch(Stream.COMPUTE, "f1", [], lambda: (barrier.wait(), None)[1])
    device.synchronize()


def test_compute_runs_on_the_caller_and_others_on_their_own_thread(device: EmulatedDevice) -> None:
    seen: dict[Stream, int] = {}

    def note(stream: Stream) -> None:
        seen[stream] = threading.get_ident()

    for _ in range(2):
        for stream in Stream:
            device.launch(stream, "f0", [], lambda stream=stream: note(stream))
        device.synchronize()
    assert seen[Stream.COMPUTE] == threading.get_ident()
    assert len(set(seen.values())) == len(Stream)

    backward = threading.Thread(target=lambda: device.launch(Stream.COMPUTE, "b0", [], lambda: note(Stream.COMPUTE)))
    backward.start()
    backward.join()
    assert seen[Stream.COMPUTE] == backward.ident


def test_work_waits_for_other_streams(device: EmulatedDevice) -> None:
    order: list[str] = []
    gate = threading.Event()
    first = device.launch(Stream.H2D, "f0", [], lambda: (gate.wait(), order.append("h2d"))[1])
    second = device.launch(Stream.CPU, "f1", [first], lambda: order.append("cpu"))
    third = device.launch(Stream.D2H, "f2", [first, second], lambda: order.append("d2h"))
    free = device.launch(Stream.COMM, "f3", [], lambda: order.append("comm"))
    free.wait()
    assert order == ["comm"]
    gate.set()
    done = device.launch(Stream.COMPUTE, "f4", [third], lambda: order.append("compute"))
    assert done.done()
    assert order == ["comm", "h2d", "cpu", "d2h", "compute"]


def test_gradients_are_not_recorded_on_workers(device: EmulatedDevice) -> None:
    modes: list[bool] = []
    device.launch(Stream.CPU, "s0", [], lambda: modes.append(torch.is_grad_enabled())).wait()
    device.launch(Stream.COMPUTE, "s1", [], lambda: modes.append(torch.is_grad_enabled()))
    assert modes == [False, True]


def test_a_failure_runs_through_waits_and_is_told_once(device: EmulatedDevice) -> None:
    ran: list[str] = []
    gate = threading.Event()
    bad = device.launch(Stream.H2D, "f7", [], lambda: (gate.wait(), fail())[1])
    after = device.launch(Stream.CPU, "f8", [bad], lambda: ran.append("cpu"))
    last = device.launch(Stream.D2H, "f9", [after], lambda: ran.append("d2h"))
    gate.set()
    with pytest.raises(Broken) as caught:
        device.synchronize()
    assert any("f7 on stream h2d of emulated-1m-1m" in note for note in caught.value.__notes__)
    assert ran == []
    assert bad.done() and after.done() and last.done()
    with pytest.raises(Broken) as again:
        last.wait()
    assert again.value is caught.value, "an event keeps its failure"
    device.synchronize()
    device.launch(Stream.D2H, "f10", [], lambda: ran.append("usable")).wait()
    assert ran == ["usable"]


def test_the_next_launch_tells(device: EmulatedDevice) -> None:
    bad = device.launch(Stream.H2D, "f0", [], fail)
    while not bad.done():
        pass
    ran: list[str] = []
    with pytest.raises(Broken):
        device.launch(Stream.CPU, "f1", [], lambda: ran.append("refused"))
    device.launch(Stream.CPU, "f2", [], lambda: ran.append("accepted"))
    device.synchronize()
    assert ran == ["accepted"]


def test_compute_that_waits_for_a_failure_does_not_run_and_raises(device: EmulatedDevice) -> None:
    gate = threading.Event()
    ran: list[str] = []
    bad = device.launch(Stream.H2D, "f0", [], lambda: (gate.wait(), fail())[1])
    threading.Timer(0.02, gate.set).start()
    with pytest.raises(Broken):
        device.launch(Stream.COMPUTE, "f1", [bad], lambda: ran.append("compute"))
    assert ran == []
    device.synchronize()


def test_compute_raises_its_own_failure_at_once(device: EmulatedDevice) -> None:
    with pytest.raises(Broken):
        device.launch(Stream.COMPUTE, "f0", [], fail)
    device.synchronize()


def test_work_launched_later_that_waits_for_an_old_failure_is_told_again(device: EmulatedDevice) -> None:
    bad = device.launch(Stream.H2D, "f0", [], fail)
    with pytest.raises(Broken):
        device.synchronize()
    device.launch(Stream.CPU, "f1", [bad], nothing)
    with pytest.raises(Broken):
        device.synchronize()
    device.synchronize()


def test_two_failures_that_are_independent_are_both_told(device: EmulatedDevice) -> None:
    gate = threading.Event()
    first = device.launch(Stream.H2D, "f0", [], fail)
    late = device.launch(Stream.CPU, "f1", [], lambda: (gate.wait(), fail())[1])
    with pytest.raises(Broken):
        first.wait()
    gate.set()
    with pytest.raises(Broken) as caught:
        device.synchronize()
    assert any("f1" in note for note in caught.value.__notes__)
    with pytest.raises(Broken):
        late.wait()


def test_host_waits_and_synchronizes_are_counted(device: EmulatedDevice) -> None:
    gate = threading.Event()
    blocked = device.launch(Stream.H2D, "f0", [], lambda: (gate.wait(), None)[1])
    threading.Timer(0.02, gate.set).start()
    device.launch(Stream.COMPUTE, "f1", [blocked], nothing)
    assert device.num_host_syncs() == 0
    blocked.wait()
    assert device.num_host_syncs() == 0, "it was done"
    gate.clear()
    blocked = device.launch(Stream.H2D, "f2", [], lambda: (gate.wait(), None)[1])
    with once(lambda: device.num_host_syncs() == 1, gate.set):
        blocked.wait()
    device.synchronize()
    assert device.num_host_syncs() == 2


def test_events_of_others_are_refused(device: EmulatedDevice) -> None:
    class Foreign:
        def done(self) -> bool:
            return True

        def wait(self) -> None:
            return None

    with pytest.raises(ChunkcError, match=r"f3 waits for .*Foreign"):
        device.launch(Stream.H2D, "f3", [Foreign()], nothing)


def test_ctrl_c_while_waiting_leaves_the_device_usable(device: EmulatedDevice) -> None:
    gate = threading.Event()
    order: list[str] = []
    blocked = device.launch(Stream.H2D, "f0", [], lambda: (gate.wait(), order.append("copy"))[1])
    try:
        with pytest.raises(KeyboardInterrupt):
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
            device.launch(Stream.COMPUTE, "f1", [blocked], lambda: order.append("never"))
        assert not blocked.done()
        with pytest.raises(KeyboardInterrupt):
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
            device.synchronize()
    finally:
        gate.set()  # closing waits for the worker
    device.synchronize()
    device.launch(Stream.COMPUTE, "f2", [blocked], lambda: order.append("compute"))
    assert order == ["copy", "compute"]


def test_synchronous_mode_runs_everything_in_place() -> None:
    threads = chunkc_threads()
    device = EmulatedDevice("emulated", MIB, MIB, DebugSettings(synchronous=True))
    seen: list[tuple[Stream, int]] = []
    last = None
    for stream in Stream:
        waits = [] if last is None else [last]
        last = device.launch(stream, "f0", waits, lambda stream=stream: seen.append((stream, threading.get_ident())))
        assert last.done()
    assert seen == [(stream, threading.get_ident()) for stream in Stream]
    assert chunkc_threads() == threads
    with pytest.raises(Broken):
        device.launch(Stream.H2D, "f1", [], fail)
    device.synchronize()


def test_synchronous_mode_refuses_to_wait_for_what_has_not_run(device: EmulatedDevice) -> None:
    gate = threading.Event()
    undone = device.launch(Stream.H2D, "f0", [], lambda: (gate.wait(), None)[1])
    synchronous = EmulatedDevice("emulated", MIB, MIB, DebugSettings(synchronous=True))
    with pytest.raises(ChunkcError, match="f1 on stream cpu"):
        synchronous.launch(Stream.CPU, "f1", [undone], nothing)
    gate.set()


def test_close_finishes_what_was_launched_and_ends_the_threads() -> None:
    threads = chunkc_threads()
    device = EmulatedDevice("emulated", MIB, MIB)
    done: list[int] = []
    for i in range(50):
        for stream in WORKERS:
            device.launch(stream, "f0", [], lambda i=i: done.append(i))
    assert len(chunkc_threads() - threads) == len(WORKERS)
    device.close()
    device.close()
    assert len(done) == 50 * len(WORKERS)
    assert chunkc_threads() == threads
    with pytest.raises(ChunkcError, match="closed"):
        device.launch(Stream.H2D, "f0", [], nothing)


def test_close_logs_a_failure_that_nobody_saw(caplog: pytest.LogCaptureFixture) -> None:
    device = EmulatedDevice("emulated", MIB, MIB)
    device.launch(Stream.H2D, "f0", [], fail)
    with caplog.at_level(logging.ERROR, logger="chunkc"):
        device.close()
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [Broken]


def test_a_collected_device_stops_its_workers() -> None:
    threads = chunkc_threads()
    device = EmulatedDevice("emulated", MIB, MIB)
    for stream in WORKERS:
        device.launch(stream, "f0", [], nothing)
    device.synchronize()
    gone = weakref.ref(device)
    del device
    gc.collect()
    assert gone() is None
    assert chunkc_threads() <= threads  # fewer, where those of a device before it have ended by now


def test_idle_workers_keep_nothing_alive(device: EmulatedDevice) -> None:
    tensor = torch.ones(10)
    gone = weakref.ref(tensor)
    events = [device.launch(stream, "f0", [], lambda tensor=tensor: (tensor.add_(1), None)[1]) for stream in WORKERS]
    device.synchronize()
    del tensor
    gc.collect()
    assert gone() is None
    assert all(event.done() for event in events)


def test_a_forked_child_is_refused_and_the_parent_goes_on(device: EmulatedDevice) -> None:
    device.launch(Stream.H2D, "f0", [], nothing).wait()
    pid = os.fork()
    if pid == 0:
        refused = 0
        for use in (lambda: device.launch(Stream.H2D, "f1", [], nothing), device.synchronize):
            try:
                use()
            except ChunkcError as error:
                refused += "fork" in str(error)
        device.close()
        os._exit(0 if refused == 2 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    ran: list[int] = []
    device.launch(Stream.H2D, "f2", [], lambda: ran.append(1)).wait()
    assert ran == [1]


@pytest.mark.long
def test_exit_without_close_neither_hangs_nor_loses_work(tmp_path: os.PathLike[str]) -> None:
    script = textwrap.dedent("""
        import time
        from chunkc.ir.actions import Stream
        from chunkc.runtime.devices.emulated import EmulatedDevice
        device = EmulatedDevice("emulated", 2**20, 2**20)
        for stream in Stream:
            device.launch(stream, "f0", [], lambda: time.sleep(0.05))
        device.launch(Stream.CPU, "s1", [], lambda: print("drained", flush=True))
    """)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment()
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "drained\n", "")
