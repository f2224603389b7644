"""Slabs: large pieces of host memory with their own mapping, given back to the system once freed.

* **Not inherited by forks** (``MADV_DONTFORK``, Linux only): while a DataLoader worker is alive, the kernel would copy
  every page that an update writes. A forked child must not touch the tensor.
* **Freed by `Slab.close`.** Views may outlive a slab (a traceback, a user's variable), so unmapping it would make stale
  reads crash. The *pages* go back (``MADV_DONTNEED``), and the addresses stay until the last view dies.
* **Exact**, outside of malloc, and mapped by libc: objects of ``mmap`` would unmap in a forked child too.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import torch

from chunkc._torch_compat.core import Finalizer
from chunkc.errors import HardwareError

HUGE_PAGE_NBYTES: Final = 2**21
"""From this size on Linux is asked for transparent huge pages, which it may ignore."""
_IS_LINUX: Final = sys.platform == "linux"
_MAPPED_NBYTES: Final = 2**25  # the least that glibc never takes from its heap
_M_TRIM_THRESHOLD: Final = -1  # as in malloc.h
_M_MMAP_THRESHOLD: Final = -3
_MOST_KEPT_NBYTES: Final = 2**29
_KEPT_NBYTES: Final = 2**24
"""How much malloc may keep of tensors that were freed one by one."""


def allocate_slab(nbytes: int, *, on_free: Callable[[int], None] | None = None) -> tuple[torch.Tensor, Slab]:
    """Map ``nbytes`` of zeroed, page-aligned host memory, or raise `HardwareError`.

    ``on_free`` is called once with ``nbytes`` when the pages have gone back, at any point of any thread: it must
    neither block nor raise. The tensor keeps the mapping alive, the handle does not.
    """
    if nbytes < 0:
        raise ValueError(f"a slab has at least 0 bytes, not {nbytes}")
    mapped_nbytes = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = _map_linux(mapped_nbytes) if _IS_LINUX else mmap.mmap(-1, mapped_nbytes)
    tensor = torch.frombuffer(pages, dtype=torch.uint8, count=max(nbytes, 1))[:nbytes]
    return tensor, Slab(pages, nbytes, mapped_nbytes, on_free)


def map_private(nbytes: int) -> torch.Tensor:
    """Map zeroed host memory of its own as uint8, which forks inherit; raises `OSError` when refused."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8)


def return_freed_pages() -> None:
    """Make glibc's malloc give back pages that it keeps of freed blocks up to 32 MiB (mallopt(3))."""
    trim = getattr(_libc(), "malloc_trim", None) if _IS_LINUX else None
    if trim is not None:
        trim(0)


def keep_freed_pages(nbytes: int) -> None:
    """Let glibc's malloc keep up to ``nbytes``, at most 512 MiB, of freed pages (mallopt(3)).

    By default malloc gives pages back once 128 KiB are free there: a program whose tensors come and go takes them again
    at every step, zeroed by the kernel. A caching allocator, such as torch's for a GPU, keeps them. The setting is the
    process's. Where the user has set thresholds by ``MALLOC_..._THRESHOLD_`` or ``GLIBC_TUNABLES``, these stay.
    """
    chosen = (os.environ.get("MALLOC_TRIM_THRESHOLD_"), os.environ.get("MALLOC_MMAP_THRESHOLD_"))
    is_chosen = any(chosen) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    set_option = getattr(_libc(), "mallopt", None) if _IS_LINUX and not is_chosen else None
    if set_option is not None:
        set_option(_M_TRIM_THRESHOLD, min(nbytes, _MOST_KEPT_NBYTES))
        set_option(_M_MMAP_THRESHOLD, _MAPPED_NBYTES)


