"""ACCEPTANCE 9 on any machine: what a steady step does is the plan, and nothing beside it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from machines import Machine
from models import CASES, loss_of
from torch import nn

import chunkc
from chunkc.compiler.compiled_model import compiled_of
from chunkc.ir.actions import Stream
from chunkc.runtime.execution.executor import Executor

NUM_STEPS = 4
GIB = 1 << 30
COUNTS = ("num_compiles", "num_slot_allocations", "num_unasked_syncs")


def executor_of(model: nn.Module) -> Executor:
    executor = compiled_of(model).runtime.executor
    assert isinstance(executor, Executor)
    return executor


def smallest_hw(machine: Machine, name: str, backend: str = "eager", accumulate: int = 1) -> chunkc.Hardware:
    model = chunkc.compile(
        CASES[name].build(), machine.named(machine.overhead_nbytes + 1, GIB), **options(backend, accumulate)
    )
    with pytest.raises(chunkc.BudgetError) as caught:
        model(**machine.put(CASES[name].batches()[0]))
    return machine.named(caught.value.min_device_nbytes, GIB)


def options(backend: str, accumulate: int = 1) -> dict[str, Any]:
    return {"dtype": torch.float32, "backend": backend, "accumulate": accumulate}


def check_steady_steps(
    machine: Machine,
    name: str,
    *,
    is_tight: bool,
    backend: str = "eager",
    accumulate: int = 1,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Order of actions and bytes are the plan's in every step (run in ``around``), and all ``COUNTS`` stay zero."""
    case = CASES[name]
    hw = smallest_hw(machine, name, backend, accumulate) if is_tight else machine.hw(GIB, GIB)
    model = chunkc.compile(case.build(), hw, **options(backend, accumulate))
    optimizer = chunkc.AdamW(model.parameters(), lr=1e-3)
    batch = machine.put(case.batches()[0])
    for step in range(2 + NUM_STEPS):
        if step == 2:
            executor_of(model).trace = []
        with around() if step >= 2 else nullcontext():
            for _ in range(accumulate):
                loss_of(model(**batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
    plan, trace = executor_of(model).plan, executor_of(model).trace
    iteration = [str(action) for _, _, action in plan.labelled()]
    assert trace == iteration * NUM_STEPS
    found = chunkc.stats(model)
    assert {count: found[count] for count in COUNTS} == dict.fromkeys(COUNTS, 0)
    for stream in (Stream.H2D, Stream.D2H):
        planned = plan.moved_nbytes(stream)
        assert found[f"{stream.value}_nbytes"] == found[f"planned_{stream.value}_nbytes"] == planned
        assert (planned > 0) == is_tight, "a tight plan moves, a resident one does not"
