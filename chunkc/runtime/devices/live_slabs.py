"""Live slabs of one kind, with their exact bytes."""

from __future__ import annotations

from collections import deque
from typing import Final

import torch

from chunkc.errors import HardwareError
from chunkc.runtime.devices.host_slab import Slab, allocate_slab

_HUGE_NBYTES: Final = 2**21


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
        memory, slab = allocate_slab(nbytes, huge_pages=nbytes >= _HUGE_NBYTES, on_free=self._freed.append)
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
