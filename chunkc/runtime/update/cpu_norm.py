"""Sum of squares of a chunk's gradients in host memory, added up in float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from chunkc.runtime.update.cpu_update import Piece

TILE_NUMEL = 64 * 1024
"""Elements that the host measures at a time: their float64 copies stay in a core's cache."""


class HostNorm:
    """Measures the ``pieces`` of a chunk's ``gradient``, in host memory, into the row ``out``."""

    def __init__(self, gradient: torch.Tensor, pieces: Sequence[Piece], out: torch.Tensor) -> None:
        self._tiles = [gradient[start:end] for start, end in _tiles(pieces)]
        self._out = out

    @torch.no_grad()
    def __call__(self) -> None:
        """Squares of finite elements are finite in float64, so the sum tells whether all are."""
        total = 0.0
        for tile in self._tiles:
            exact = tile.double()
            total += float(torch.dot(exact, exact))
        self._out[0] = total
        self._out[1] = float(not total < float("inf"))


def _tiles(pieces: Sequence[Piece]) -> Iterator[tuple[int, int]]:
    for piece in pieces:
        for start in range(piece.start, piece.end, TILE_NUMEL):
            yield start, min(start + TILE_NUMEL, piece.end)
