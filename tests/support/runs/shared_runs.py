"""SharedRunners and reference runs that many tests share: made at first use, on one machine."""

from collections.abc import Callable

import torch
from machines import Machine
from models import CASES
from plan_runner import PlanRunner
from training import Recipe, Trained


class SharedRunners:
    """``runners(name, dtype, backend)``: the runner of a model. Capturing it is what takes time."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._runners: dict[tuple[str, torch.dtype, str], PlanRunner] = {}

    def __call__(self, name: str, dtype: torch.dtype = torch.float32, backend: str = "eager") -> PlanRunner:
        if (name, dtype, backend) not in self._runners:
            self._runners[name, dtype, backend] = PlanRunner(CASES[name], dtype, backend, self._machine)
        return self._runners[name, dtype, backend]

    def clear(self) -> None:
        self._runners.clear()


class Runs:
    """``runs(name, recipe)``: a reference run of a model, as ``train(case, recipe)`` makes it."""

    def __init__(self, train: Callable[..., Trained], machine: Machine) -> None:
        self._train, self._machine = train, machine
        self._runs: dict[tuple[str, Recipe], Trained] = {}

    def __call__(self, name: str, recipe: Recipe) -> Trained:
        if (name, recipe) not in self._runs:
            self._runs[name, recipe] = self._train(CASES[name], recipe, machine=self._machine)
        return self._runs[name, recipe]
