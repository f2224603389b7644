"""What acceptance tests share: runners in a file, since captures take time, and reference runs in all files.

A runner does not outlive its file: a model that Dynamo captures anew, because something else in the process has
changed, would be planned by another graph than the one for which its least budget was found.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from machines import EMULATED
from placements import Identities
from plan_runner import GetRunner
from shared_runs import Runs, SharedRunners
from training import GetPlain, train_plain, train_plain_16


@pytest.fixture(scope="module")
def runner_of() -> Iterator[GetRunner]:
    """``runner_of(name, dtype, backend)``: the runner of a model, captured at its first use."""
    runners = SharedRunners(EMULATED)
    yield runners
    runners.clear()
    gc.collect()


@pytest.fixture(scope="session")
def plain_of() -> GetPlain:
    """``plain_of(name, recipe)``: the run of eager PyTorch in fp32, made once."""
    return Runs(train_plain, EMULATED)


@pytest.fixture(scope="session")
def plain_16_of() -> GetPlain:
    """``plain_16_of(name, recipe)``: the run of eager PyTorch in bfloat16 with an fp32 master, made once."""
    return Runs(train_plain_16, EMULATED)


@pytest.fixture(scope="module")
def identities() -> Identities:
    """Identity runs of a file's runners, each made once."""
    return Identities()
