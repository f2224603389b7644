"""Non-model bytes of a process on a device that is host memory, as malloc counts them.

glibc's ``mallinfo2()`` gives the bytes in use of all arenas (``uordblks``) and of large blocks with their own mapping
(``hblkhd``), exact up to allocator headers. Of these, buffers that MKL keeps for the process are no model's: on a GPU
they would be cuBLAS's workspace, part of its context. They are left out of every reading.

``mallinfo2()`` walks the lists of free blocks: 2 to 4 microseconds in a young process, 1 to 2 milliseconds where
compilation has left 20,000 free blocks. So the executor samples once after each segment, and a thread while one runs,
which can miss a peak shorter than its period. Slabs (`host_slab`) bypass malloc.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final

import torch

from chunkc._torch_compat.core import Finalizer
from chunkc._torch_compat.mkl import mkl_kept_reader

Reader = Callable[[], int]

_PROBE_NBYTES: Final = 2**23
_IDLE_S: Final = 0.25
_MAX_CPU_SHARE: Final = 0.01


_FIELDS: Final = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()


class _Mallinfo2(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in _FIELDS)


def malloc_reader() -> Reader | None:
    """Return a reader of the bytes malloc has handed out, less those that MKL keeps for itself.

    None without glibc 2.33, or with jemalloc.
    """
    if sys.platform != "linux" or not hasattr(ctypes.PyDLL(None), "mallinfo2"):
        return None
    mallinfo2 = ctypes.PyDLL(None).mallinfo2  # PyDLL keeps the interpreter lock: cheaper than handing it over
    mallinfo2.restype = _Mallinfo2
    mkl_kept_nbytes = mkl_kept_reader() or (lambda: 0)

    def read() -> int:
        info = mallinfo2()
        return int(info.uordblks) + int(info.hblkhd) - mkl_kept_nbytes()

    before = read()
    probe = torch.empty(_PROBE_NBYTES, dtype=torch.uint8)
    probed_nbytes = read() - before
    return read if probe.numel() // 2 < probed_nbytes < probe.numel() * 2 else None


class NonModelMeter:
    """Peak of the non-model bytes of a process since `start`. Thread-safe; a forked child makes its own.

    Args:
        period_ms: shortest period of the sampling thread while long work runs; 0 for no thread. The thread waits longer
            where its CPU time would pass one percent of a core: 3 to 10 ms in practice.
        read: the level in bytes; by default the reading of malloc. Without one ``available`` is False.
    """

    def __init__(self, *, period_ms: float = 1.0, read: Reader | None = None) -> None:
        if period_ms < 0:
            raise ValueError(f"a sampling period is at least 0 ms, not {period_ms}")
        self._level = _Level(read if read is not None else malloc_reader())
        self._section = LongWork(self._level, period_ms)
        self.available = self._level.read is not None
        Finalizer(self, self._section.switch_off)

    def start(self) -> None:
        """Take this moment's level as the baseline, forget the peak and the held bytes, and watch long work."""
        self._level.start()
        if self.available:
            self._section.is_on = True

    def sample(self) -> int | None:
        """Bytes above the baseline now, less the held ones and at least 0, entered into the peak."""
        return self._level.sample()

    @property
    def peak_nbytes(self) -> int | None:
        return self._level.peak_nbytes if self.available else None

    @property
    def held_nbytes(self) -> int:
        """Bytes of the model or the user in the reading, subtracted from every later sample; may be negative."""
        return self._level.held_nbytes

    @held_nbytes.setter
    def held_nbytes(self, nbytes: int) -> None:
        self._level.hold(nbytes)

    def pause(self) -> None:
        """Exclude what is taken from here to `resume`: it becomes held bytes."""
        self._level.pause()

    def resume(self) -> None:
        self._level.resume()

    def long_work(self) -> LongWork:
        """Return a context in which the thread samples; it may nest and overlap."""
        return self._section

    def stop(self) -> None:
        """End the sampling thread; idempotent. `sample` goes on to work, `start` watches again."""
        self._section.switch_off()


class _Level:
    """Baseline, held bytes and peak; apart from the meter, which the sampling thread must not keep alive."""

    def __init__(self, read: Reader | None) -> None:
        self.read = read
        self._lock = threading.Lock()
        self.start()

    def start(self) -> None:
        with self._lock:
            self.held_nbytes = 0
            self.peak_nbytes = 0
            self._paused_nbytes: int | None = None
            self._baseline_nbytes = self.read() if self.read is not None else 0

    def hold(self, nbytes: int) -> None:
        with self._lock:
            self.held_nbytes = nbytes

    def pause(self) -> None:
        with self._lock:
            self._paused_nbytes = None if self.read is None else self.read()

    def resume(self) -> None:
        with self._lock:
            if self.read is not None and self._paused_nbytes is not None:
                self.held_nbytes += self.read() - self._paused_nbytes
            self._paused_nbytes = None

    def sample(self) -> int | None:
        if self.read is None:
            return None
        with self._lock:
            if self._paused_nbytes is not None:
                return max(0, self._paused_nbytes - self._baseline_nbytes - self.held_nbytes)
            nbytes = max(0, self.read() - self._baseline_nbytes - self.held_nbytes)
            self.peak_nbytes = max(self.peak_nbytes, nbytes)
            return nbytes


class LongWork:
    """Counts the work under way; its thread samples meanwhile, and for a quarter of a second after."""

    def __init__(self, level: _Level, period_ms: float) -> None:
        self.is_on = False
        self._level = level
        self._period_s = period_ms / 1000
        self._lock = threading.RLock()  # a finalizer may enter it again
        self._depth = 0
        self._awake = threading.Event()
        self._stopped = threading.Event()
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        with self._lock:
            self._depth += 1
        if self.is_on and self._period_s and not self._awake.is_set():
            self._wake()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:
            self._depth -= 1

    def switch_off(self) -> None:
        """End the thread and wait for it, except from itself and in a forked child."""
        self.is_on = False
        if os.getpid() != self._pid:
            return
        with self._lock:
            thread, self._thread = self._thread, None
            self._stopped.set()
            self._awake.set()
            self._stopped, self._awake = threading.Event(), threading.Event()  # for the next thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _wake(self) -> None:
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._thread is None and self.is_on:
                self._thread = threading.Thread(
                    target=self._run, args=(self._stopped, self._awake), name="chunkc-meter", daemon=True
                )
                self._thread.start()
            self._awake.set()

    def _run(self, stopped: threading.Event, awake: threading.Event) -> None:
        wait_s = self._period_s
        idle_s = 0.0
        cost_s = time.thread_time()
        while not stopped.wait(wait_s):
            if self._depth:
                self._level.sample()
                idle_s = 0.0
            else:
                idle_s += wait_s
            if idle_s > _IDLE_S:
                self._sleep(awake)
                idle_s = 0.0
            before_s, cost_s = cost_s, time.thread_time()
            wait_s = max(self._period_s, (cost_s - before_s) / _MAX_CPU_SHARE)

    def _sleep(self, awake: threading.Event) -> None:
        with self._lock:
            if self._depth or self._thread is not threading.current_thread():
                return
            awake.clear()
        awake.wait()
