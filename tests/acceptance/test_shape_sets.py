"""Shapes that are larger than the first: the model moves to a layout that serves all, or says what would do."""

from __future__ import annotations

import copy
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pair import MIXED, Pair, Tower, batch
from torch import nn

import chunkc
from chunkc.compiler.compiled_model import compiled_of
from chunkc.ir.tiers import Tier
from chunkc.runtime.devices.emulated import EmulatedDevice
from chunkc.runtime.storage.parameter_io import ChunkValues

SMALLEST, LARGEST = 4, 36
HW = "emulated-900k-16m"
"""Room for the longest batch with few chunks beside it; resident with the shortest."""


def low(hw: str = HW, **options: Any) -> Pair:
    """Two layers, which are captured in half the time of four."""
    torch.manual_seed(0)
    return Pair(hw, Tower(depth=2), **options)


def moves(pair: Pair) -> bool:
    return bool(chunkc.stats(pair.model)["h2d_nbytes"])


def layout_of(pair: Pair) -> object:
    return compiled_of(pair.model).runtime.layout


@pytest.mark.long
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_growing_lengths_are_exact(backend: str) -> None:
    pair = low({"eager": HW, "inductor": "emulated-760k-16m"}[backend], backend=backend)
    layouts = []
    for seed, length in enumerate((SMALLEST, 16, SMALLEST, LARGEST, 16, LARGEST, SMALLEST, 23)):
        pair.train(seed, length)
        pair.check()
        if not layouts or layout_of(pair) is not layouts[-1]:
            layouts.append(layout_of(pair))
    assert 2 <= len(layouts) <= 4, "more than the first one, and none for a length that was known"
    stats = chunkc.stats(pair.model)
    assert stats["measured_peak_nbytes"] <= stats["budget_nbytes"]


