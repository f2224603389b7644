"""Streams of the CUDA device around a wait for all of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from fake_cuda import FakeCuda, FakeStream

from chunkc.ir.actions import Stream
from chunkc.runtime.cuda_streams import CudaStreams
from chunkc.runtime.debug_settings import DebugSettings


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
