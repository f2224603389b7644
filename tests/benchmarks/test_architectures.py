"""The architecture matrix: each kind of model trains exactly in the least memory; what is not exact is said."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NAMES = (
    "llama", "qwen2", "qwen3", "mistral", "gemma2", "opt", "bloom", "gpt_neox", "phi", "falcon", "bert", "roberta",
    "deberta-v2", "t5", "bart", "mixtral", "vit", "mamba", "gpt2", "resnet",
    "gcn", "gat", "experts by masks", "lstm", "gru", "two towers", "unet", "dit", "mixer", "vae",
)  # fmt: skip
OFTEN = ("gat",)


@pytest.fixture
def matrix(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import architectures

    yield architectures
    for name in ("architectures", "activation_choices", "architecture_models", "handwritten_models"):
        sys.modules.pop(name, None)


def test_the_matrix_has_every_architecture(matrix: ModuleType) -> None:
    assert tuple(matrix.BY_NAME) == NAMES


def test_one_table_alone_is_not_written(matrix: ModuleType) -> None:
    with pytest.raises(SystemExit):
        matrix.parse(["--activations-only", "--out", "page.md"])
    assert matrix.parse(["--activations-only"]).out is None


@pytest.mark.long
@pytest.mark.parametrize("name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.slow) for n in NAMES])
def test_trains_exactly_in_the_least_memory(name: str, matrix: ModuleType) -> None:
    row = matrix.measure(matrix.BY_NAME[name])
    assert row.failures == []
    assert row.least_nbytes < row.budget_nbytes <= 1.05 * row.least_nbytes < row.model_data_nbytes
    assert row.moved_nbytes > 0 and row.num_segments > 2
    assert all(error <= matrix.TOLERANCES[kind] for kind, error in row.errors.items())
    assert row.errors.keys() == matrix.TOLERANCES.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", ("llama", "bert", "gpt2"))
def test_trains_exactly_under_inductor(name: str, matrix: ModuleType) -> None:
    assert matrix.measure(matrix.BY_NAME[name], "inductor").failures == []


@pytest.mark.long
@pytest.mark.parametrize("name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.slow) for n in NAMES])
def test_every_choice_for_activations_has_the_same_bits_at_its_least_budget(name: str, matrix: ModuleType) -> None:
    row = matrix.activation_choices.measure(matrix.BY_NAME[name])
    assert row.failures == []
    assert row.least_nbytes.keys() == row.unequal.keys() == {"keep", "recompute", "offload", "mixture"}
    assert row.moved_nbytes["keep"] == row.moved_nbytes["recompute"] == 0 < row.moved_nbytes["mixture"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ("llama", "bert", "gpt2"))
def test_every_choice_is_its_own_segments_kept_under_inductor(name: str, matrix: ModuleType) -> None:
    assert matrix.activation_choices.measure(matrix.BY_NAME[name], "inductor").failures == []


def test_other_bits_no_moves_and_no_dropout_are_said(matrix: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """One wrong bit in one run, one choice that moves nothing, and a model that no seed decides."""
    choices = matrix.activation_choices
    monkeypatch.setattr(choices, "least_nbytes", lambda *_: 1)
    monkeypatch.setattr(choices, "is_random", lambda _: False)

    def train(_: object, choice: Any, *__: object) -> Any:
        values = {"a": torch.ones(3)}
        if choice.activations == "offload":
            values["a"][1] = values["a"][1].nextafter(torch.tensor(2.0))
        memory = SimpleNamespace(device_budget_nbytes=1)
        plan = SimpleNamespace(memory=memory, segments=())
        return choices.Trained(plan, {"moved_saved_nbytes": int(bool(choice.passes))}, [1.0], {}, values)

    monkeypatch.setattr(choices, "train", train)
    row = choices.measure(SimpleNamespace(name="a"))
    assert row.failures == ["offload: other parameters", "offload moves nothing", "no dropout"]


WRONG = {
    "a dropped update": ("parameters", lambda run: run.parameters["a"].add_(1e-4), "parameters off by 1.0e-01"),
    "a stale moment": ("m", lambda run: run.m["a"].mul_(0.9), "m off by 1.0e-01"),
    "a wrong variance": ("v", lambda run: run.v["a"].mul_(1.01), "v off by 1.0e-02"),
    "another gradient": ("gradients", lambda run: run.gradients["a"].add_(1e-5), "gradients off by 1.0e-05"),
    "a lost gradient": ("gradients", lambda run: run.gradients.clear(), "gradients off by inf"),
    "another loss": ("loss", lambda run: run.losses.__setitem__(0, 2.1), "loss off by 5.0e-02"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_said(what: str, matrix: ModuleType) -> None:
    kind, break_, message = WRONG[what]

    def run() -> object:
        values = {k: {"a": torch.ones(3, dtype=torch.float64)} for k in ("gradients", "parameters", "m", "v")}
        return matrix.Run([2.0], **values, largest_update=1e-3)

    found, wanted = run(), run()
    errors = matrix.errors_of(found, wanted)
    good = matrix.Row("a", "eager", 1, 3, 10, 10, 50, 5, errors, True)
    assert good.failures == [] and set(errors.values()) == {0.0}
    break_(found)
    assert replace(good, errors=matrix.errors_of(found, wanted)).failures == [message], kind
    assert replace(good, moved_nbytes=0).failures == ["nothing moved"]
    assert replace(good, is_planned_ahead=False).failures == ["chunkc.plan plans otherwise"]


class Branches(torch.nn.Module):
    name = "branches"

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> SimpleNamespace:
        loss = self.linear(x).square().sum()
        return SimpleNamespace(loss=loss * 2 if loss.item() > 1 else loss)

    def build(self) -> Branches:
        return Branches()

    def batches(self) -> list[dict[str, torch.Tensor]]:
        return [{"x": torch.ones(2, 4)}]


def test_a_refused_architecture_is_a_line_that_fails(matrix: ModuleType) -> None:
    cells, is_good = matrix.cells_of(Branches(), "eager")
    assert not is_good and cells[:2] == ["branches", "eager"] and len(cells) == len(matrix.COLUMNS)
    assert cells[-1].startswith("CaptureError: Branches breaks into several graphs")
