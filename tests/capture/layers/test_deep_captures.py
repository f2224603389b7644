"""Plans of deep modules from captures of few of their layers: those of captures of the whole, or none."""

import logging
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from tiny_transformers import TINY_BERT, TINY_GPT
from torch import nn
from torch.nn import functional as F

import chunkc
from chunkc.capture.budgets import GraphChooser
from chunkc.capture.graphs import Captured
from chunkc.capture.layers.deep_captures import CapturedAhead, DeepCaptures, captured_by_layers
from chunkc.capture.layers.periodic import NotPeriodicError
from chunkc.compiler.plan_ahead import capture_ahead
from chunkc.compiler.validation import compute_dtype, param_infos, unique_params
from chunkc.hardware import Hardware
from chunkc.ir.schedule import Schedule

NUM_LAYERS = 12
TOKENS = torch.zeros(2, 16, dtype=torch.long)
GPU, EMULATED = "rtx2060-8g-16g", "emulated-2m-64m"
SLOW = pytest.mark.slow


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Deep(nn.Module):
    """``whole``: which of the layers the forward asks for by number."""

    def __init__(self, num_layers: int = NUM_LAYERS, whole: int | None = None) -> None:
        super().__init__()
        self.whole = whole
        self.embedding, self.head = nn.Embedding(40, 32), nn.Linear(32, 40)
        self.layers = nn.ModuleList(Layer(i) for i in range(num_layers))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        if self.whole is not None:
            x = x + self.layers[self.whole].up.bias.sum()
        return F.cross_entropy(self.head(x).flatten(0, 1), input_ids.flatten())


class Uneven(Deep):
    """Its forward treats every third layer otherwise, which nothing but the number says."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x) if layer.number % 3 else torch.tanh(layer(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), input_ids.flatten())


def on_meta(make: type[nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make().train()


def captures(
    model: nn.Module, spelling: str, choose: GraphChooser | None, labels: torch.Tensor | None = None
) -> tuple[Captured, CapturedAhead | None]:
    """Of all layers, and from few of them, with the same choice of the activation budget."""
    hw = Hardware.parse(spelling)
    dtype = compute_dtype("auto", list(unique_params(model)), hw)
    inputs = {"input_ids": TOKENS} if labels is None else {"input_ids": TOKENS, "labels": labels}
    capture = partial(capture_ahead, model, dtype, inputs, "inductor", gpu=hw.compute_capability)
    return capture(choose), captured_by_layers(model, capture, choose, param_infos(model, dtype), least=6)


@pytest.mark.long
@pytest.mark.parametrize(
    ("share", "spelling"),
    [
        (None, GPU),
        (0.5, GPU),
        (0.0, EMULATED),
        *(pytest.param(share, GPU, marks=SLOW) for share in (1.0, 0.0)),
        *(pytest.param(share, EMULATED, marks=SLOW) for share in (None, 1.0, 0.5)),
    ],
)
def test_a_deep_module_is_captured_exactly(share: float | None, spelling: str) -> None:
    """Also where the chooser asks for other shares before."""
    asked = list[Schedule]()

    def choose(schedule_with: object) -> tuple[float, str]:
        assert callable(schedule_with) and share is not None
        asked.extend(schedule_with(budget) for budget in (1.0, 0.0))
        return share, "as asked"

    whole, found = captures(on_meta(Deep), spelling, None if share is None else choose)
    assert found is not None and "periodic" in [record.name for record in found.stages]
    assert found.schedule == whole.schedule and found.schedule.digest() == whole.schedule.digest()
    assert ("rematerialise" in [record.name for record in found.stages]) == (share is not None)
    assert asked[: len(asked) // 2] == asked[len(asked) // 2 :]


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "recompute"), [("gpt", False), ("gpt", True), pytest.param("bert", True, marks=SLOW)]
)
def test_deep_models_of_transformers(family: str, recompute: bool) -> None:
    """A model that checkpoints its layers itself leaves nothing to choose."""
    transformer = {"gpt": TINY_GPT, "bert": TINY_BERT}[family]
    model = transformer.with_depth(NUM_LAYERS).build(recompute=recompute)
    is_asked = []

    def choose(_: object) -> tuple[float, str]:
        is_asked.append(True)
        return 1.0, ""

    whole, found = captures(model, GPU, choose, TOKENS[:, 0] if family == "bert" else TOKENS)
    assert found is not None and found.schedule == whole.schedule
    assert bool(is_asked) is not recompute


@pytest.mark.long(but="make1")
@pytest.mark.parametrize("make", [Uneven, partial(Deep, whole=9), partial(Deep, num_layers=5)])
def test_what_does_not_follow_from_few_layers_is_captured_whole(
    make: type[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "chunkc"):
        whole, found = captures(on_meta(make), GPU, None)
    assert found is None and whole.schedule.forward.operators
    is_told = any("is captured with all its layers" in record.message for record in caplog.records)
    assert is_told is (len(whole.schedule.params) > 25)


@pytest.mark.long
def test_a_plan_of_many_layers_takes_captures_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is that of the whole, and the model as it was."""
    monkeypatch.setattr("chunkc.compiler.plan_ahead.captured_by_layers", lambda *_: None)
    model = on_meta(partial(Deep, num_layers=50))
    layers = model.layers
    plans = [chunkc.plan(model, "rtx2060-8g-16g", example_inputs=(TOKENS,))]
    monkeypatch.undo()
    plans.append(chunkc.plan(model, "rtx2060-8g-16g", example_inputs=(TOKENS,)))
    names = [[record.name for record in plan.stages] for plan in plans]
    assert ["periodic" in of_plan for of_plan in names] == [False, True]
    assert plans[0].digest() == plans[1].digest() and model.layers is layers and len(model.layers) == 50


def test_too_few_layers_of_a_kind_say_nothing() -> None:
    def refuse(depth: int, shares: Sequence[float]) -> list[CapturedAhead]:
        raise AssertionError(f"captured {depth} layers for {shares}")

    for num_layers, num_kept in ((5, 5), (5, 0), (10, 5), (40, 1), (40, 39)):
        with pytest.raises(NotPeriodicError):
            DeepCaptures(refuse, num_layers, list).of(num_kept)