@pytest.mark.long
@pytest.mark.parametrize(
    "wishes",
    [pytest.param({}, id="all on one side", marks=pytest.mark.slow), pytest.param(MIXED, id="in all places")],
)
def test_optimizer_states_and_gradients_move_with_the_model(wishes: dict[str, object], tmp_path: Path) -> None:
    pair = low(wishes=wishes, accumulate=3)
    for seed in range(2):
        pair.train(seed, SMALLEST)
    first = layout_of(pair)
    before = copy.deepcopy(pair.optimizer.state_dict())
    chunkc.save_checkpoint(tmp_path / "before", pair.model, pair.optimizer)

    def add(model: nn.Module, _: torch.optim.Optimizer) -> None:
        for number, length in enumerate((SMALLEST, SMALLEST, LARGEST)):  # two gradients move, a third is added
            model(*batch(number, length)).backward()

    pair.both(add)
    assert layout_of(pair) is not first
    after = pair.optimizer.state_dict()
    for number, states in before["state"].items():
        for name, value in states.items():
            torch.testing.assert_close(after["state"][number][name], value, rtol=0, atol=0)
    for (name, ours), plain in zip(pair.model.named_parameters(), pair.plain.parameters(), strict=True):
        assert ours.grad is not None and plain.grad is not None, name
        torch.testing.assert_close(ours.grad.clone(), plain.grad, rtol=1e-4, atol=1e-6)

    def finish(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        optimizer.zero_grad()

    pair.both(finish)
    pair.train(5, LARGEST)
    pair.check()
    chunkc.load_checkpoint(tmp_path / "before", pair.model, pair.optimizer)
    for number, states in before["state"].items():
        for name, value in states.items():
            torch.testing.assert_close(pair.optimizer.state_dict()["state"][number][name], value, rtol=0, atol=0)


@pytest.mark.long
def test_evaluation_programs_are_made_anew_for_a_new_layout() -> None:
    pair = low()

    def loss_of(model: nn.Module, _: torch.optim.Optimizer) -> float:
        with torch.no_grad():
            return float(model(*batch(9, SMALLEST)))

    for length in (SMALLEST, LARGEST):
        pair.train(length, length)
        for _ in range(3):
            ours, plain = pair.both(loss_of)
            assert ours == pytest.approx(plain, rel=1e-5)
        evaluator = compiled_of(pair.model).evaluator
        assert evaluator.planned[-1].plan.layout == layout_of(pair)
    pair.check()


@pytest.fixture(scope="module")
def enough() -> int:
    """KiB that the refusal of the longest batch names."""
    pair = low("emulated-250k-16m")
    pair.train(0, SMALLEST)
    with pytest.raises(chunkc.BudgetError) as refusal:
        pair.model(*batch(1, LARGEST))
    pair.train(1, SMALLEST)
    pair.check()
    return -(-refusal.value.min_device_nbytes // 1024)


@pytest.mark.long(but="lengths1")
@pytest.mark.parametrize(
    "lengths",
    [
        (SMALLEST, LARGEST, 16),
        (LARGEST, SMALLEST, 16),
        pytest.param((16, SMALLEST, LARGEST), marks=pytest.mark.slow),
    ],
)
def test_a_number_that_a_refusal_names_serves_all_lengths(lengths: Sequence[int], enough: int) -> None:
    """In whatever order they come."""
    pair = low(f"emulated-{enough}k-16m")
    for seed, length in enumerate((*lengths, *lengths)):
        pair.train(seed, length)
    pair.check()


def test_host_memory_holds_the_model_once_while_it_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host budget has room for one set of homes."""
    pair = low()
    pair.train(0, SMALLEST)
    device = compiled_of(pair.model).runtime.device
    needed = chunkc.plan_of(pair.model).layout.nbytes_in(Tier.HOST)
    pair.train(1, LARGEST)
    assert device.host_budget_nbytes - device.free_host_nbytes() == layout_of(pair).nbytes_in(Tier.HOST)  # type: ignore[attr-defined]
    assert needed >= 0
    pair.check()


@pytest.mark.long
@pytest.mark.parametrize("place", ["allocate_arena", "allocate_home", "discard_home"])
def test_an_error_while_the_model_moves_loses_nothing(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = low(wishes=MIXED)
    for seed in range(2):
        pair.train(seed, SMALLEST)
    with monkeypatch.context() as patched:
        patched.setattr(EmulatedDevice, place, _refuse)
        with pytest.raises(OSError, match="refused"):
            pair.model(*batch(2, LARGEST))
    pair.check()
    for seed, length in enumerate((LARGEST, SMALLEST, LARGEST), 2):
        pair.train(seed, length)
        pair.check()


def _refuse(*_: object, **__: object) -> None:
    raise OSError("refused")


@pytest.mark.long
def test_many_lengths_make_few_layouts() -> None:
    pair, layouts = low(), list[object]()
    lengths: Sequence[int] = [4 + (7 * i) % 33 for i in range(12)]
    for seed, length in enumerate(lengths):
        pair.train(seed, length)
        if not layouts or layout_of(pair) is not layouts[-1]:
            layouts.append(layout_of(pair))
    pair.check()
    assert len(layouts) <= 4


@pytest.mark.long
def test_a_model_of_two_shapes_and_two_live_forwards() -> None:
    pair = low(accumulate=2)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        (model(*batch(1, 16)) + 2 * model(*batch(2, 9))).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        pair.train(0, SMALLEST)
        pair.both(step)
        pair.check()
    assert isinstance(pair.model, Tower)


@pytest.mark.long
@pytest.mark.parametrize(
    ("backend", "hw", "model"),
    [
        pytest.param("eager", HW, lambda: Tower(depth=2), id="eager"),
        pytest.param("inductor", "emulated-500k-16m", lambda: Tower(depth=1, width=24), id="inductor"),
    ],
)
def test_declared_shapes_have_one_layout_from_the_start(backend: str, hw: str, model: Callable[[], Tower]) -> None:
    pair = Pair(hw, model(), backend=backend, example_inputs=[batch(0, SMALLEST), batch(0, LARGEST), batch(0, 16)])
    pair.train(0, SMALLEST)
    first, num_planned = layout_of(pair), compiled_of(pair.model).session.num_planned
    assert num_planned == 3
    for seed, length in enumerate((16, LARGEST, SMALLEST, LARGEST), 1):
        pair.train(seed, length)
        pair.check()
    assert layout_of(pair) is first and compiled_of(pair.model).session.num_planned == num_planned


@pytest.mark.long
def test_declared_shapes_that_do_not_fit_are_refused_before_anything_runs() -> None:
    """Again at each call; the number that is named is enough."""
    pair = low("emulated-250k-16m", example_inputs=[batch(0, SMALLEST), batch(0, LARGEST)])
    for _ in range(2):
        with pytest.raises(chunkc.BudgetError) as refusal:
            pair.model(*batch(0, SMALLEST))
    assert compiled_of(pair.model).runtime.num_forwards == 0
    pair.check()
    enough = -(-refusal.value.min_device_nbytes // 1024)
    pair = low(f"emulated-{enough}k-16m", example_inputs=[batch(0, SMALLEST), batch(0, LARGEST)])
    for seed, length in enumerate((SMALLEST, LARGEST)):
        pair.train(seed, length)
    pair.check()


@pytest.mark.long
def test_one_example_by_keyword_and_what_is_no_example() -> None:
    tokens, targets = batch(0, 8)
    pair = low(example_inputs={"tokens": tokens, "targets": targets})
    pair.train(0, 8)  # by position: another signature, planned when it comes
    pair.check()
    assert compiled_of(pair.model).session.num_planned == 2
    for wrong in ([tokens], [(tokens, targets), 8], "inputs"):
        with pytest.raises(chunkc.ChunkcError, match="a tuple \\(by position\\) or a dict"):
            low(example_inputs=wrong)


class Breaks(Tower):
    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return super().forward(tokens, targets)


def test_a_forward_that_breaks_cannot_be_declared() -> None:
    pair = Pair(HW, Breaks(depth=2), example_inputs=[batch(0, 8)])
    with pytest.raises(chunkc.CaptureError, match="cannot be declared by example_inputs"):
        pair.model(*batch(0, 8))
    pair.check()


@pytest.mark.long
@pytest.mark.parametrize("accumulate", [1, 3])
def test_an_interrupt_in_the_middle_of_a_move_comes_when_it_is_done(
    accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, take = low(wishes=MIXED, accumulate=accumulate), ChunkValues.take
    for seed in range(2):
        pair.train(seed, SMALLEST)

    def interrupted(self: ChunkValues, left: ChunkValues) -> None:
        take(self, left)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)  # the main thread takes the signal while this goes on

    with monkeypatch.context() as patched:
        patched.setattr(ChunkValues, "take", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pair.model(*batch(2, LARGEST))
    pair.check()
    for seed, length in enumerate((LARGEST, SMALLEST), 2):
        pair.train(seed, length)
    pair.check()
    device, layout = compiled_of(pair.model).runtime.device, compiled_of(pair.model).runtime.layout
    assert layout is not None
    assert device.host_budget_nbytes - device.free_host_nbytes() == layout.nbytes_in(Tier.HOST), "old homes are free"


@pytest.mark.long
def test_a_refused_pin_leaves_values_in_their_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = low(wishes=MIXED)
    pair.train(0, SMALLEST)
    with monkeypatch.context() as patched:
        patched.setattr(EmulatedDevice, "pin_home", _refuse)
        with pytest.raises(OSError, match="refused"):
            pair.model(*batch(1, LARGEST))
        pair.check()
    pair.train(1, LARGEST)
    pair.check()


@pytest.mark.long
def test_between_layouts_values_are_read_written_and_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = low(wishes=MIXED)

    def evaluate(model: nn.Module, _: torch.optim.Optimizer) -> float:
        with torch.no_grad():
            return float(model(*batch(9, SMALLEST)))

    pair.train(0, SMALLEST)
    for _ in range(3):
        pair.both(evaluate)
    with monkeypatch.context() as patched:
        patched.setattr(EmulatedDevice, "allocate_arena", _refuse)
        with pytest.raises(OSError, match="refused"):
            pair.model(*batch(1, LARGEST))
    ours, plain = pair.both(evaluate)
    assert ours == pytest.approx(plain, rel=1e-5)
    values = {name: value * 1.01 for name, value in pair.plain.state_dict().items()}
    pair.both(lambda model, _: model.load_state_dict(values))
    pair.check()
    for seed, length in enumerate((LARGEST, SMALLEST), 1):
        pair.train(seed, length)
        pair.check()
    ours, plain = pair.both(evaluate)
    assert ours == pytest.approx(plain, rel=1e-5)


@pytest.mark.long
def test_declared_shapes_keep_their_layout_when_another_comes_first() -> None:
    pair = low(example_inputs=[batch(0, SMALLEST), batch(0, LARGEST)])
    for seed, length in enumerate((16, LARGEST, SMALLEST)):
        pair.train(seed, length)
        pair.check()


@pytest.mark.long
def test_refused_sizes_are_not_remembered() -> None:
    pair = Pair("emulated-300k-16m", Breaks(depth=2))
    for seed in range(2):
        pair.train(seed, SMALLEST)
    graphs = compiled_of(pair.model).session.graphs.graphs
    num_graphs = len(graphs)
    for length in (60, 61, 60):
        with pytest.raises(chunkc.BudgetError):
            pair.model(*batch(0, length))
    assert len(graphs) <= num_graphs + 1
    pair.train(2, SMALLEST)
    pair.check()
