"""Norm of a chunk on a CUDA device, by kernels of ``triton_kernels.grad_norm``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from chunkc.runtime.devices.cuda_api import ChunkKernels, KernelLaunch
from chunkc.runtime.update.cpu_update import Piece


class NormScratch:
    """Working memory that all norms of a device share, on one stream; grows with the largest chunk."""

    def __init__(self, device: torch.device) -> None:
        self.memory = torch.empty(0, dtype=torch.float32, device=device)

    def extend(self, num_tiles: int) -> None:
        if self.memory.numel() < 2 * num_tiles + 2:
            self.memory = torch.empty(2 * num_tiles + 2, dtype=torch.float32, device=self.memory.device)

    def of(self, num_tiles: int) -> torch.Tensor:
        return self.memory[: 2 * num_tiles].view(2, num_tiles)

    def result(self) -> torch.Tensor:
        """Return the result of the latest norm, float32 [2]."""
        return self.memory[-2:]


class GpuNorm:
    """Measures a chunk in device memory; arguments as `Device.make_norm`."""

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
        self._tiles = kernels.make_norm_tiles([(p.start, p.end, p.param) for p in pieces], device)
        scratch.extend(self._tiles.shape[0])
        self._out = out
        self._launch: KernelLaunch | None = None
        self._launched_over = self._result = torch.empty(0, device="cpu")

    @torch.no_grad()
    def __call__(self) -> None:
        if self._launch is None or self._scratch.memory is not self._launched_over:
            self._launched_over, self._result = self._scratch.memory, self._scratch.result()
            partial = self._scratch.of(self._tiles.shape[0])
            self._launch = self._kernels.grad_norm(self._gradient, self._tiles, self._result, partial)
        self._launch()
        self._out.copy_(self._result)
