"""CUDA streams by torch's private names, over a double of them: which stream is current, and when."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from chunkc._torch_compat import cuda
from chunkc._torch_compat.cuda import call_on_cuda_stream, is_current_cuda_stream


@dataclass(frozen=True)
class Stream:
    stream_id: int
    device_index: int = 0

    @property
    def cuda_stream(self) -> int:
        return self.stream_id + 1000 if self.stream_id else 0

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.device_index)


class Runtime:
    """Two devices, each with a current stream, under the names of ``torch._C``; ``calls`` in order."""

    def __init__(self) -> None:
        self.device = 0
        self.current = [Stream(0, 0), Stream(0, 1)]
        self.calls: list[str] = []

    def _cuda_getDevice(self) -> int:
        return self.device

    def _cuda_getCurrentRawStream(self, index: int) -> int:
        return self.current[index].cuda_stream

    def _cuda_getCurrentStream(self, index: int) -> tuple[int, int, int]:
        return self.current[index].stream_id, index, 1

    def _cuda_setStream(self, stream_id: int, device_index: int, device_type: int) -> None:
        assert device_type == 1
        self.calls.append("set")
        self.device, self.current[device_index] = device_index, Stream(stream_id, device_index)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.calls.append("torch")
        device, before = self.device, self.current[stream.device_index]
        self.device, self.current[stream.device_index] = stream.device_index, stream
        yield
        self.device, self.current[stream.device_index] = device, before


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    found = Runtime()
    for name in cuda._NAMES:
        monkeypatch.setattr(torch._C, name, getattr(found, name), raising=False)
    monkeypatch.setattr(cuda, "_HAS_NAMES", True)
    monkeypatch.setattr(torch.cuda, "stream", found.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: found.current[device.index])
    return found


Call = Callable[[Stream, Callable[[], None]], None]
call: Call = call_on_cuda_stream  # type: ignore[assignment]


def seen(runtime: Runtime, stream: Stream) -> list[Any]:
    found: list[Any] = []
    before = runtime.device, *runtime.current
    call(stream, lambda: found.extend([runtime.device, runtime.current[runtime.device]]))
    assert (runtime.device, *runtime.current) == before
    return [*found, runtime.calls]


def test_a_stream_of_the_current_device_takes_two_calls(runtime: Runtime) -> None:
    assert seen(runtime, Stream(5)) == [0, Stream(5), ["set", "set"]]


def test_the_current_stream_takes_none(runtime: Runtime) -> None:
    runtime.current[0] = Stream(7)
    assert seen(runtime, Stream(7)) == [0, Stream(7), []]


def test_a_stream_of_another_device_takes_torchs_context(runtime: Runtime) -> None:
    runtime.current[1] = Stream(5, 1)  # current there, but that device is not
    assert seen(runtime, Stream(5, 1)) == [1, Stream(5, 1), ["torch"]]


def test_without_the_names_torchs_context_is_taken(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_HAS_NAMES", False)
    assert seen(runtime, Stream(5)) == [0, Stream(5), ["torch"]]
    assert is_current_cuda_stream(Stream(0)) and not is_current_cuda_stream(Stream(5))  # type: ignore[arg-type]


def test_what_raises_or_changes_the_device_leaves_the_stream_as_it_was(runtime: Runtime) -> None:
    runtime.current[0] = Stream(3)

    def fail() -> None:
        runtime.device = 1
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        call(Stream(5), fail)
    assert (runtime.device, runtime.current[0]) == (0, Stream(3))


def test_the_current_stream_is_that_of_its_device(runtime: Runtime) -> None:
    runtime.current[1] = Stream(5, 1)
    assert is_current_cuda_stream(Stream(5, 1)) and is_current_cuda_stream(Stream(0))  # type: ignore[arg-type]
    assert not is_current_cuda_stream(Stream(5)) and not is_current_cuda_stream(Stream(0, 1))  # type: ignore[arg-type]
