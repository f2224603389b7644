"""Kernels whose tables of tiles are shared: update and norm of a chunk, in the plans of all shapes, cut alike."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakValueDictionary

import torch

from chunkc.runtime.cuda_api import ChunkKernels

Pieces = tuple[tuple[int, int, int], ...]


class SharedTiles:
    """The kernels of one device, as `ChunkKernels`; a table lives as long as somebody uses it."""

    def __init__(self, kernels: ChunkKernels) -> None:
        self.chunk_adam = kernels.chunk_adam
        self.restore = kernels.restore
        self.grad_norm = kernels.grad_norm
        self._make_tiles = kernels.make_tiles
        self._tables = WeakValueDictionary[Pieces, torch.Tensor]()

    def make_tiles(self, pieces: Sequence[tuple[int, int, int]], device: torch.device) -> torch.Tensor:
        """The table of tiles of a chunk; nobody writes to it."""
        key = tuple(pieces)
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = self._make_tiles(pieces, device)
        return table
