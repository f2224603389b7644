"""Homes in pinned host memory: slabs, touched by several threads and registered with CUDA exactly.

torch's own pinned allocator rounds every block up to a power of two; a slab is what was asked for. Registering touches
every page, on one thread; so the pages are touched before, by several. A slab is unregistered before its pages go
back to the system: after that its addresses may belong to something else. Views that outlive it read zeros.

The system gives a page on the NUMA node of the thread that touches it first. Where a rank has cores of its own, the
touching threads run there, so that the updates find their memory near.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import torch

from chunkc.errors import HardwareError
from chunkc.runtime.host_cores import HostCores
from chunkc.runtime.slab import Slab, allocate_slab

_HUGE_NBYTES: Final = 2**21
_TOUCHED_NBYTES: Final = 2**26
_MAX_THREADS: Final = 8


class HostHomes:
    """Live homes of one device; they stay until they are freed or the device is closed.

    Args:
        register, unregister: pin a range (address, bytes), and undo it by its address.

    Attributes:
        num_allocations: calls so far.
        cores: whose threads touch homes first; None: any.
    """

    def __init__(self, register: Callable[[int, int], None], unregister: Callable[[int], None]) -> None:
        self.num_allocations = 0
        self.cores: HostCores | None = None
        self._register = register
        self._unregister = unregister
        self._homes: dict[int, tuple[torch.Tensor, Slab]] = {}
        self._lock = threading.Lock()
        self._pid = os.getpid()

    @property
    def nbytes(self) -> int:
        """Bytes of all homes, as asked for."""
        with self._lock:
            return sum(slab.nbytes for _, slab in self._homes.values())

    def allocate(self, nbytes: int) -> torch.Tensor:
        """``nbytes`` of zeroed, page-aligned, pinned host memory as uint8.

        Raises:
            HardwareError: when the system or CUDA refuses; nothing is held then.
        """
        self.num_allocations += 1
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        memory, slab = allocate_slab(nbytes, huge_pages=nbytes >= _HUGE_NBYTES)
        try:
            touch(memory, self.cores)
            self._register(slab.address, slab.mapped_nbytes)
        except BaseException:
            slab.close()
            raise
        with self._lock:
            self._homes[slab.address] = memory, slab
        return memory

    def free(self, memory: torch.Tensor) -> None:
        """Unregister a home and give its pages back; copies from and to it have finished.

        Raises:
            HardwareError: when it is not the start of a live home.
        """
        if memory.numel() == 0:
            return
        with self._lock:
            found = self._homes.pop(memory.data_ptr(), None)
        if found is None:
            raise HardwareError("not the start of a home of this device, or already freed")
        self._unregister(found[1].address)
        found[1].close()

    def close(self) -> None:
        """Free all homes; without effect in a forked child, which has none of them."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            homes, self._homes = list(self._homes.values()), {}
        for _, slab in homes:
            self._unregister(slab.address)
            slab.close()


def touch(memory: torch.Tensor, cores: HostCores | None = None) -> None:
    """Make the system give every page of a zeroed tensor, from several threads, on ``cores`` where they are bound."""
    parts = torch.split(memory, _TOUCHED_NBYTES)
    if len(parts) == 1 and (cores is None or not cores.is_bound):
        memory.zero_()
        return
    num_cores, bind = (os.cpu_count() or 1, None) if cores is None else (len(cores.ids), cores.bind)
    with ThreadPoolExecutor(min(_MAX_THREADS, num_cores, len(parts)), "chunkc-touch", bind) as pool:
        list(pool.map(torch.Tensor.zero_, parts))
