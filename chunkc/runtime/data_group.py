"""A process group over which programs exchange payloads: among ranks that share chunks, or among those of one chunk.

Between hosts (gloo) ranks send each other just what each needs (`chunkc._gloo`); else the backend's collectives run.
All work in place, and what several ranks have of a result is **the same bits**, in whatever order a backend adds up: a
mean over replicas is made once, each part of a chunk on one of them, which sends it to the others; and of a total every
rank adds up the same numbers, in the order of ranks.
"""

from __future__ import annotations

import torch

from chunkc._gloo import DirectExchange
from chunkc._torch_dist import Group, all_gather, end_group, reduce, reduce_scatter
from chunkc.runtime.slab import map_private


class DataGroup:
    """Collectives of one rank; one thread uses them.

    Args:
        group: of the ranks, for tensors where payloads stand.
        rank: of this process in the group. size: of the group.
        is_direct: whether payloads stand in host memory and the group is gloo's.
    """

    def __init__(self, group: Group, rank: int, size: int, *, is_direct: bool) -> None:
        self._group, self._size = group, size
        self._direct = DirectExchange(group, rank, size, map_private) if is_direct else None
        self._rows = torch.empty(0, device="cpu")

    def gather(self, whole: torch.Tensor, own: torch.Tensor) -> None:
        """Fill ``whole`` with the ``own`` of all ranks, where this rank's stands already."""
        if self._direct is None:
            all_gather(self._group, whole, own)
        else:
            self._direct.all_gather(whole, own)

    def reduce(self, own: torch.Tensor, whole: torch.Tensor, *, mean: bool) -> None:
        """Into ``own``, this rank's part of ``whole``, the sum or mean of that part over all ranks."""
        if self._direct is None:
            reduce_scatter(self._group, own, whole, mean=mean)
        else:
            self._direct.reduce_scatter(own, whole, mean=mean)

    def mean(self, tensor: torch.Tensor) -> None:
        """Replace ``tensor`` (1-D) by the mean over all ranks.

        NCCL's all-reduce, as DDP counts on, makes every element on one rank and sends it to the others.
        """
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

    def close(self) -> None:
        """Nothing is exchanged any more."""
        end_group(self._group)
