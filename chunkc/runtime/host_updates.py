"""Updates that the host carries out, and the working memory that those of one stream share."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from chunkc.ir.actions import Stream
from chunkc.runtime.adam import ChunkUpdate, Piece, Scratch


class HostUpdates:
    """Makes a device's host updates. A stream carries out one at a time, so its updates share one `Scratch`."""

    def __init__(self) -> None:
        self._scratch: dict[Stream, Scratch] = {}

    def make(
        self,
        stream: Stream,
        payload: Tensor,
        triple: Sequence[Tensor],
        pieces: Sequence[Piece],
        gradient: Tensor | None,
    ) -> ChunkUpdate:
        """As `chunkc.runtime.device.Device.make_update`, for tensors in host memory."""
        param32, exp_avg, exp_avg_sq = triple
        scratch = self._scratch.setdefault(stream, Scratch())
        return ChunkUpdate(payload, param32, exp_avg, exp_avg_sq, pieces, gradient=gradient, scratch=scratch)
