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
    """Moments that an optimizer loaded before there were chunks."""

    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor


class StagingStore:
    """Per-tensor storage by parameter index; ``take`` hands a parameter over and forgets it."""

    def __init__(self, values: list[torch.Tensor]) -> None:
        self._values: list[torch.Tensor | None] = list(values)
        self._states: dict[int, StagedState] = {}

    def value(self, index: int) -> torch.Tensor:
        """The parameter in the dtype that it was handed over in; the staged tensor itself."""
        value = self._values[index]
        if value is None:
            raise KeyError(f"parameter {index} has left the staging store")
        return value

    def nbytes(self) -> int:
        """Bytes of all parameters that have not been taken."""
        return sum(v.numel() * v.element_size() for v in self._values if v is not None)

    def write(self, index: int, value: torch.Tensor) -> None:
        """Replace the parameter's elements."""
        self.value(index).copy_(value)

    def state(self, index: int) -> StagedState | None:
        """Loaded moments, or None."""
        return self._states.get(index)

    def write_state(self, index: int, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> None:
        """Keep moments for the chunks to come."""
        self._states[index] = StagedState(exp_avg.clone(), exp_avg_sq.clone())

    def take(self, index: int) -> tuple[torch.Tensor, StagedState | None]:
        """The parameter and its moments, which the store forgets."""
        value = self.value(index)
        self._values[index] = None
        return value, self._states.pop(index, None)
