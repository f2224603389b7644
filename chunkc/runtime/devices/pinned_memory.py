"""Homes in pinned host memory: slabs, touched by several threads and registered with CUDA exactly.

torch's pinned allocator rounds every block up to a power of two. Registering touches every page on one thread, so
several threads do so before, on the rank's cores: a page lies on the NUMA node of the thread that touches it first.

**Filled from memory that is freed meanwhile**, a home takes its pages block by block, each before the first write to
it, and is pinned in one piece when it is full. Source and home are then never both there as a whole:

    source   ........####    freed up to here
    home     ########        touched up to here, a block ahead at most
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

import torch

from chunkc.errors import HardwareError
from chunkc.runtime.devices.cpu_affinity import HostCores
from chunkc.runtime.devices.host_slab import HUGE_PAGE_NBYTES, Slab, allocate_slab, discard_pages

_TOUCHED_NBYTES: Final = 2**26
_MAX_THREADS: Final = 8
_NUM_BLOCKS: Final = 64
"""Into which a home is divided at least, where that leaves blocks of `HUGE_PAGE_NBYTES`: what is touched too early."""


@dataclass(slots=True)
class Home:
    """One home: its memory, the first bytes of its ``untouched`` blocks, and whether CUDA knows it."""

    memory: torch.Tensor
    slab: Slab
    block_nbytes: int = field(init=False)
    untouched: set[int] = field(init=False)
    is_pinned: bool = False

    def __post_init__(self) -> None:
        most = _TOUCHED_NBYTES * _MAX_THREADS
        self.block_nbytes = min(most, max(HUGE_PAGE_NBYTES, self.slab.nbytes // _NUM_BLOCKS))
        self.untouched = set(range(0, self.slab.nbytes, self.block_nbytes))

    def touch(self, start: int, end: int, cores: HostCores | None) -> None:
        first = start - start % self.block_nbytes
        for block in sorted(self.untouched.intersection(range(first, end, self.block_nbytes))):
            touch(self.memory[block : block + self.block_nbytes], cores)
            self.untouched.discard(block)


class HostHomes:
    """Live homes of one device, pinned by ``register`` (address, bytes); threads on ``cores`` touch first."""

    def __init__(self, register: Callable[[int, int], None], unregister: Callable[[int], None]) -> None:
        self.num_allocations = 0
        self.cores: HostCores | None = None
        self._register = register
        self._unregister = unregister
        self._homes: dict[int, Home] = {}
        self._lock = threading.Lock()
        self._pid = os.getpid()

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(home.slab.nbytes for home in self._homes.values())

    def allocate(self, nbytes: int, *, is_pinned: bool = True) -> torch.Tensor:
        """Allocate a home, which is pinned or awaits `touch` and `pin`; raises `HardwareError` when refused."""
        self.num_allocations += 1
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        memory, slab = allocate_slab(nbytes)
        with self._lock:
            self._homes[slab.address] = Home(memory, slab)
        if is_pinned:
            try:
                self.pin(memory)
            except BaseException:
                self.free(memory)
                raise
        return memory

    def touch(self, part: torch.Tensor) -> None:
        """Take the pages of a part of a live home, before anything is written to it."""
        if part.numel() == 0:
            return
        home, start = self._holding(part)
        home.touch(start, start + part.nbytes, self.cores)

    def pin(self, memory: torch.Tensor) -> None:
        """Take the pages that are left of a home and register it; idempotent, loses nothing when refused."""
        if memory.numel() == 0:
            return
        home, _ = self._holding(memory)
        if not home.is_pinned:
            home.touch(0, home.slab.nbytes, self.cores)
            self._register(home.slab.address, home.slab.mapped_nbytes)
            home.is_pinned = True

    def discard(self, part: torch.Tensor) -> None:
        """Give the pages of a part of a live home back, and pin the home no more; copies have finished."""
        if part.numel() == 0:
            return
        home, _ = self._holding(part)
        if home.is_pinned:
            self._unregister(home.slab.address)
            home.is_pinned = False
        discard_pages(part)

    def _holding(self, part: torch.Tensor) -> tuple[Home, int]:
        address = part.data_ptr()
        with self._lock:
            for home in self._homes.values():
                if 0 <= address - home.slab.address < home.slab.nbytes:
                    return home, address - home.slab.address
        raise HardwareError("not a part of a home of this device, or already freed")

    def free(self, memory: torch.Tensor) -> None:
        """Unregister a live home and give its pages back; copies from and to it have finished."""
        if memory.numel() == 0:
            return
        with self._lock:
            home = self._homes.pop(memory.data_ptr(), None)
        if home is None:
            raise HardwareError("not the start of a home of this device, or already freed")
        self._give_back(home)

    def close(self) -> None:
        if os.getpid() != self._pid:
            return
        with self._lock:
            homes, self._homes = list(self._homes.values()), {}
        for home in homes:
            self._give_back(home)

    def _give_back(self, home: Home) -> None:
        if home.is_pinned:
            self._unregister(home.slab.address)
        home.slab.close()


def touch(memory: torch.Tensor, cores: HostCores | None = None) -> None:
    """Make the system give all pages of a zeroed tensor, from several threads, on ``cores`` if bound."""
    parts = torch.split(memory, _TOUCHED_NBYTES)
    if len(parts) == 1 and (cores is None or not cores.is_bound):
        memory.zero_()
        return
    num_cores, bind = (os.cpu_count() or 1, None) if cores is None else (len(cores.ids), cores.bind)
    with ThreadPoolExecutor(min(_MAX_THREADS, num_cores, len(parts)), "chunkc-touch", bind) as pool:
        list(pool.map(torch.Tensor.zero_, parts))
