"""The staging store: where parameters stand before the first training graph gives them chunks.

Each parameter keeps the tensor that it was handed over in, with full precision. Loading, ``state_dict``, an evaluation
or an optimizer's ``load_state_dict`` before the first step work on these. Chunks then consume them one by one, so that
the model never exists twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class StagedState:
    """What an optimizer loaded before there were chunks; ``param32`` only where it is finer than the parameter."""

    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    param32: torch.Tensor | None


class StagingStore:
    """Per-tensor storage by parameter index; a parameter that has its chunk is forgotten."""

    def __init__(self, values: list[torch.Tensor]) -> None:
        self._values: list[torch.Tensor | None] = list(values)
        self._states: dict[int, StagedState] = {}

    def holds(self, index: int) -> bool:
        """Whether the parameter still stands here."""
        return self._values[index] is not None

    def value(self, index: int) -> torch.Tensor:
        """The parameter in the dtype that it was handed over in; the staged tensor itself."""
        value = self._values[index]
        if value is None:
            raise KeyError(f"parameter {index} has left the staging store")
        return value

    def exact(self, index: int) -> torch.Tensor:
        """The finest value known: a loaded param32, else the staged tensor itself."""
        state = self._states.get(index)
        return self.value(index) if state is None or state.param32 is None else state.param32

    def nbytes(self) -> int:
        """Bytes of all parameters that still stand here."""
        return sum(v.numel() * v.element_size() for v in self._values if v is not None)

    def write(self, index: int, value: torch.Tensor) -> None:
        """Replace the parameter's elements."""
        state = self._states.get(index)
        if state is not None and state.param32 is not None:
            state.param32 = keep_master(state.param32, value.to(self.value(index).dtype))
        self.value(index).copy_(value)

    def state(self, index: int) -> StagedState | None:
        """Loaded optimizer state, or None."""
        return self._states.get(index)

    def write_state(
        self, index: int, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, param32: torch.Tensor | None
    ) -> None:
        """Keep an optimizer state for the chunks to come; ``param32`` also becomes the parameter's value."""
        staged = self.value(index)
        if param32 is not None:
            staged.copy_(param32)
            param32 = None if staged.dtype is torch.float32 else param32.clone()
        self._states[index] = StagedState(exp_avg.clone(), exp_avg_sq.clone(), param32)

    def forget(self, index: int) -> None:
        """The parameter has its chunk."""
        self._values[index] = None
        self._states.pop(index, None)


def keep_master(master: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """``value`` in the master's dtype; where it is merely the master rounded, the master's own element.

    So writing a parameter's 16-bit value back to itself (as ``load_state_dict`` does) loses no precision.
    """
    if value.dtype == master.dtype:
        return value
    return torch.where(master.to(value.dtype) == value, master, value.to(master.dtype))
