"""The update of a chunk on a CUDA device: one kernel launch on the compute stream, tables uploaded once in a step.

What changes from step to step goes to the device as three small tables (`chunkc.runtime.step_inputs`). The first chunk
that a step updates there uploads them, the others find them: all updates of a step get the same inputs. The copies
come from pinned memory that torch's pinned allocator keeps until they have finished, so that nothing waits, however
far the host is ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from chunkc.runtime.adam import Piece
from chunkc.runtime.cuda_api import ChunkKernels
from chunkc.runtime.step_inputs import StepInputs, tables_of

Upload = Callable[[torch.Tensor], torch.Tensor]


class StepTables:
    """The tables of the latest step in device memory. One thread at a time, as the compute stream has it."""

    def __init__(self, upload: Upload) -> None:
        self.num_uploads = 0
        self._upload = upload
        self._inputs: StepInputs | None = None
        self._tables: tuple[torch.Tensor, ...] = ()

    def of(self, inputs: StepInputs) -> tuple[torch.Tensor, ...]:
        """``row_of_param``, ``rows`` and ``control`` of a step; uploaded when they are first asked for.

        Raises:
            ValueError: when a step count is below 1.
        """
        if inputs is not self._inputs:
            rows, row_of_param = tables_of(inputs)
            control = inputs.control
            if control is None:
                control = self._upload(torch.tensor([1.0, 0.0], dtype=torch.float32, device="cpu"))
            self._tables = (self._upload(row_of_param), self._upload(rows), control)
            self._inputs = inputs
            self.num_uploads += 1
        return self._tables


class GpuUpdate:
    """Adam on one chunk in device memory; made once per chunk and used every step.

    Args:
        kernels: what launches.
        tables: shared by all updates of the device.
        payload, triple, pieces, gradient: as `chunkc.runtime.device.Device.make_update`.

    Raises:
        ValueError: when a piece leaves the chunk or overlaps another; what else the tensors must be, kernels check.
    """

    def __init__(
        self,
        kernels: ChunkKernels,
        tables: StepTables,
        payload: torch.Tensor,
        triple: Sequence[torch.Tensor],
        pieces: Sequence[Piece],
        gradient: torch.Tensor | None = None,
    ) -> None:
        self._kernels = kernels
        self._tables = tables
        self._payload = payload
        self._gradient = payload if gradient is None else gradient
        self._param32, self._exp_avg, self._exp_avg_sq = triple
        beyond = [p for p in pieces if p.end > payload.numel()]
        if beyond:
            raise ValueError(f"{beyond[0]} leaves the chunk of {payload.numel()} elements")
        self._tiles = kernels.make_tiles([(p.start, p.end, p.param) for p in pieces], payload.device)

    @torch.no_grad()
    def update(self, inputs: StepInputs) -> None:
        """Update the active parameters and write param16 of all."""
        self._kernels.chunk_adam(
            self._gradient,
            self._payload,
            self._param32,
            self._exp_avg,
            self._exp_avg_sq,
            self._tiles,
            *self._tables.of(inputs),
        )

    @torch.no_grad()
    def restore(self) -> None:
        """Write param16 of all parameters from param32, over whatever the payload holds."""
        self._kernels.restore(self._param32, self._payload, self._tiles)
