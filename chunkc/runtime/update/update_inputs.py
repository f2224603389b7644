"""Inputs of one ``step()``'s updates: hyperparameters and step counts by parameter, also as tables.

Every update of the step gets the same object, so that a device may keep what it made of it (an upload). A kernel reads
tables, one row for each pair of hyperparameters and step count in use, computed in float64 and rounded to float32 once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from chunkc.runtime.update.begun import BegunStep
from chunkc.runtime.update.loss_scale import LossScale
from chunkc.runtime.update.rules import ROW_NUMEL, Hyper, row_of

INACTIVE: Final = -1
"""The row of a parameter that this step leaves alone."""


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
        begun: what was expected of a step with these hypers and steps, if that was.
    """

    hypers: Mapping[int, Hyper]
    steps: Mapping[int, int]
    num_params: int
    factor: torch.Tensor | None = None
    control: torch.Tensor | None = None
    seen: torch.Tensor | None = None
    found: torch.Tensor | None = None
    loss_scale: LossScale | None = None
    begun: BegunStep | None = None


def step_lines(
    hypers: Mapping[int, Hyper], steps: Mapping[int, int], assigned: Collection[int], name_of: Callable[[int], str]
) -> list[str]:
    """List what ranks must have alike in a step, a parameter a line; no backward made ``assigned`` ones."""
    return [
        f"step {steps[i]} of {name_of(i)}{', gradient assigned' if i in assigned else ''}, {hyper}"
        for i, hyper in hypers.items()
    ]


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
