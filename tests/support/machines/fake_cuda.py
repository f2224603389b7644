"""CUDA for the CUDA device on a machine without one: queues that carry work out in order, and a record of every call.

Each stream but the one that computes, which is the caller's thread, is a thread with a queue. Device memory is host
memory. Allocator statistics are what a test sets, plus the arenas.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from chunkc.errors import HardwareError
from chunkc.runtime.update.rules import ADAM, LION, ROW_NUMEL, SGD, SGD_MOMENTUM, Formula

GIB = 2**30


class FakeEvent:
    """Happens once. Nobody may ask for it when it has been used again, while streams still wait for it."""

    def __init__(self, number: int) -> None:
        self._number = number
        self.happened = threading.Event()
        self.is_used_again = False

    @property
    def number(self) -> int:
        assert not self.is_used_again, f"event {self._number} stands for something else by now"
        return self._number


class FakeStream:
    def __init__(self, key: int, *, is_inline: bool) -> None:
        self.key = key
        self.is_inline = is_inline
        self._items: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.error: BaseException | None = None
        if not is_inline:
            threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            item = self._items.get()
            try:
                item()
            except BaseException as error:
                self.error = error

    def put(self, item: Callable[[], None]) -> None:
        if self.is_inline:
            item()
        else:
            self._items.put(item)


@dataclass(frozen=True)
class Call:
    """One call of the API: ``value`` is an event's number, bytes, or the number that work was given by a recorder."""

    kind: str
    stream: int = -1
    value: int = 0


@dataclass
class FakeCuda:
    """See the module docstring; of bytes, ``requested`` and ``allocated`` are beside the arenas.

    Without ``runs`` calls are recorded only, and no event ever happens.
    """

    requested: dict[str, int] = field(default_factory=lambda: {"current": 0, "peak": 0})
    allocated: dict[str, int] = field(default_factory=lambda: {"current": 0, "peak": 0})
    reserved: dict[str, int] = field(default_factory=lambda: {"current": 0, "peak": 0})
    free: int = 10 * GIB
    total: int = 11 * GIB
    refuses_to_pin: bool = False
    has_no_memory: bool = False
    runs: bool = True

    def __post_init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.calls: list[Call] = []
        self.pinned: dict[int, int] = {}
        self.uploads: list[torch.Tensor] = []
        self._lock = threading.RLock()
        self._num_events = 0
        self._streams = [FakeStream(0, is_inline=True)]
        self.current = self._streams[0]

    def note(self, kind: str, stream: int = -1, value: int = 0) -> None:
        with self._lock:
            self.calls.append(Call(kind, stream, value))

    def new_stream(self, *, is_inline: bool = False) -> FakeStream:
        self._streams.append(FakeStream(len(self._streams), is_inline=is_inline or not self.runs))
        return self._streams[-1]

    def current_stream(self) -> FakeStream:
        return self.current

    def key(self, stream: FakeStream) -> int:
        return stream.key

    def run(self, stream: FakeStream, work: Callable[[], None]) -> None:
        self.note("run", stream.key, getattr(work, "number", 0))
        if self.runs:
            stream.put(work)

    def record(self, stream: FakeStream, used: FakeEvent | None = None) -> FakeEvent:
        if used is not None:
            assert not used.is_used_again
            used.is_used_again = True
        with self._lock:
            self._num_events += 1
            event = FakeEvent(self._num_events)
        self.note("record", stream.key, event.number)
        if self.runs:
            stream.put(event.happened.set)
        return event

    def wait_event(self, stream: FakeStream, event: FakeEvent) -> None:
        self.note("wait event", stream.key, event.number)
        if self.runs:
            stream.put(partial(_wait, event.happened, event.number))

    def is_done(self, event: FakeEvent) -> bool:
        return event.number > 0 and event.happened.is_set()

    def wait_on_host(self, event: FakeEvent) -> None:
        self.note("host waits", -1, event.number)
        if self.runs:
            _wait(event.happened, event.number)

    def synchronize(self) -> None:
        self.note("synchronize")
        if not self.runs:
            return
        ends = [self.record(stream) for stream in self._streams]
        for end in ends:
            _wait(end.happened, end.number)
        for stream in self._streams:
            if stream.error is not None:
                raise RuntimeError("a stream failed") from stream.error

    def sleep(self, stream: FakeStream, milliseconds: float) -> None:
        if self.runs:
            stream.put(lambda: time.sleep(milliseconds / 1000))

    def warm_up(self) -> None:
        self.note("warm up")

    def memory_info(self) -> tuple[int, int]:
        return self.free, self.total

    def allocator_nbytes(self, kind: str, moment: str) -> int:
        found: dict[str, int] = getattr(self, kind)
        return found[moment]

    def reset_peaks(self) -> None:
        self.note("reset peaks")
        for kind in (self.requested, self.allocated, self.reserved):
            kind["peak"] = kind["current"]

    def release_cached(self) -> None:
        self.note("release cached")

    def allocate(self, nbytes: int) -> torch.Tensor:
        self.note("allocate", -1, nbytes)
        if self.has_no_memory:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate much")
        memory = torch.zeros(nbytes + 256, dtype=torch.uint8)
        start = -memory.data_ptr() % 256
        return memory[start : start + nbytes]

    def upload(self, table: torch.Tensor, target: torch.Tensor) -> None:
        self.uploads.append(table.clone())
        target.copy_(table)

    def register_host(self, address: int, nbytes: int) -> None:
        self.note("register", -1, nbytes)
        if self.refuses_to_pin:
            raise HardwareError(f"CUDA does not pin {nbytes} bytes")
        assert address not in self.pinned
        self.pinned[address] = nbytes

    def unregister_host(self, address: int) -> None:
        self.note("unregister", -1, self.pinned[address])
        del self.pinned[address]

    def kernels(self) -> TorchKernels:
        return TorchKernels()


