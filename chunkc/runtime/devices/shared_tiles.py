"""Kernels whose tables of tiles are shared by the plans of all shapes: they cut chunks alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakValueDictionary

import torch

from chunkc.runtime.devices.cuda_api import ChunkKernels

_Tables = WeakValueDictionary[tuple[tuple[int, int, int], ...], torch.Tensor]
_Make = Callable[[Sequence[tuple[int, int, int]], torch.device], torch.Tensor]


class SharedTiles:
    """The kernels of one device, as `ChunkKernels`; a table lives as long as somebody uses it."""

    def __init__(self, kernels: ChunkKernels) -> None:
        self.chunk_update = kernels.chunk_update
        self.restore = kernels.restore
        self.grad_norm = kernels.grad_norm
        self._make_tiles, self._make_norm_tiles = kernels.make_tiles, kernels.make_norm_tiles
        self._tables, self._norm_tables = _Tables(), _Tables()

    def make_tiles(self, pieces: Sequence[tuple[int, int, int]], device: torch.device) -> torch.Tensor:
        """The table of tiles of a chunk that an update takes; nobody writes to it."""
        return _shared(self._tables, self._make_tiles, pieces, device)

    def make_norm_tiles(self, pieces: Sequence[tuple[int, int, int]], device: torch.device) -> torch.Tensor:
        """The table of tiles of a chunk that a norm takes; nobody writes to it."""
        return _shared(self._norm_tables, self._make_norm_tiles, pieces, device)


def _shared(tables: _Tables, make: _Make, pieces: Sequence[tuple[int, int, int]], device: torch.device) -> torch.Tensor:
    key = tuple(pieces)
    table = tables.get(key)
    if table is None:
        table = tables[key] = make(pieces, device)
    return table
