"""Saved values that go to host memory and come back on a GPU: no bit changes, and the memory read falls as planned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from machines import Machine
from placements import train_moved_and_kept
from plan_runner import GetRunner, Setup
from torch import nn
from training import PLACEMENT, assert_same_bits

import chunkc
from chunkc.passes import Activations, PlanOptions
from chunkc.runtime.devices.debug_settings import DebugSettings

pytestmark = pytest.mark.gpu
Note = Callable[[str, object], None]
MIB, GIB = 1 << 20, 1 << 30
RECIPE = replace(PLACEMENT, num_steps=4)
DELAYED = DebugSettings(poison=True, max_delay_ms=0.5, seed=3)
WIDTH = 64
MIN_FALL = 0.9  # of the device bytes that the plan saves


@pytest.mark.parametrize(
    ("name", "dtype", "backend"),
    [
        ("gpt2_dropout", torch.float32, "eager"),
        ("gpt2", torch.bfloat16, "eager"),
        ("odd", torch.float32, "eager"),
        ("odd", torch.float32, "inductor"),
        *(pytest.param(n, torch.float32, "eager", marks=pytest.mark.slow) for n in ("llama", "t5", "vit", "resnet")),
    ],
)
def test_moving_changes_no_bit(name: str, dtype: torch.dtype, backend: str, runner_of: GetRunner) -> None:
    """Streams are late at random, and freed memory is NaN."""
    moving = Setup(PlanOptions(moved_share=1.0, os_home="host"), settings=DELAYED)
    assert_same_bits(*train_moved_and_kept(runner_of(name, dtype, backend), moving, RECIPE))


def test_moves_beside_chunks_at_the_least_budget_change_no_bit(runner_of: GetRunner) -> None:
    runner = runner_of("gpt2")
    runner.reset(Setup())
    values = [i for i, v in enumerate(runner.captured.schedule.saved_values()) if v.used_until is not None]
    options = PlanOptions(fixed_moves=tuple(values[::2]), os_home="host")
    device_nbytes, _ = runner.smallest(options)
    moving = Setup(options, device_nbytes=device_nbytes, settings=DELAYED)
    assert_same_bits(*train_moved_and_kept(runner, moving, RECIPE))
    assert runner.plans["moved"].memory.device_peak_nbytes < runner.plans["kept"].memory.device_peak_nbytes


class Layers(nn.Module):
    """Each layer saves two values of the batch's size; the loss, too, is in the plan."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layers(x).square().mean()
        return loss


def trained(
    activations: Activations, batch: torch.Tensor, machine: Machine
) -> tuple[list[torch.Tensor], dict[str, int]]:
    """Gradients of the second step, and what was read by then."""
    hw = machine.hw(GIB, 2 * GIB)
    model = chunkc.compile(Layers(), hw, dtype=torch.float32, backend="eager", activations=activations)
    optimizer = chunkc.AdamW(model.parameters(), lr=1e-2)
    model(batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    model(batch).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None], dict(chunkc.stats(model))


def test_measured_memory_falls_as_planned(machine: Machine, note: Note) -> None:
    rows = 65536 if machine.kind == "cuda" else 4096
    batch = machine.put(torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1)))
    (kept, without), (moved, stats) = (trained(choice, batch, machine) for choice in ("keep", "offload"))
    note("stats", {k: (without[k], stats[k]) for k in stats if "nbytes" in k})
    assert len(moved) == len(kept) == 16 and all(map(torch.equal, moved, kept))
    assert stats["moved_saved_nbytes"] >= 5 * batch.nbytes and without["moved_saved_nbytes"] == 0
    assert stats["h2d_nbytes"] == stats["planned_h2d_nbytes"] == stats["moved_saved_nbytes"]
    planned_fall = without["planned_peak_nbytes"] - stats["planned_peak_nbytes"]
    assert planned_fall > 3 * batch.nbytes
    if machine.kind == "cuda":
        assert stats["measured_peak_nbytes"] <= stats["planned_peak_nbytes"]
        assert without["measured_peak_nbytes"] - stats["measured_peak_nbytes"] >= MIN_FALL * planned_fall
