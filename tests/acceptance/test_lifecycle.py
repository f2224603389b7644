"""Models that come and go in one process, and Ctrl-C at any moment: memory returns, and what is left is usable.

An interrupted run must stand at a whole number of steps: every parameter equals, element by element, what plain PyTorch
has after that many, and training goes on from there.
"""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from pair import Pair, batch
from torch import nn

import chunkc
from chunkc.compiler.compiled_model import compiled_of

CELL = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))

    def forward(self, x):
        return self.layers(x).square().mean()

torch.manual_seed(0)
model = Net()
plain = copy.deepcopy(model)
model = chunkc.compile(model, hw, dtype=torch.float32, backend="eager")
losses = []
for net, make in ((model, chunkc.AdamW), (plain, torch.optim.AdamW)):
    optimizer = make(net.parameters(), lr=1e-2, eps=1e-4)
    for seed in range(3):
        loss = net(torch.randn(4, 32, generator=torch.Generator().manual_seed(seed)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
del net, loss
"""


def free_nbytes(model: nn.Module) -> tuple[int, int]:
    device = compiled_of(model).runtime.device
    return device.free_device_nbytes(), device.free_host_nbytes()


def test_a_notebook_cell_may_be_run_again_and_again() -> None:
    """The cell's model replaces the one before it; the budget holds one of them and not two."""
    hw = chunkc.Hardware.parse("emulated-96k-80k")
    space: dict[str, Any] = {"nn": nn, "torch": torch, "copy": copy, "chunkc": chunkc, "hw": hw}
    free = []
    for _ in range(3):
        exec(compile(CELL, "<cell>", "exec"), space)
        losses = space["losses"]
        assert losses[:3] == pytest.approx(losses[3:], rel=1e-5) and losses[2] < losses[0]
        for p, q in zip(space["model"].parameters(), space["plain"].parameters(), strict=True):
            torch.testing.assert_close(p.detach().clone(), q.detach(), rtol=0, atol=1e-5)
        gc.collect()
        free.append(free_nbytes(space["model"]))
    assert len(set(free)) == 1, "every run takes the same"
    device, host = free[0]
    assert device < 48 * 1024 and host < 40 * 1024, "two of them would not fit"


def test_the_line_that_compiles_may_not_be_run_twice_on_one_model() -> None:
    pair = Pair()
    pair.train(0)
    with pytest.raises(chunkc.ChunkcError, match="compiled"):
        chunkc.compile(pair.model, "emulated-640k-16m", dtype=torch.float32, backend="eager")
    pair.train(1)
    pair.check()


@pytest.mark.long
def test_one_of_two_models_on_a_shared_device_goes_and_the_other_trains_on() -> None:
    hw = chunkc.Hardware.parse("emulated-2300k-32m")
    first, second = Pair(hw), Pair(hw)
    for seed in range(2):
        first.train(seed)
        second.train(seed + 10)
    free = free_nbytes(second.model)
    del first
    gc.collect()
    after = free_nbytes(second.model)
    assert after[0] > free[0] and after[1] >= free[1]
    second.train(3)
    second.check()


@pytest.mark.long
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_a_copy_of_a_compiled_model_is_compiled_and_trained_beside_it(copied: Callable[[nn.Module], nn.Module]) -> None:
    """With an update under way when it is taken."""
    pair = Pair()
    pair.train(0)
    other = Pair(model=copied(pair.model))
    for seed in (1, 2):
        pair.train(seed)
        other.train(seed + 10)
    pair.check()
    other.check()


@contextmanager
def interrupt_after(delay_s: float) -> Iterator[None]:
    """Ctrl-C, as the kernel sends it, some time from now."""
    timer = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    model(*batch(seed)).backward()
    optimizer.step()
    optimizer.zero_grad()


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def is_equal(ours: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> bool:
    return all(torch.allclose(ours[name], plain[name], rtol=0, atol=1e-5) for name in plain)


MAX_STEPS = 12


@pytest.fixture(scope="module")
def trajectory() -> list[dict[str, torch.Tensor]]:
    """Parameters of plain PyTorch after 0, 1, 2, ... steps."""
    pair = Pair()
    states = [snapshot(pair.plain)]
    for seed in range(MAX_STEPS + 2):
        step(pair.plain, pair.plain_optimizer, seed)
        states.append(snapshot(pair.plain))
    return states


def run_interrupted(pair: Pair, delay_s: float) -> bool:
    """Train until Ctrl-C comes; whether it came."""
    try:
        with interrupt_after(delay_s):
            for seed in range(MAX_STEPS):
                step(pair.model, pair.optimizer, seed)
    except KeyboardInterrupt:
        return True
    return False


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Python drops what a finalizer raises
@pytest.mark.parametrize("num_trials", [12, pytest.param(300, marks=pytest.mark.slow)])
def test_ctrl_c_at_any_moment_leaves_a_whole_number_of_steps(
    trajectory: list[dict[str, torch.Tensor]], num_trials: int
) -> None:
    pair = Pair()
    pair.train(0)
    generator = torch.Generator().manual_seed(num_trials)
    num_interrupted = 0
    for _ in range(num_trials):
        pair.restart()
        delay_s = 0.12 * torch.rand((), generator=generator).item()
        num_interrupted += run_interrupted(pair, delay_s)
        pair.optimizer.zero_grad()
        reached = [k for k, state in enumerate(trajectory) if is_equal(snapshot(pair.model), state)]
        assert len(reached) == 1, f"interrupted after {delay_s} s: the parameters are those of no step"
        for k in range(reached[0], reached[0] + 2):
            step(pair.model, pair.optimizer, k)
        assert is_equal(snapshot(pair.model), trajectory[reached[0] + 2]), f"training goes on wrongly ({delay_s} s)"
    assert num_interrupted >= num_trials // 3
