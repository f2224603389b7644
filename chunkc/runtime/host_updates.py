"""Updates that the host carries out."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from chunkc.ir.actions import Stream
from chunkc.runtime.adam import ChunkUpdate, Piece


class HostUpdates:
    """Makes a device's host updates."""

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
        return ChunkUpdate(payload, param32, exp_avg, exp_avg_sq, pieces, gradient=gradient)
