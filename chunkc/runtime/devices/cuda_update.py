"""The update of a chunk on a CUDA device: one kernel launch on the compute stream.

Tables are uploaded once in a step. What changes from step to step goes to the device as three small tables
(`update_inputs`). The first chunk that a step updates there uploads them, the others find them: all updates of a step
get the same inputs. The copies come from pinned memory that torch's pinned allocator keeps until they have finished, so
that nothing waits, however far the host is ahead. They follow the updates of the step before on the compute stream, so
the tables stay where they are from step to step, and a launch that was made ready once serves all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from chunkc.runtime.devices.cuda_api import ChunkKernels, KernelLaunch
from chunkc.runtime.update.block_quantisation import code_tables
from chunkc.runtime.update.cpu_update import Piece
from chunkc.runtime.update.rules import ROW_NUMEL, UpdateRule
from chunkc.runtime.update.update_inputs import StepInputs, tables_of

Upload = Callable[[torch.Tensor, torch.Tensor], None]


class StepTables:
    """The tables of the latest step in device memory. One thread at a time, as the compute stream has it.

    Args:
        upload: copies a table of host memory into one of ``device``, on the current stream.
    """

    def __init__(self, upload: Upload, device: torch.device) -> None:
        self._upload, self._device = upload, device
        self._inputs: StepInputs | None = None
        self._row_of_param = torch.empty(0, dtype=torch.int32, device=device)
        self._rows = torch.empty(0, ROW_NUMEL, dtype=torch.float32, device=device)
        self._undecided: torch.Tensor | None = None

    def of(self, inputs: StepInputs) -> tuple[torch.Tensor, ...]:
        """``row_of_param``, ``rows`` and ``control`` of a step; uploaded when they are first asked for.

        The same tensors for every step, unless one has more rows than all before it, or another model more parameters.

        Raises:
            ValueError: when a step count is below 1.
        """
        if inputs is not self._inputs:
            rows, row_of_param = tables_of(inputs)
            self._row_of_param = self._refilled(self._row_of_param, row_of_param)
            self._rows = self._refilled(self._rows, rows)
            self._inputs = inputs
        return self._row_of_param, self._rows, self._control(inputs)

    def _refilled(self, table: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """``table`` with ``values`` in its first rows; a new one where it is too short."""
        if table.shape[0] < values.shape[0]:
            table = self._empty(values.shape, values.dtype)
        self._upload(values, table[: values.shape[0]])
        return table

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        with torch.inference_mode(False):  # later steps write to it, wherever this one is called
            return torch.empty(shape, dtype=dtype, device=self._device)

    def _control(self, inputs: StepInputs) -> torch.Tensor:
        if inputs.control is not None:
            return inputs.control
        if self._undecided is None:
            self._undecided = self._empty((2,), torch.float32)
            self._upload(torch.tensor([1.0, 0.0], dtype=torch.float32, device="cpu"), self._undecided)
        return self._undecided


class GpuUpdate:
    """A rule on one chunk in device memory; made once per chunk and used every step.

    Args:
        kernels: what launches.
        tables: shared by all updates of the device.
        rule, payload, states, pieces, gradient: as `chunkc.runtime.devices.protocol.Device.make_update`.

    Raises:
        ValueError: when a piece leaves the chunk or overlaps another; what else the tensors must be, kernels check.
    """

    def __init__(
        self,
        kernels: ChunkKernels,
        tables: StepTables,
        rule: UpdateRule,
        payload: torch.Tensor,
        states: Sequence[torch.Tensor],
        pieces: Sequence[Piece],
        gradient: torch.Tensor | None = None,
    ) -> None:
        self._kernels = kernels
        self._tables = tables
        beyond = [p for p in pieces if p.end > payload.numel()]
        if beyond:
            raise ValueError(f"{beyond[0]} leaves the chunk of {payload.numel()} elements")
        within = [p for p in pieces if p.start % rule.states.block_numel]
        if within:
            raise ValueError(f"{within[0]} begins within a block of {rule.states.block_numel} elements")
        tiles = kernels.make_tiles([(p.start, p.end, p.param) for p in pieces], payload.device)
        self._lists = (payload if gradient is None else gradient, payload, tiles)
        self._rule = rule.name
        self._states = (*states, *(code_tables(payload.device) if rule.states.quantised else ()))
        self._restore = kernels.restore(states[0], payload, tiles)
        self._update: KernelLaunch | None = None
        self._over: tuple[torch.Tensor, ...] = ()

    @torch.no_grad()
    def update(self, inputs: StepInputs) -> None:
        """Update the active parameters and write param16 of all."""
        tables = self._tables.of(inputs)
        if self._update is None or any(a is not b for a, b in zip(tables, self._over, strict=True)):
            self._update = self._kernels.chunk_update(self._rule, self._states, *self._lists, *tables)
            self._over = tables
        self._update()

    @torch.no_grad()
    def restore(self) -> None:
        """Write param16 of all parameters from param32, over whatever the payload holds."""
        self._restore()
