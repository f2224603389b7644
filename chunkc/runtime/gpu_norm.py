"""Measuring a chunk on a CUDA device: the kernels of ``chunkc.triton_kernels.grad_norm`` on the compute stream."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from chunkc.runtime.adam import Piece
from chunkc.runtime.cuda_api import ChunkKernels


class GpuNorm:
    """Measures a chunk in device memory; made once per chunk, with working memory of its own, and used every step.

    Args:
        kernels: what launches.
        gradient: the chunk's gradients, one dimension, in device memory.
        pieces: the elements that are gradients.
        out: the row to write, float64 [2] in device memory.
    """

    def __init__(
        self, kernels: ChunkKernels, gradient: torch.Tensor, pieces: Sequence[Piece], out: torch.Tensor
    ) -> None:
        device = gradient.device
        self._kernels = kernels
        self._gradient = gradient
        self._tiles = kernels.make_tiles([(p.start, p.end, p.param) for p in pieces], device)
        self._partial = torch.empty(2, self._tiles.shape[0], dtype=torch.float32, device=device)
        self._found = torch.empty(2, dtype=torch.float32, device=device)
        self._out = out

    @torch.no_grad()
    def __call__(self) -> None:
        self._kernels.grad_norm(self._gradient, self._tiles, self._found, self._partial)
        self._out.copy_(self._found)
