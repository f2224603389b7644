"""The same training in plain PyTorch, and what ``--compare`` demands of the two.

In fp32 the losses have to agree. In 16 bits rounding separates any two correct runs, so both are held against plain
fp32 training: the compiled model may be at most `MAX_ERROR_RATIO` times as far from it as plain PyTorch is that
computes in the same dtype, with an fp32 master of every parameter as chunkc has.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from tabulate import tabulate
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

Schedule = Callable[[torch.optim.Optimizer], LRScheduler]

MAX_DIFFERENCE = 1e-4
MAX_ERROR_RATIO = 1.5


@dataclass(frozen=True)
class Reference:
    """Losses of plain PyTorch: in fp32, and in the compute dtype when that is another one."""

    fp32: list[float]
    low: list[float] | None


def reference(
    model: nn.Module, inputs: Sequence[torch.Tensor], dtype: torch.dtype, lr: float, schedule: Schedule
) -> Reference:
    """Train copies of ``model`` on ``inputs``, one batch a step; ``model`` itself stays as it is."""
    device = inputs[0].device
    fp32 = list(_train(copy.deepcopy(model).to(device), inputs, torch.float32, lr, schedule))
    if dtype is torch.float32:
        return Reference(fp32, None)
    return Reference(fp32, list(_train(copy.deepcopy(model).to(device), inputs, dtype, lr, schedule)))


def _train(
    model: nn.Module, inputs: Iterable[torch.Tensor], dtype: torch.dtype, lr: float, schedule: Schedule
) -> Iterator[float]:
    """Losses of plain training in ``dtype`` with fp32 masters; in fp32 parameters are their own masters."""
    params = list(model.parameters())
    masters = params if dtype is torch.float32 else [nn.Parameter(p.detach().clone()) for p in params]
    for param in params:
        param.data = param.data.to(dtype)
    optimizer = torch.optim.AdamW(masters, lr=lr)
    scheduler = schedule(optimizer)
    for batch in inputs:
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        for master, param in zip(masters, params, strict=True):
            if master is not param and param.grad is not None:
                master.grad, param.grad = param.grad.float(), None
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        with torch.no_grad():
            for master, param in zip(masters, params, strict=True):
                if master is not param:
                    param.copy_(master)
        yield loss.item()


def table(losses: Sequence[float], plain: Reference) -> str:
    """The first losses side by side."""
    columns = {"step": range(1, len(plain.fp32) + 1), "chunkc": losses[: len(plain.fp32)], "plain fp32": plain.fp32}
    if plain.low is not None:
        columns["plain 16-bit"] = plain.low
    columns["difference"] = _differences(losses, plain.fp32)
    formats = ["d", *[".6f"] * (len(columns) - 2), ".1e"]
    return tabulate(columns, headers="keys", floatfmt=formats)


def agreement(losses: Sequence[float], plain: Reference) -> tuple[bool, str]:
    """Whether the first losses agree with plain PyTorch's as the module says, and a line that shows it."""
    differences = _differences(losses, plain.fp32)
    if plain.low is None:
        text = f"largest difference from plain PyTorch {max(differences):.1e}, at most {MAX_DIFFERENCE:.0e}"
        return max(differences) <= MAX_DIFFERENCE, text
    ours, allowed = _rms(differences), MAX_ERROR_RATIO * _rms(_differences(plain.low, plain.fp32))
    text = f"error against fp32 {ours:.1e} (root mean square), at most {allowed:.1e}: {MAX_ERROR_RATIO} x plain 16-bit"
    return ours <= allowed, text


def _differences(losses: Sequence[float], others: Sequence[float]) -> list[float]:
    return [abs(a - b) for a, b in zip(losses, others, strict=False)]


def _rms(values: Sequence[float]) -> float:
    return (sum(value * value for value in values) / len(values)) ** 0.5
