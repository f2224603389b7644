"""A process group over which programs exchange payloads: one dimension of the mesh of ranks.

Between hosts (gloo) ranks send each other just what each needs and add up in float32 (`gloo`). Else the backend's
collectives add up in the dtype of the payload; where float32 is asked for there, ranks send contributions through a
buffer of a fixed size, as many bytes as a reduce-scatter, and the owner adds them up in float32 and rounds once.

All work in place, and ranks have **the same bits** of a result, in whatever order a backend adds up: one rank makes
each part of a mean and sends it to all, and every rank adds up totals by the same kernel.
"""

from __future__ import annotations

from typing import Final

import torch

from chunkc._torch_compat.distributed import DeviceMesh, all_gather, all_to_all, end_group, reduce, reduce_scatter
from chunkc.distributed.gloo import Allocator, DirectExchange

STAGING_NBYTES: Final = 32 * 2**20
"""Device bytes through which contributions pass that are added up in float32 there."""


class DataGroup:
    """Collectives of one rank over ``mesh``, of one dimension; one thread uses them.

    ``allocate``: uint8 host memory of so many bytes. ``is_direct``: payloads stand in host memory and the group is
    gloo's. ``adds_in_float32``: for contributions in 16 bits that are not sent directly.
    """

    def __init__(self, mesh: DeviceMesh, allocate: Allocator, *, is_direct: bool, adds_in_float32: bool) -> None:
        self._group, self._size = mesh.get_group(), mesh.size()
        self._direct = DirectExchange(self._group, mesh.get_local_rank(), self._size, allocate) if is_direct else None
        self._adds_in_float32 = adds_in_float32
        self._rows = torch.empty(0, device="cpu")
        self._staging = torch.empty(0, dtype=torch.uint8, device="cpu")

    def warm_up(self, device: torch.device) -> None:
        """Exchange a few numbers in every way that programs do, for which NCCL takes device memory."""
        if self._direct is not None:
            return
        rows, other, own = (torch.zeros(*shape, device=device) for shape in ((self._size, 64), (self._size, 64), (64,)))
        all_gather(self._group, rows.view(-1), own)
        reduce_scatter(self._group, own, rows.view(-1), mean=False)
        reduce(self._group, own, mean=False)
        if self._adds_in_float32:
            all_to_all(self._group, other, rows)

    def gather(self, whole: torch.Tensor, own: torch.Tensor) -> None:
        """Fill ``whole`` with the ``own`` of all ranks, where this rank's stands already."""
        if self._direct is None:
            all_gather(self._group, whole, own)
        else:
            self._direct.all_gather(whole, own)

    def reduce(self, own: torch.Tensor, whole: torch.Tensor, *, mean: bool) -> None:
        """Into ``own``, this rank's part of ``whole``, the sum or mean of that part over all ranks."""
        if self._direct is not None:
            self._direct.reduce_scatter(own, whole, mean=mean)
        elif self._adds_in_float32 and whole.itemsize < torch.float32.itemsize:
            self._reduce_in_float32(own, whole, mean=mean)
        else:
            reduce_scatter(self._group, own, whole, mean=mean)

    def _reduce_in_float32(self, own: torch.Tensor, whole: torch.Tensor, *, mean: bool) -> None:
        parts = whole.view(self._size, -1)
        most = (STAGING_NBYTES - 16) // (2 * self._size * whole.itemsize + torch.float32.itemsize)
        for first in range(0, own.numel(), most):
            piece = slice(first, first + most)
            sent, received, total = self._staged(parts[:, piece])
            sent.copy_(parts[:, piece])
            all_to_all(self._group, received, sent)
            torch.sum(received, 0, dtype=torch.float32, out=total)
            own[piece].copy_(total.div_(self._size) if mean else total)

    def _staged(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if self._staging.device != like.device or not self._staging.numel():
            self._staging = torch.empty(STAGING_NBYTES, dtype=torch.uint8, device=like.device)
        size, width = like.nbytes, like.shape[1]
        sent, received = (self._staging[k * size : (k + 1) * size].view(like.dtype).view(like.shape) for k in (0, 1))
        start = -(-2 * size // 16) * 16
        return sent, received, self._staging[start : start + 4 * width].view(torch.float32)

    def mean(self, tensor: torch.Tensor) -> None:
        """Replace ``tensor`` (1-D) by the mean, each element made on one rank, as NCCL's all-reduce does too."""
        if self._direct is None:
            reduce(self._group, tensor, mean=True)
        else:
            self._direct.all_reduce(tensor, mean=True)

    def total(self, tensor: torch.Tensor) -> None:
        """Replace ``tensor``, a few numbers, by the sum over all ranks."""
        if self._rows.numel() != self._size * tensor.numel():
            self._rows = torch.empty(self._size, tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        all_gather(self._group, self._rows.view(-1), tensor)
        torch.sum(self._rows, 0, out=tensor)

    def collect(self, rows: torch.Tensor, own: torch.Tensor) -> None:
        """Fill ``rows`` with the ``own``, a few numbers, of all ranks."""
        all_gather(self._group, rows.view(-1), own.view(-1))

    def close(self) -> None:
        """End the group, but leave a GPU's, whose end is a collective, until the job ends."""
        if self._direct is not None:
            end_group(self._group)