def _wait(happened: threading.Event, number: int) -> None:
    assert happened.wait(timeout=30), f"event {number} never happened"


class TorchKernels:
    """The kernels' definitions, in float32 operators of torch; ``num_built`` launches were made ready."""

    def __init__(self) -> None:
        self.num_built = 0

    def _built(self, kernel: Callable[..., None], *tensors: torch.Tensor) -> Callable[[], None]:
        self.num_built += 1
        return partial(kernel, *tensors)

    def chunk_update(self, rule: str, states: tuple[torch.Tensor, ...], *tensors: torch.Tensor) -> Callable[[], None]:
        self.num_built += 1
        return partial(_chunk_update, FORMULAS[rule], states, *tensors)

    def restore(self, *tensors: torch.Tensor) -> Callable[[], None]:
        return self._built(_restore, *tensors)

    def grad_norm(self, *tensors: torch.Tensor) -> Callable[[], None]:
        return self._built(_grad_norm, *tensors)

    def make_tiles(self, pieces: Sequence[tuple[int, int, int]], device: torch.device) -> torch.Tensor:
        return torch.tensor([list(piece) for piece in pieces], dtype=torch.int32, device=device).reshape(-1, 3)

    make_norm_tiles = make_tiles


FORMULAS = {rule.name: rule.formula for rule in (ADAM, SGD, SGD_MOMENTUM, LION)}


def _chunk_update(formula: Formula, states: tuple[torch.Tensor, ...], *tensors: torch.Tensor) -> None:
    grad, payload, tiles, row_of_param, rows, control = tensors
    assert rows.shape[1] == ROW_NUMEL
    for start, end, param in tiles.tolist():
        span, row = slice(start, end), int(row_of_param[param])
        lists = [state[span] for state in states]
        if row >= 0 and not float(control[1]):
            *coefficients, is_first = rows[row]
            if is_first:
                for state in lists[1:]:
                    state.zero_()
            new = formula(grad[span].float() * control[0], lists[0], lists[1:], coefficients, _sqrt)
            for state, value in zip(lists, new, strict=True):
                state.copy_(value)
        payload[span] = lists[0].to(payload.dtype)


def _sqrt(values: torch.Tensor) -> torch.Tensor:
    return values.double().sqrt().float()  # rounded to nearest, as torch's in float32 need not be


def _restore(param32: torch.Tensor, payload: torch.Tensor, tiles: torch.Tensor) -> None:
    for start, end, _ in tiles.tolist():
        payload[start:end] = param32[start:end].to(payload.dtype)


def _grad_norm(grad: torch.Tensor, tiles: torch.Tensor, out: torch.Tensor, partial: torch.Tensor) -> None:
    assert partial.shape == (2, tiles.shape[0])
    spans = [grad[start:end].double() for start, end, _ in tiles.tolist()]
    out[0] = sum(float(span.square().sum()) for span in spans)
    out[1] = float(not all(bool(span.isfinite().all()) for span in spans))
