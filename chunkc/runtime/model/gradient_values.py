"""Values of one model's gradients between backward and step, in chunks and beside them.

`chunkc.runtime.params.gradients` keeps where each gradient stands; here they are read, written, and moved between
chunks and host memory. All ranks read and write together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import torch

from chunkc.distributed.coordination import mean_of_ranks
from chunkc.runtime.model.backward_rules import refuse_lost
from chunkc.runtime.model.parameters import Parameters
from chunkc.runtime.model.program_state import ProgramState
from chunkc.runtime.update.loss_scale import multiply


class GradientValues:
    """The store of the managed tensors in ``param.grad``; see the module docstring."""

    holds: Final = "params"

    def __init__(self, parameters: Parameters, state: ProgramState) -> None:
        self.parameters, self._state, self.gradients = parameters, state, state.gradients
        self.name_of, self.version_of, self.is_entered, self.is_divided = (
            parameters.name_of, parameters.version_of, parameters.is_entered, parameters.is_divided,
        )  # fmt: skip

    def read_grad(self, index: int, stamp: int) -> torch.Tensor:
        """A copy of the gradient of backward ``stamp``, the last one, on the model's device."""
        self.require(index, stamp)
        self.parameters.foreign.read_gradient(index)
        self.parameters.agree_on("the gradient", index)
        self._state.reduce_gradients()
        found, factor = self.whole(index).to(self.parameters.device.torch_device), self.gradients.factor
        return found if factor is None else multiply(found, factor)

    def whole(self, index: int) -> torch.Tensor:
        """The gradient as it stands, in chunks and apart; all ranks read it together."""
        apart = self.gradients.host_grads.get(index)
        if not self.gradients.is_kept(index):
            return self.zeros(index)
        if index not in self.gradients.chunk_grads and apart is not None:
            return apart.clone()
        landed = self.parameters.values.read_gradient(index)
        return landed if apart is None else landed.add_(apart.to(landed.device))

    def write_grad(self, index: int, stamp: int, value: torch.Tensor) -> None:
        """Replace a gradient that has not been stepped, or one of zeros."""
        self.require(index, stamp)
        self.parameters.agree_on("a new gradient", index)
        self._state.reduce_gradients()
        value = self.averaged(value)  # what eager operators add is each rank's own
        self.gradients.zeroed.discard(index)
        self.apply_factor()
        self.gradients.measured = None
        if index in self.gradients.chunk_grads and self.gradients.published([index]):
            self.parameters.values.write_gradient(index, value)
            self.gradients.host_grads.pop(index, None)
        else:
            self.gradients.host_grads[index] = value.detach().to("cpu", copy=True)

    def zero_grad(self, index: int, stamp: int) -> None:
        """``param.grad.zero_()``: a gradient of zeros, or, where it was stepped already, none."""
        if self.gradients.is_kept(index) or stamp != self.gradients.stamp_of(index):
            self.write_grad(index, stamp, self.zeros(index))
        self.gradients.zeroed.add(index)

    def zeros(self, index: int) -> torch.Tensor:
        return torch.zeros(self.parameters.infos[index].shape, dtype=self.parameters.params[index].dtype, device="cpu")

    def require(self, index: int, stamp: int) -> None:
        self.parameters.drain()
        refuse_lost(self.gradients, index, stamp, self.name_of(index))

    def apply_factor(self) -> None:
        """Multiply the gradients themselves by the factor, where the step can not; the model must be drained."""
        gradients = self.gradients
        factor, gradients.factor = gradients.factor, None
        if factor is None:
            return
        gradients.measured = None
        for index in gradients.chunk_grads:
            self.parameters.values.multiply_gradient(index, factor)
        for part in gradients.host_grads.values():
            multiply(part, factor.to(part.device))

    def averaged(self, gradient: torch.Tensor) -> torch.Tensor:
        """The mean over all ranks of a gradient outside of chunks, added up in float32, in host memory."""
        return mean_of_ranks(self.parameters.ranks, gradient)

    def spill(self, indexes: Iterable[int]) -> None:
        """Free payloads of these parameters from gradients, which go on in host memory unless withheld."""
        values, indexes = self.parameters.values, list(indexes)
        published = self.gradients.published(indexes)
        for index in indexes:
            if index in published:
                self.gradients.add(index, values.read_gradient(index))
            values.restore_payload(index)
            self.gradients.chunk_grads.discard(index)

    def leave_chunks(self) -> None:
        """Move all gradients to host memory: the chunks go."""
        self.spill(list(self.gradients.chunk_grads))
        self.gradients.measured = self._state.norm_table = None

    def move_into_chunks(self) -> None:
        """Bring together what is apart: afterwards every gradient stands whole in its chunk."""
        values = self.parameters.values
        for index in list(self.gradients.host_grads):
            values.write_gradient(index, self.whole(index))
            self.gradients.chunk_grads.add(index)
            del self.gradients.host_grads[index]

    def exact(self, indexes: Iterable[int]) -> Iterator[torch.Tensor]:
        """The gradients of ``indexes`` in float64 on the device; waits count as unasked."""
        device, gradients = self.parameters.device, self.gradients
        if gradients.pending:
            device.synchronize()
        for index in sorted(indexes):
            grad = self.parameters.params[index].grad
            if grad is None:
                continue
            if not gradients.is_handle(index):
                yield self.averaged(grad.detach()).to(device.torch_device, torch.float64)
            elif not gradients.is_kept(index):  # zeroed after a step that consumed it
                yield torch.zeros(1, dtype=torch.float64, device=device.torch_device)
            else:
                self.require(index, gradients.stamp_of(index))
                whole = self.whole(index).to(device.torch_device, torch.float64)
                yield whole if gradients.factor is None else multiply(whole, gradients.factor)
