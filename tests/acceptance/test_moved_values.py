"""Saved values that go to host memory and come back change no bit, whatever else moves and runs in between."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config
from placements import train_moved_and_kept
from plan_runner import GetRunner, Setup
from torch import nn
from training import PLACEMENT, assert_same_bits

import chunkc
from chunkc.compiler.compiled_model import compiled_of
from chunkc.ir.tiers import Tier
from chunkc.passes import PlanOptions
from chunkc.runtime.devices.debug_settings import DebugSettings

RECIPE = replace(PLACEMENT, num_steps=4)
DELAYED = DebugSettings(poison=True, max_delay_ms=0.5, seed=3)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("gpt2_dropout", "eager"),
        ("odd", "eager"),
        ("odd", "inductor"),
        *(pytest.param(n, "eager", marks=pytest.mark.slow) for n in ("llama", "t5", "vit", "bert", "albert", "resnet")),
        pytest.param("gpt2", "inductor", marks=pytest.mark.slow),
    ],
)
def test_moving_changes_no_bit(name: str, backend: str, runner_of: GetRunner) -> None:
    runner = runner_of(name, backend=backend)
    moved = Setup(PlanOptions(moved_share=1.0, os_home="host"), settings=DELAYED)
    found, kept = train_moved_and_kept(runner, moved, RECIPE)
    assert_same_bits(found, kept)


@pytest.mark.long
def test_mixtures_with_chunks_that_move_change_no_bit(runner_of: GetRunner) -> None:
    """Some values move, others stay, at the least device budget, where payloads come and go too."""
    runner = runner_of("gpt2")
    runner.reset(Setup())
    values = [i for i, v in enumerate(runner.captured.schedule.saved_values()) if v.used_until is not None]
    options = PlanOptions(fixed_moves=tuple(values[::2]))
    device_nbytes, _ = runner.smallest(options)
    found, kept = train_moved_and_kept(runner, Setup(options, device_nbytes=device_nbytes), RECIPE)
    assert_same_bits(found, kept)
    moved, all_kept = (runner.plans[name].memory.nonmodel_nbytes for name in ("moved", "kept"))
    assert moved < all_kept


def test_micro_batches_share_the_copies(runner_of: GetRunner) -> None:
    runner = runner_of("gpt2")
    options = PlanOptions(moved_share=1.0, accumulate=2)
    found, kept = train_moved_and_kept(runner, Setup(options, settings=DELAYED), replace(RECIPE, num_steps=2))
    assert_same_bits(found, kept)


def layers(num: int = 8, width: int = 64) -> nn.Module:
    """Layers that save two values of a megabyte each at a batch of 4096."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(num)))


def compiled(**options: Any) -> nn.Module:
    model = chunkc.compile(layers(), "emulated-64m-256m", dtype=torch.float32, backend="eager", **options)
    model(BATCH).square().mean().backward()
    return model


