"""Norms of a plan's gradients, and the decision on them that updates wait for.

Norm actions write one row for each chunk as its gradients become final; ``decide`` turns rows and requests into what
every update reads: a factor, and whether to leave parameters as they are. All stays on the device; host updates read a
copy. Sums of squares add up in float64, so the norm does not depend on how parameters are packed into chunks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from chunkc.runtime.devices.protocol import Event
from chunkc.runtime.update.update_inputs import StepInputs

ROW_NUMEL = 2
"""Columns of a row: sum of squares; and 1 where an element is infinite or NaN, else 0."""


class GradNormTable:
    """The norms of one plan's chunks and the decision on them; all tensors are made once.

    Attributes:
        table: float64 [num_chunks, `ROW_NUMEL`] on the device; rows of chunks that are not measured stay 0.
        control: float32 [2] on the device: the factor of every gradient; and 0, or 1 to leave parameters as they are.
        host_control: ``control`` as host memory has it.
        host_expected: float32 [2] in host memory: the factor that the next decision will find if it clips nothing; and
            1 where the latest one found what was expected of it, else 0.
        totals: float64 [`ROW_NUMEL`] on the device: sums of columns over all ranks, once ``ready`` has happened.
    """

    def __init__(
        self,
        num_chunks: int,
        device: torch.device,
        num_ranks: int = 1,
        add_up: Callable[[torch.Tensor], None] = lambda totals: None,
    ) -> None:
        """``add_up`` adds up ``totals`` over other ranks where ``num_ranks`` is 1, and no action does."""
        self.table = torch.zeros(num_chunks, ROW_NUMEL, dtype=torch.float64, device=device)
        self._decided = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float32, device=device)
        self.control, self._expected = self._decided[:2], self._decided[2:]
        self.totals = torch.zeros(ROW_NUMEL, dtype=torch.float64, device=device)
        self.ready: tuple[Event, ...] = ()
        self._is_alone, self._add_up = num_ranks == 1, add_up
        self._host_decided = self._decided
        if device.type != "cpu":
            self._host_decided = self._decided.to("cpu").pin_memory()
        self.host_control, self.host_expected = self._host_decided[:2], self._host_decided[2:]

    def total(self) -> None:
        """Add up what the chunks of this rank have."""
        torch.sum(self.table, 0, out=self.totals)

    def total_norm(self) -> torch.Tensor:
        """The norm of all gradients as they stand in chunks, float32 [], on the compute stream."""
        return self._found()[0].sqrt().to(torch.float32)

    def found_nonfinite(self) -> torch.Tensor:
        """1 where a gradient in chunks is infinite or NaN, else 0: float32 [], on the compute stream."""
        return self._found()[1].clamp(max=1.0).to(torch.float32)

    def _found(self) -> torch.Tensor:
        if self._is_alone:
            self.total()
            self._add_up(self.totals)
        return self.totals

    @torch.no_grad()
    def update(self, inputs: StepInputs) -> None:
        """Decide on a step: the work of ``decide`` in a step program."""
        if inputs.factor is None:
            self.control[0] = 1.0
        else:
            self.control[0].copy_(inputs.factor)
        if inputs.found is None:
            self.control[1] = 0.0
        else:
            self.control[1].copy_(inputs.found)
        if inputs.loss_scale is not None and inputs.found is not None:
            inputs.loss_scale.update(inputs.found)
        torch.logical_and(self.control[0] == self._expected[0], self.control[1] == 0.0, out=self._expected[1])
        if inputs.loss_scale is None:
            self._expected[0] = 1.0
        else:
            self._expected[0].copy_(inputs.loss_scale.inverse())
        if self._host_decided is not self._decided:
            self._host_decided.copy_(self._decided, non_blocking=True)

    def restore(self) -> None:
        """Nothing: a program that updates nothing decides nothing."""


class StepDecision:
    """Whether a step that may be skipped was; known once its decision has been taken on the device."""

    def __init__(self, event: Event, host_control: torch.Tensor) -> None:
        self._event, self._host_control = event, host_control
        self._is_skipped: bool | None = None

    def is_skipped(self) -> bool:
        """Wait for the decision, which stands before the updates of its step."""
        if self._is_skipped is None:
            self._event.wait()
            self._is_skipped = bool(self._host_control[1])
        return self._is_skipped


class SkippedStep(StepDecision):
    """The outcome of a step that was not even launched."""

    def __init__(self) -> None:
        self._is_skipped = True
