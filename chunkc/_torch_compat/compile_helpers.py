"""Processes that compile segments beside this one, into Inductor's cache on disk.

Inductor waits for the C++ compiler after each graph, so that one core works. Where graphs are not in the cache, and
many are left, helpers are started, one for each further core. They take segments from the end of the queue, this
process takes them from its beginning; what helpers have compiled, it then finds in the cache:

    this process     s0   s1   s2   s3   s4       s8' s7' s6' s5'        ' from the cache
    helper           (imports torch)    s8   s7   s6   s5

A helper decides nothing and returns nothing: where one fails, it ends, and this process compiles what it had. There are
none for a GPU, whose memory the context of another process would take.
"""

from __future__ import annotations

import os
import select
import struct
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from types import TracebackType
from typing import IO, Any, Final, Generic, Protocol, Self, TypeVar

import torch

from chunkc._torch_compat.inductor_jobs import compile_packed, num_compile_processes, packed

MIN_SEGMENTS: Final = 6
"""Left to compile for each helper, or else importing torch takes longer than it saves."""
SLOW_S: Final = 0.3
"""Seconds for a segment that is worth a helper."""
MAX_HELPERS: Final = 7
PATIENCE: Final = 10.0
"""How often the time of the slowest segment so far a helper may take, and at least so many seconds."""

_LENGTH: Final = struct.Struct("<Q")
_PROGRAM: Final = "import sys; sys.path[:] = {path!r}; from chunkc._torch_compat.compile_helpers import serve; serve()"


class Compilable(Protocol):
    """Interface of a segment: a graph, with fake tensors (or constants) for its inputs."""

    @property
    def module(self) -> torch.fx.GraphModule: ...
    @property
    def examples(self) -> Sequence[Any]: ...


S = TypeVar("S", bound=Compilable)


def serve() -> None:
    """Compile what comes on standard input until it ends; a byte on standard output says that one is done."""
    arrived: SimpleQueue[bytes | None] = SimpleQueue()
    jobs, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    threading.Thread(target=_receive, args=(jobs, arrived), daemon=True).start()
    replies.write(b".")
    while (data := arrived.get()) is not None:
        compile_packed(data)
        replies.write(b".")


def _receive(jobs: IO[bytes], arrived: SimpleQueue[bytes | None]) -> None:
    """Read jobs as they come, so that whoever writes them does not wait for one that is under way."""
    while len(head := jobs.read(_LENGTH.size)) == _LENGTH.size:
        arrived.put(jobs.read(_LENGTH.unpack(head)[0]))
    arrived.put(None)


@dataclass(slots=True)
class Helper(Generic[S]):
    """One helper, with the segments that it was handed and has not said to be done, the oldest first."""

    process: subprocess.Popen[bytes]
    segments: deque[S] = field(default_factory=deque)
    is_ready: bool = False
    has_ended: bool = False

    def replies(self, timeout_s: float = 0.0) -> int:
        """How many bytes it has said since the last call, waiting up to ``timeout_s`` for one."""
        stream = self.process.stdout
        if stream is None or self.has_ended or not select.select([stream], [], [], timeout_s)[0]:
            return 0
        count = len(os.read(stream.fileno(), 64))
        self.has_ended = not count
        return count

    def done(self, timeout_s: float = 0.0) -> list[S]:
        """Segments that are compiled since the last call; of a helper that has ended, all that it had."""
        count = self.replies(timeout_s)
        if count and not self.is_ready:
            self.is_ready, count = True, count - 1
        count = len(self.segments) if self.has_ended else count
        return [self.segments.popleft() for _ in range(count)]

    def hand_out(self, segment: S, data: bytes) -> None:
        self.segments.append(segment)
        with suppress(OSError):  # it has ended, as its output will say
            if self.process.stdin is not None:
                self.process.stdin.write(_LENGTH.pack(len(data)) + data)
                self.process.stdin.flush()


@dataclass(slots=True)
class CompileHelpers(Generic[S]):
    """Helpers for the block of one list of segments; none before `note` finds that they are worth it."""

    helpers: list[Helper[S]] = field(default_factory=list)
    _taken: list[S] = field(default_factory=list)
    _slowest_s: float = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for helper in self.helpers:
            helper.process.kill()
        for helper in self.helpers:
            helper.process.communicate()

    def note(self, elapsed_s: float, waiting: deque[S]) -> None:
        """Hear that a segment took so long, 0 from the cache; take others from the end of ``waiting``."""
        self._slowest_s = max(self._slowest_s, elapsed_s)
        if not self.helpers and elapsed_s >= SLOW_S:
            num = min(len(waiting) // MIN_SEGMENTS, num_helpers())
            with suppress(OSError):  # no memory or no process is left
                for _ in range(num):
                    self.helpers.append(Helper(start_helper()))
        for helper in self.helpers:
            self._taken += helper.done()
            while waiting and helper.is_ready and not helper.has_ended and self._has_room(helper, len(waiting)):
                segment = waiting.pop()
                data = packed(segment.module, segment.examples)
                if data is None:
                    self._taken.append(segment)
                else:
                    helper.hand_out(segment, data)

    def _has_room(self, helper: Helper[S], num_waiting: int) -> bool:
        """Whether it gets another segment: one behind that under way while many wait, so that it never waits."""
        return len(helper.segments) < (2 if num_waiting > 2 * len(self.helpers) else 1)

    def taken(self) -> Iterator[S]:
        """The segments that helpers took, each as soon as it is compiled, or its helper is given up."""
        yield from self._taken
        for helper in self.helpers:
            while helper.segments:
                yield from helper.done(PATIENCE * max(1.0, self._slowest_s)) or [helper.segments.popleft()]


def num_helpers() -> int:
    """How many helpers there may be: further cores of this rank that Inductor may use, none beside a GPU."""
    if torch.cuda.is_available():
        return 0
    of_process = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores = of_process // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return max(0, min(cores, num_compile_processes(), 1 + MAX_HELPERS) - 1)


def start_helper() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", _PROGRAM.format(path=sys.path)]
    environ = {**os.environ, "CHUNKC_PROGRESS": "0"}
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    return subprocess.Popen(command, env=environ, stdin=pipe, stdout=pipe, stderr=nowhere)