BATCH = torch.randn(4096, 64, generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.fixture(scope="module")
def kept() -> dict[str, Any]:
    model = compiled(activations="keep")
    return {"gradients": gradients(model), **chunkc.stats(model)}


def assert_kept(model: nn.Module, kept: dict[str, Any]) -> None:
    found = gradients(model)
    assert len(found) == len(kept["gradients"]) == 16
    assert all(map(torch.equal, found, kept["gradients"]))


@pytest.mark.long
def test_measured_memory_falls_as_planned(kept: dict[str, Any]) -> None:
    model = compiled(activations="offload")
    assert_kept(model, kept)
    stats = chunkc.stats(model)
    assert stats["moved_saved_nbytes"] >= 5 * 2**20 and kept["moved_saved_nbytes"] == 0
    assert stats["planned_peak_nbytes"] < kept["planned_peak_nbytes"] - 3 * 2**20
    assert stats["measured_peak_nbytes"] <= stats["planned_peak_nbytes"] + 2**20
    assert stats["measured_peak_nbytes"] < kept["measured_peak_nbytes"] - 2 * 2**20
    assert stats["h2d_nbytes"] == stats["d2h_nbytes"] == stats["planned_h2d_nbytes"] == stats["moved_saved_nbytes"]
    assert stats["host_nbytes"] == kept["host_nbytes"] + stats["moved_saved_nbytes"]


@torch._functorch.config.patch(donated_buffer=False)
def test_a_backward_may_run_twice(kept: dict[str, Any]) -> None:
    """What came back goes away again while autograd still holds it."""
    model = compiled(activations="offload", accumulate=2)
    model.zero_grad()
    loss = model(BATCH).square().mean()
    loss.backward(retain_graph=True)
    assert_kept(model, kept)
    model.zero_grad()
    loss.backward()
    assert_kept(model, kept)


def test_something_else_may_run_between_forward_and_backward(kept: dict[str, Any]) -> None:
    model = compiled(activations="offload")
    model.zero_grad()
    loss = model(BATCH).square().mean()
    with torch.no_grad():
        model(BATCH[:7])
    loss.backward()
    assert_kept(model, kept)


def test_two_forwards_may_wait(kept: dict[str, Any]) -> None:
    """Each has copies of its own, whichever backward comes first."""
    model = compiled(activations="offload", accumulate=2)
    model.zero_grad()
    first, second = model(BATCH).square().mean(), model(2 * BATCH).square().mean()
    first.backward()
    assert_kept(model, kept)
    second.backward()
    runtime = compiled_of(model).runtime
    assert runtime.accounting.copies.nbytes == 2 * chunkc.stats(model)["moved_saved_nbytes"]
    assert runtime.accounting.others_nbytes(runtime.layout)[Tier.HOST] == 0


def test_a_forward_without_room_for_its_copies_is_refused(kept: dict[str, Any]) -> None:
    model = chunkc.compile(layers(), "emulated-64m-8m", dtype=torch.float32, backend="eager", activations="offload")
    loss = model(BATCH).square().mean()
    with pytest.raises(chunkc.BudgetError, match=r"1 forwards wait for their backward, with .* let go of"):
        model(BATCH)
    loss.backward()
    assert_kept(model, kept)
    model.zero_grad()
    for _ in range(2):  # whoever is let go of gives its copies back
        loss = model(BATCH).square().mean()
        del loss
    model(BATCH).square().mean().backward()
    assert_kept(model, kept)


@torch._functorch.config.patch(donated_buffer=False)
def test_an_exception_in_backward_loses_nothing(kept: dict[str, Any]) -> None:
    model = compiled(activations="offload")
    model.zero_grad()
    output = model(BATCH)
    runtime, countdown = compiled_of(model).runtime, [0] * 6  # samples: the first as backward begins, then by segment
    sample = runtime.device.meter.sample  # type: ignore[attr-defined]

    def fail() -> None:
        if countdown and not countdown.pop() and not countdown:
            raise KeyboardInterrupt
        sample()

    loss = output.square().mean()
    runtime.device.meter.sample = fail  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        loss.backward(retain_graph=True)
    loss.backward()
    assert_kept(model, kept)


class Steps:
    """Training with dropout, of which steps may be run by one model and the next by another."""

    def __init__(self, activations: str) -> None:
        torch.manual_seed(2)
        plain = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.2)) for _ in range(6)))
        options: dict[str, Any] = {"dtype": torch.float32, "backend": "eager", "activations": activations}
        self.model = chunkc.compile(plain, "emulated-64m-256m", **options)
        self.optimizer = chunkc.AdamW(self.model.parameters(), lr=1e-2)
        self.losses: list[float] = []

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            loss = self.model(BATCH[:512]).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.item())

    def bits(self) -> list[torch.Tensor]:
        states = [v for s in self.optimizer.state_dict()["state"].values() for v in s.values()]
        return [*(p.detach().clone() for p in self.model.parameters()), *states]


@pytest.mark.long
def test_a_checkpoint_resumes_with_the_same_bits_whatever_moves(tmp_path: Path) -> None:
    """Saved between two steps by a run that moves; loaded by runs that move, recompute and keep."""
    first = Steps("offload")
    torch.manual_seed(7)
    first.run(2)
    chunkc.save_checkpoint(tmp_path, first.model, first.optimizer).result()
    first.run(2)
    assert chunkc.stats(first.model)["moved_saved_nbytes"] > 0
    for activations in ("offload", "recompute", "keep"):
        second = Steps(activations)
        chunkc.load_checkpoint(tmp_path, second.model, second.optimizer)
        second.run(2)
        assert second.losses == first.losses[2:], activations
        assert all(map(torch.equal, second.bits(), first.bits())), activations


def test_hooks_on_saved_tensors_are_refused() -> None:
    model = compiled(activations="offload")
    model.zero_grad()
    with pytest.raises(chunkc.ChunkcError, match="saved_tensors_hooks"), torch.autograd.graph.save_on_cpu():
        model(BATCH)


def test_a_deleted_model_gives_its_copies_back() -> None:
    model = compiled(activations="offload")
    model.zero_grad()
    loss = model(BATCH).square().mean()
    device = compiled_of(model).runtime.device
    assert device.free_host_nbytes() < device.host_budget_nbytes
    del model, loss
    gc.collect()
    assert device.free_host_nbytes() == device.host_budget_nbytes


@pytest.mark.long
def test_several_shapes_move(kept: dict[str, Any]) -> None:
    """Forward of one shape, then of another, and backward of both, in either order."""
    models = [compiled(activations=choice, accumulate=4) for choice in ("keep", "offload")]
    for model in models:
        model.zero_grad()
        losses = [model(BATCH[:size]).square().mean() for size in (1024, 4096)]
        losses[0].backward()
        losses[1].backward()
    expected, found = (gradients(model) for model in models)
    assert len(found) == 16 and all(map(torch.equal, found, expected))
    assert chunkc.stats(models[1])["moved_saved_nbytes"] > 0


class Breaking(nn.Module):
    """Breaks between two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layers(4), layers(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


def test_forwards_that_break_keep_their_activations(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="chunkc")
    model = chunkc.compile(Breaking(), "emulated-64m-256m", dtype=torch.float32, backend="eager", activations="offload")
    optimizer = chunkc.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(3):
        loss = model(BATCH[:256]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[2] < losses[0] and chunkc.stats(model)["moved_saved_nbytes"] == 0
    assert "keeps its activations: values move in forwards of one graph only" in caplog.text


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(chunkc.ChunkcError, match="activations must be one of 'auto', 'keep', 'recompute', 'offload'"):
        chunkc.compile(layers(), "emulated-64m-64m", activations="move")  # type: ignore[arg-type]
