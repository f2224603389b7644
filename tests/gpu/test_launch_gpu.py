"""Launches on CUDA streams: where their work goes, what stays current behind them, events that are used again, cost."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from machines import Machine

from chunkc.ir.actions import Stream
from chunkc.runtime.devices.cuda_api import CudaApi
from chunkc.runtime.devices.cuda_streams import CudaStreams
from chunkc.runtime.devices.debug_settings import DebugSettings

pytestmark = pytest.mark.gpu
Note = Callable[[str, object], None]
NUM_LAUNCHES = 2000


@pytest.fixture
def streams(cuda: Machine) -> Iterator[CudaStreams]:
    found = CudaStreams("a GPU", CudaApi(cuda.torch_device.index or 0), DebugSettings())
    yield found
    found.close()


def nothing() -> None:
    """Work."""


def test_work_goes_to_its_stream_and_the_callers_stays(streams: CudaStreams) -> None:
    """From the default stream and from another one; also when the work raises."""
    sides = dict[Stream, torch.cuda.Stream]()
    for caller in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(caller):
            for stream in (Stream.COMPUTE, Stream.H2D, Stream.D2H, Stream.COMM):
                seen = list[torch.cuda.Stream]()
                streams.launch(stream, "look", [], lambda seen=seen: seen.append(torch.cuda.current_stream()))  # type: ignore[misc]
                assert seen == [caller if stream is Stream.COMPUTE else sides.setdefault(stream, seen[0])]
                with pytest.raises(ZeroDivisionError):
                    streams.launch(stream, "raise", [], lambda: 1 / 0)
                assert torch.cuda.current_stream() == caller
        assert len({caller, *sides.values()}) == 4
    streams.synchronize()


def test_another_thread_launches_on_its_own_stream(streams: CudaStreams) -> None:
    seen, own = list[torch.cuda.Stream](), torch.cuda.Stream()

    def launch() -> None:
        with torch.cuda.stream(own):
            streams.launch(Stream.COMPUTE, "look", [], lambda: seen.append(torch.cuda.current_stream()))

    for _ in range(2):
        streams.launch(Stream.COMPUTE, "look", [], lambda: seen.append(torch.cuda.current_stream()))
        thread = threading.Thread(target=launch)
        thread.start()
        thread.join()
    assert seen == [torch.cuda.current_stream(), own] * 2


def test_a_wait_is_for_what_an_event_stood_for_when_it_was_enqueued(streams: CudaStreams, cuda: Machine) -> None:
    """Events that nobody holds are recorded again, on other streams, while streams still wait for what they were."""
    source, target = (cuda.put(torch.zeros(1 << 20)) for _ in range(2))
    api, num_wrong = CudaApi(cuda.torch_device.index or 0), 0
    for value in range(1, 41):
        late = streams.launch(Stream.H2D, "sleep", [], lambda: api.sleep(torch.cuda.current_stream(), 2.0))
        filled = streams.launch(Stream.H2D, "fill", [late], lambda value=value: source.fill_(value))  # type: ignore[misc]
        streams.launch(Stream.D2H, "copy", [filled], lambda: target.copy_(source))
        del late, filled
        for _ in range(100):
            streams.launch(Stream.COMPUTE, "run", [], nothing)
        streams.synchronize()
        num_wrong += int((target != value).any())
    assert num_wrong == 0


@pytest.mark.parametrize("stream", [Stream.COMPUTE, Stream.H2D])
def test_what_a_launch_costs_the_thread(stream: Stream, streams: CudaStreams, note: Note) -> None:
    """Microseconds of a launch of nothing, the least of five; a reading, no bound."""
    found = []
    for _ in range(5):
        streams.synchronize()
        begun_s = time.perf_counter()
        for _ in range(NUM_LAUNCHES):
            streams.launch(stream, "work", [], nothing)
        found.append((time.perf_counter() - begun_s) / NUM_LAUNCHES * 1e6)
    note(f"a launch on {stream}, us", round(min(found), 2))
