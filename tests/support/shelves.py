"""Rigs and reference runs that many tests share: made at first use, on one machine."""

from __future__ import annotations

from collections.abc import Callable

import torch
from machines import Machine
from models import CASES
from rig import Rig
from training import Recipe, Trained


class Rigs:
    """``rigs(name, dtype, backend)``: the rig of a model. Capturing it is what takes time."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._rigs: dict[tuple[str, torch.dtype, str], Rig] = {}

    def __call__(self, name: str, dtype: torch.dtype = torch.float32, backend: str = "eager") -> Rig:
        if (name, dtype, backend) not in self._rigs:
            self._rigs[name, dtype, backend] = Rig(CASES[name], dtype, backend, self._machine)
        return self._rigs[name, dtype, backend]

    def clear(self) -> None:
        """Let go of all."""
        self._rigs.clear()


class Runs:
    """``runs(name, recipe)``: a reference run of a model, as ``train(case, recipe)`` makes it."""

    def __init__(self, train: Callable[..., Trained], machine: Machine) -> None:
        self._train, self._machine = train, machine
        self._runs: dict[tuple[str, Recipe], Trained] = {}

    def __call__(self, name: str, recipe: Recipe) -> Trained:
        if (name, recipe) not in self._runs:
            self._runs[name, recipe] = self._train(CASES[name], recipe, machine=self._machine)
        return self._runs[name, recipe]
