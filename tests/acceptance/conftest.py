"""Rigs are shared by all acceptance tests: capturing a model is what takes time."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from models import CASES
from placements import Identities
from rig import GetRig, Rig
from training import GetPlain, Recipe, Trained, train_plain, train_plain_16


@pytest.fixture(scope="session")
def rig_of() -> Iterator[GetRig]:
    """``rig_of(name, dtype, backend)``: the rig of a model, captured at its first use."""
    rigs: dict[tuple[str, torch.dtype, str], Rig] = {}

    def get(name: str, dtype: torch.dtype = torch.float32, backend: str = "eager") -> Rig:
        if (name, dtype, backend) not in rigs:
            rigs[name, dtype, backend] = Rig(CASES[name], dtype, backend)
        return rigs[name, dtype, backend]

    yield get
    rigs.clear()
    gc.collect()


@pytest.fixture(scope="session")
def plain_of() -> GetPlain:
    """``plain_of(name, recipe)``: the run of eager PyTorch in fp32, made once."""
    runs: dict[tuple[str, Recipe], Trained] = {}

    def get(name: str, recipe: Recipe) -> Trained:
        if (name, recipe) not in runs:
            runs[name, recipe] = train_plain(CASES[name], recipe)
        return runs[name, recipe]

    return get


@pytest.fixture(scope="session")
def plain_16_of() -> GetPlain:
    """``plain_16_of(name, recipe)``: the run of eager PyTorch in bfloat16 with an fp32 master, made once."""
    runs: dict[tuple[str, Recipe], Trained] = {}

    def get(name: str, recipe: Recipe) -> Trained:
        if (name, recipe) not in runs:
            runs[name, recipe] = train_plain_16(CASES[name], recipe)
        return runs[name, recipe]

    return get


@pytest.fixture(scope="session")
def identities() -> Identities:
    """Identity runs, each made once."""
    return Identities()
