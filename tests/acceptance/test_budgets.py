"""Case 12: from a budget that cannot fit to one in which everything stays on the device.

What ``BudgetError`` names must really work, to the byte, through ``chunkc.compile`` as a user calls it; more memory
never moves more bytes; every budget trains to the same bits.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from models import CASES, loss_of
from placements import moved, smallest_plan
from plan_runner import BIG_NBYTES, GetRunner, PlanRunner, Setup
from torch import nn
from training import PLACEMENT, assert_same_bits

import chunkc
from chunkc.errors import BudgetError
from chunkc.ir.tiers import Tier
from chunkc.passes import PlanOptions

SHORT = replace(PLACEMENT, num_steps=3)
MODELS = ("llama", "odd", pytest.param("albert", marks=pytest.mark.slow))


def _compile(name: str, device_nbytes: int, host_nbytes: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    hw = replace(
        chunkc.Hardware.parse("emulated-1m-1m"), gpu_memory_nbytes=device_nbytes, host_memory_nbytes=host_nbytes
    )
    return chunkc.compile(CASES[name].build(), hw, dtype=dtype, backend="eager")


def _refusal(name: str, device_nbytes: int, host_nbytes: int) -> BudgetError:
    """The error of a first forward, after which the parameters are as they were and without gradients."""
    model, plain = _compile(name, device_nbytes, host_nbytes), CASES[name].build()
    with pytest.raises(BudgetError) as caught:
        model(**CASES[name].batches()[0])
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.detach().clone(), q) and p.grad is None
    return caught.value


def _train_step(model: nn.Module, name: str) -> float:
    optimizer = chunkc.AdamW(model.parameters(), lr=1e-3)
    loss = loss_of(model(**CASES[name].batches()[0]))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model.state_dict()
    return loss.item()


@pytest.mark.long
@pytest.mark.parametrize("name", ("odd", pytest.param("llama", marks=pytest.mark.slow)))
def test_budgets_that_an_error_names_work(name: str) -> None:
    """Too little device memory, too little host memory; then exactly what the errors say."""
    names = {n for n, _ in CASES[name].build().named_parameters()}
    error = _refusal(name, 1 << 14, BIG_NBYTES)
    assert error.moment.startswith(("fwd.", "bwd.")) and set(error.tensors) <= names and error.tensors
    assert error.missing_nbytes == error.min_device_nbytes - (1 << 14)
    for text in (error.moment, error.tensors[0], str(error.missing_nbytes), str(error.min_device_nbytes)):
        assert text in str(error)
    device_nbytes, host_nbytes = error.min_device_nbytes, error.min_host_nbytes
    error = _refusal(name, device_nbytes, 1 << 12)
    assert error.moment == "host" and set(error.tensors) == names
    assert error.missing_nbytes == error.min_host_nbytes - (1 << 12)
    model, plain = _compile(name, device_nbytes, host_nbytes), CASES[name].build()
    loss = _train_step(model, name)
    assert loss == pytest.approx(loss_of(plain(**CASES[name].batches()[0])).item(), rel=1e-5)
    stats = chunkc.stats(model)
    assert stats["planned_peak_nbytes"] <= stats["budget_nbytes"] == device_nbytes
    assert stats["host_nbytes"] <= host_nbytes


@pytest.mark.long(but="odd")
@pytest.mark.parametrize("name", MODELS)
def test_one_byte_less_does_not_work(name: str, runner_of: GetRunner) -> None:
    runner = runner_of(name)
    device_nbytes, host_nbytes = runner.smallest()
    runner.reset(Setup(device_nbytes=device_nbytes, host_nbytes=host_nbytes))
    for less in ((device_nbytes - 1, host_nbytes), (device_nbytes, host_nbytes - 1)):
        with pytest.raises(BudgetError) as caught:
            runner.reset(Setup(device_nbytes=less[0], host_nbytes=less[1]))
        needed = caught.value.min_device_nbytes, caught.value.min_host_nbytes
        assert caught.value.missing_nbytes == max(needed[0] - less[0], 0) or caught.value.moment == "host"
        assert needed == (device_nbytes, host_nbytes) or (needed[0] > device_nbytes and needed[1] < host_nbytes)
        runner.reset(Setup(device_nbytes=needed[0], host_nbytes=needed[1]))


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_sweep_from_smallest_to_resident(name: str, runner_of: GetRunner) -> None:
    runner = runner_of(name)
    least = smallest_plan(runner).memory.device_budget_nbytes
    resident = _resident_nbytes(runner)
    budgets = [least + (resident - least) * step // 5 for step in range(6)]
    assert budgets[0] < budgets[-1] == resident
    volumes, runs = [], []
    for nbytes in budgets:
        runs.append(runner.train(Setup(device_nbytes=nbytes), SHORT))
        plan, stats = runner.plan, runner.stats()
        assert stats["planned_peak_nbytes"] <= stats["budget_nbytes"] == nbytes
        assert stats["h2d_nbytes"] == stats["planned_h2d_nbytes"]
        assert stats["d2h_nbytes"] == stats["planned_d2h_nbytes"]
        volumes.append(moved(plan))
        assert_same_bits(runs[-1], runs[0])
    assert volumes == sorted(volumes, reverse=True), f"more memory moves more bytes: {volumes}"
    assert volumes[0] > volumes[-1] == 0
    assert stats["h2d_nbytes"] == stats["d2h_nbytes"] == 0
    assert [len(plan.graph_segments(g)) for g in ("forward", "backward")] == [1, 1]
    assert all(c.home is Tier.DEVICE for c in plan.layout.chunks if c.os_home is not None)


def _resident_nbytes(runner: PlanRunner) -> int:
    """Least device bytes with which nothing moves, by the chunk size of a plan with room for all."""
    runner.reset(Setup(device_nbytes=BIG_NBYTES))
    options = PlanOptions(os_home="device", activations="keep", chunk_numel=runner.next_plan.layout.chunk_numel)
    with pytest.raises(BudgetError) as caught:
        runner.reset(Setup(options, device_nbytes=1))
    return caught.value.min_device_nbytes
