"""Measuring a chunk on a CUDA device: the kernels of ``chunkc.triton_kernels.grad_norm`` on the compute stream."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from chunkc.runtime.adam import Piece
from chunkc.runtime.cuda_api import ChunkKernels, KernelLaunch


class NormScratch:
    """Working memory that all norms of a device share: they follow each other on one stream.

    Attributes:
        found: what the latest norm found, float32 [2].
        memory: grows with the largest chunk; another tensor then.
    """

    def __init__(self, device: torch.device) -> None:
        self.found = torch.empty(2, dtype=torch.float32, device=device)
        self.memory = torch.empty(0, dtype=torch.float32, device=device)

    def extend(self, num_tiles: int) -> None:
        """Make room for a chunk of ``num_tiles``."""
        if self.memory.numel() < 2 * num_tiles:
            self.memory = torch.empty(2 * num_tiles, dtype=torch.float32, device=self.memory.device)

    def of(self, num_tiles: int) -> torch.Tensor:
        """float32 [2, num_tiles]."""
        return self.memory[: 2 * num_tiles].view(2, num_tiles)


class GpuNorm:
    """Measures a chunk in device memory; made once per chunk and used every step.

    Args:
        kernels: what launches.
        scratch: of the device.
        gradient: the chunk's gradients, one dimension, in device memory.
        pieces: the elements that are gradients.
        out: the row to write, float64 [2] in device memory.
    """

    def __init__(
        self,
        kernels: ChunkKernels,
        scratch: NormScratch,
        gradient: torch.Tensor,
        pieces: Sequence[Piece],
        out: torch.Tensor,
    ) -> None:
        device = gradient.device
        self._kernels = kernels
        self._scratch = scratch
        self._gradient = gradient
        self._tiles = kernels.make_tiles([(p.start, p.end, p.param) for p in pieces], device)
        scratch.extend(self._tiles.shape[0])
        self._out = out
        self._launch: KernelLaunch | None = None
        self._over: torch.Tensor | None = None

    @torch.no_grad()
    def __call__(self) -> None:
        found, memory = self._scratch.found, self._scratch.memory
        if self._launch is None or memory is not self._over:
            partial = self._scratch.of(self._tiles.shape[0])
            self._launch, self._over = self._kernels.grad_norm(self._gradient, self._tiles, found, partial), memory
        self._launch()
        self._out.copy_(found)
