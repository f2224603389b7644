"""Inputs of one ``step()``'s updates: hyperparameters and step counts by parameter, also as tables.

Every update of the step gets the same object, so that a device may keep what it made of it (an upload). A kernel reads
tables, one row for each pair of hyperparameters and step count in use, computed in float64 and rounded to float32 once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from chunkc.runtime.update.loss_scale import LossScale

NUM_COEFFICIENTS: Final = 8
"""Of a rule at most."""

ROW_NUMEL: Final = NUM_COEFFICIENTS + 1
"""Columns of a row: the rule's coefficients, then zeros, and last 1 in the first step, else 0."""

INACTIVE: Final = -1
"""The row of a parameter that this step leaves alone."""


class Hyper(Protocol):
    """Hyperparameters of one parameter group as of the call of ``step()``; frozen, and compared by value."""

    def coefficients(self, step: int) -> tuple[float, ...]: ...


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """Inputs of one step's updates; compared by identity.

    Attributes:
        hypers, steps: of active parameters by index; of others only param16 is cast again. Steps count from 1.
        factor: what ``decide`` multiplies gradients by, float32 [] on the device; None for 1.
        control: factor of every gradient, and not 0 to change nothing: float32 [2] on the device; None for 1 and 0.
        seen: the same on the host.
        found: float32 [] on the device, not 0 where a gradient is infinite or NaN; None where nobody has looked.
        loss_scale: what follows ``found``, if anything here does.
    """

    hypers: Mapping[int, Hyper]
    steps: Mapping[int, int]
    num_params: int
    factor: torch.Tensor | None = None
    control: torch.Tensor | None = None
    seen: torch.Tensor | None = None
    found: torch.Tensor | None = None
    loss_scale: LossScale | None = None


def step_lines(
    hypers: Mapping[int, Hyper], steps: Mapping[int, int], assigned: Collection[int], name_of: Callable[[int], str]
) -> list[str]:
    """List what ranks must have alike in a step, a parameter a line; no backward made ``assigned`` ones."""
    return [
        f"step {steps[i]} of {name_of(i)}{', gradient assigned' if i in assigned else ''}, {hyper}"
        for i, hyper in hypers.items()
    ]


def row_of(hyper: Hyper, step: int) -> tuple[float, ...]:
    """One row of the table (`ROW_NUMEL`), in float64; ValueError when the step count is below 1."""
    if step < 1:
        raise ValueError(f"step counts start at 1, not {step}")
    found = hyper.coefficients(step)
    return (*found, *(0.0,) * (NUM_COEFFICIENTS - len(found)), float(step == 1))


def tables_of(inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of a step, float32 [num_rows, `ROW_NUMEL`], at least one, and each parameter's row,
    int32 [num_params], in host memory; ValueError when a step count is below 1."""
    found: dict[tuple[Hyper, int], int] = {}
    row_of_param = [INACTIVE] * inputs.num_params
    for param, hyper in inputs.hypers.items():
        row_of_param[param] = found.setdefault((hyper, inputs.steps[param]), len(found))
    rows = [row_of(hyper, step) for hyper, step in found] or [(0.0,) * ROW_NUMEL]
    exact = torch.tensor(rows, dtype=torch.float64, device="cpu")
    return exact.to(torch.float32), torch.tensor(row_of_param, dtype=torch.int32, device="cpu")