def discard_pages(part: torch.Tensor) -> None:
    """Give the whole pages of ``part``, of a slab, back to the system (Linux only); they read as zeros."""
    start = -(-part.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    nbytes = part.data_ptr() + part.nbytes - start
    if _IS_LINUX and nbytes >= mmap.PAGESIZE:
        _advise(start, nbytes - nbytes % mmap.PAGESIZE, mmap.MADV_DONTNEED)


class FreedPages:
    """Counts tensors that are freed one by one, and has malloc give their pages back every 16 MiB."""

    def __init__(self) -> None:
        self._nbytes = 0

    def add(self, nbytes: int) -> None:
        """Count the bytes of one freed tensor; one of more than 32 MiB was not in malloc's heap."""
        self._nbytes += nbytes if nbytes <= _MAPPED_NBYTES else 0
        if self._nbytes >= _KEPT_NBYTES:
            self._nbytes = 0
            return_freed_pages()


class Slab:
    """Handle of one slab; it does not keep the memory alive. ``mapped_nbytes`` are whole pages."""

    def __init__(self, pages: Any, nbytes: int, mapped_nbytes: int, on_free: Callable[[int], None] | None) -> None:
        self.address = ctypes.addressof(ctypes.c_ubyte.from_buffer(pages))
        self.nbytes = nbytes
        self.mapped_nbytes = mapped_nbytes
        self._pid = os.getpid()
        self._pages = weakref.ref(pages)
        self._report = Finalizer(pages, _call, on_free, nbytes, self._pid)
        self._report.atexit = False

    @property
    def is_closed(self) -> bool:
        return not self._report.alive

    def close(self) -> None:
        """Give the pages back now; idempotent, nothing in a forked child. Views read zeros."""
        pages = self._pages()
        if pages is None or os.getpid() != self._pid or self.is_closed:
            return
        if _IS_LINUX:
            _advise(self.address, self.mapped_nbytes, mmap.MADV_DONTNEED)
        elif hasattr(mmap, "MADV_DONTNEED"):
            pages.madvise(mmap.MADV_DONTNEED)
        self._report()


class LiveSlabs:
    """Live slabs of one kind by address, and their bytes.

    A slab may go with its last view in the middle of a method of this class, so its bytes are queued for the next call.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._by_address: dict[int, Slab] = {}
        self._freed: deque[int] = deque()
        self.nbytes = 0

    def allocate(self, nbytes: int) -> torch.Tensor:
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        memory, slab = allocate_slab(nbytes, on_free=self._freed.append)
        self._by_address = {address: other for address, other in self._by_address.items() if not other.is_closed}
        self._by_address[slab.address] = slab
        self.nbytes += nbytes
        return memory

    def free(self, memory: torch.Tensor) -> None:
        if memory.numel() == 0:
            return
        slab = self._by_address.pop(memory.data_ptr(), None)
        if slab is None:
            raise HardwareError(f"not the start of {self._kind} of this device, or already freed")
        slab.close()

    def settle(self) -> int:
        """Account for what was freed; return its bytes."""
        freed_nbytes = 0
        while self._freed:
            freed_nbytes += self._freed.popleft()
        self.nbytes -= freed_nbytes
        return freed_nbytes


def _call(on_free: Callable[[int], None] | None, nbytes: int, pid: int) -> None:
    if on_free is not None and os.getpid() == pid:
        on_free(nbytes)


def _map_linux(mapped_nbytes: int) -> ctypes.Array[ctypes.c_ubyte]:
    """Map private anonymous pages that forks do not inherit; collecting the returned buffer unmaps them."""
    map_pages = _libc().mmap
    map_pages.restype = ctypes.c_void_p
    map_pages.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    address = map_pages(
        None, mapped_nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0
    )
    if address is None or address == ctypes.c_void_p(-1).value:
        reason = os.strerror(ctypes.get_errno())
        raise HardwareError(
            f"the system refuses {mapped_nbytes} bytes of host memory ({reason}): free memory, raise the limit of "
            "this process (ulimit -v, cgroup), or name a smaller host memory in hw"
        )
    pages = (ctypes.c_ubyte * mapped_nbytes).from_address(address)
    Finalizer(pages, _unmap, address, mapped_nbytes, os.getpid()).atexit = False
    _advise(address, mapped_nbytes, mmap.MADV_DONTFORK)
    if mapped_nbytes >= HUGE_PAGE_NBYTES and os.path.exists("/sys/kernel/mm/transparent_hugepage"):
        _advise(address, mapped_nbytes, mmap.MADV_HUGEPAGE)
    return pages


def _unmap(address: int, mapped_nbytes: int, pid: int) -> None:
    if os.getpid() == pid:
        unmap = _libc().munmap
        unmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        unmap(address, mapped_nbytes)


def _advise(address: int, nbytes: int, advice: int) -> None:
    advise = _libc().madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if advise(address, nbytes, advice) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"madvise({advice}) on {nbytes} bytes: {os.strerror(errno)}")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
