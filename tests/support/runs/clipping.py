"""Clipped runs and their comparison with torch's clip and step, on every machine."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from machines import EMULATED, Machine
from models import CASES
from pair import Pair
from placements import MIXED, all_on_device, options_of
from plan_runner import PlanRunner, Setup
from torch import nn
from training import SEMANTICS, Trained, assert_same_semantics, train_measured

import chunkc
from chunkc.runtime.devices.debug_settings import DebugSettings

RECIPE = replace(SEMANTICS, num_steps=8)
DELAYED = DebugSettings(poison=True, max_delay_ms=0.1, seed=3)
NAME = "odd"
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
Clip = Callable[[nn.Module, float], torch.Tensor]


def smallest(runner: PlanRunner) -> Setup:
    options = replace(options_of(runner), tracks_grad_norm=True)
    device_nbytes, host_nbytes = runner.smallest(options)
    return Setup(options, device_nbytes=device_nbytes, host_nbytes=host_nbytes)


PLACES: dict[str, Callable[[PlanRunner], Setup]] = {
    "smallest": smallest,
    "all_on_device": all_on_device,
    "some_of_each": lambda runner: replace(MIXED["some_of_each"](runner), host_arithmetic=False),
    "whole_and_streamed": lambda runner: replace(MIXED["whole_and_streamed"](runner), host_arithmetic=False),
    "some_begun": lambda runner: replace(MIXED["some_begun"](runner), host_arithmetic=False),
}


def torch_clip(model: nn.Module, max_norm: float) -> torch.Tensor:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def clipping(max_norm: float, norms: list[torch.Tensor], kind: Any, clip: Clip) -> MakeOptimizer:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = kind(model.parameters(), **RECIPE.options)
        optimizer.register_step_pre_hook(lambda *_: norms.append(clip(model, max_norm)))
        return optimizer

    return make


def train_clipped(max_norm: float, machine: Machine = EMULATED) -> tuple[Trained, list[float]]:
    model, norms = CASES[NAME].build().to(machine.torch_device), list[torch.Tensor]()
    make = clipping(max_norm, norms, torch.optim.AdamW, torch_clip)
    found = train_measured(model, machine.put(CASES[NAME].batches()), make(model), RECIPE)
    return found, [float(norm) for norm in norms]


def telling_norm() -> float:
    """What clips some of the steps, and those to different shares."""
    norms = sorted(train_clipped(1e9)[1])
    found = 0.7 * norms[len(norms) // 2]
    assert 0 < sum(norm > found for norm in norms)
    return found


def check_clipping(runner: PlanRunner, place: str, max_norm: float) -> None:
    """Losses, parameters, both moments (b), and the norms; both ways of clipping apply the same factors."""
    wanted, wanted_norms = train_clipped(max_norm, runner.machine)
    norms: list[torch.Tensor] = []
    setup = replace(PLACES[place](runner), settings=DELAYED)
    found = runner.train(setup, RECIPE, clipping(max_norm, norms, chunkc.AdamW, chunkc.clip_grad_norm_))
    assert runner.plan.tracks_grad_norm
    assert_same_semantics(found, wanted)
    torch.testing.assert_close(torch.stack(norms).cpu(), torch.tensor(wanted_norms), rtol=1e-5, atol=0)
    inside = runner.train(
        setup, RECIPE, lambda m: chunkc.AdamW(m.parameters(), **RECIPE.options, max_grad_norm=max_norm)
    )
    assert_same_semantics(inside, wanted)


def clip(pair: Pair, max_norm: float, norm_type: float = 2.0, rtol: float = 2e-6) -> float:
    norm = chunkc.clip_grad_norm_(pair.model, max_norm, norm_type)
    wanted = torch.nn.utils.clip_grad_norm_(pair.plain.parameters(), max_norm, norm_type)
    assert norm.dtype is torch.float32 and norm.shape == ()
    torch.testing.assert_close(norm, wanted, rtol=rtol, atol=0)
    return float(wanted)


def step(pair: Pair) -> None:
    for optimizer in (pair.optimizer, pair.plain_optimizer):
        optimizer.step()
        optimizer.zero_grad()
    pair.check()


def check_gradients(pair: Pair, rtol: float = 1e-5, atol: float = 1e-8) -> None:
    check_shown(pair.model, pair.plain, rtol, atol)


def check_shown(model: nn.Module, plain: nn.Module, rtol: float = 1e-5, atol: float = 1e-8) -> None:
    """Gradients of a compiled model and of a plain one; NaN equals NaN."""
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        wanted = theirs.grad
        assert (wanted is None) == (ours.grad is None), name
        if wanted is not None and ours.grad is not None:
            torch.testing.assert_close(
                ours.grad.clone(), wanted, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
            )


def exp_avg_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [state["exp_avg"] for state in optimizer.state_dict()["state"].values()]


def check_moments(pair: Pair) -> None:
    """What an Adam step forgives, its first moments do not."""
    for ours, theirs in zip(exp_avg_of(pair.optimizer), exp_avg_of(pair.plain_optimizer), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7)
