"""The largest model and batch: what is searched, in which order, and what is printed."""

import argparse
import json
import re
from dataclasses import dataclass, field, replace

import pytest
from plans_for_report import gpt_plan
from tiny_transformers import TINY_GPT

from chunkc.cli import frontier, main
from chunkc.cli.frontier import BATCHES, Search, bar_of
from chunkc.cost.timeline import Flops
from chunkc.errors import BudgetError, ChunkcError
from chunkc.hardware import Hardware
from chunkc.report.timeline import simulate
from chunkc.scenarios.models import Transformer
from chunkc.scenarios.scenario import Answer, Scenario, Scenarios

HW = Hardware.parse("v100-240g")
TIMELINE = replace(simulate(gpt_plan(), HW), flops=Flops(10**12, 10**12, None))
MODELS = tuple(Transformer(f"model-{n}", TINY_GPT.config, TINY_GPT.head) for n in range(9))


@dataclass
class Machine(Scenarios):
    """Model n with batch b fits while n + log2(b) <= room, and gives ``tokens_per_s[n]`` times b / (b + 1)."""

    room: int = 6
    tokens_per_s: dict[int, float] = field(default_factory=dict)
    asked: list[tuple[int, int]] = field(default_factory=list)

    def answer(self, scenario: Scenario) -> Answer:
        number, batch = int(scenario.model.label.split("-")[1]), scenario.batch
        self.asked.append((number, batch))
        if number + BATCHES.index(batch) > self.room:
            error = BudgetError(
                "no", moment="bwd.0", tensors=(), missing_nbytes=1 << 30, min_device_nbytes=1, min_host_nbytes=1
            )
            return Answer(scenario, shortage=error)
        per_s = self.tokens_per_s.get(number, 1000.0) * batch / (batch + 1)
        timeline = replace(TIMELINE, num_tokens=16 * batch, step_ms=16e3 * batch / per_s)
        return Answer(scenario, gpt_plan(), timeline=timeline)


def search(machine: Machine, least: float | None = None) -> Search:
    bar = bar_of(argparse.Namespace(min_tflops=None, min_tokens_per_s=least))
    return Search(Scenario(TINY_GPT, HW, batch=1, sequence=16), machine, bar)


def found_by(machine: Machine, least: float | None = None) -> tuple[str, int] | None:
    found = search(machine, least).largest(MODELS)
    return None if found is None or found.scenario is None else (found.scenario.model.label, found.scenario.batch)


def brute_force(machine: Machine, least: float) -> tuple[str, int] | None:
    for number in reversed(range(len(MODELS))):
        for batch in reversed(BATCHES):
            answer = machine.answer(Scenario(MODELS[number], HW, batch=batch, sequence=16))
            if answer.timeline is not None and (answer.timeline.tokens_per_s or 0) >= least:
                return MODELS[number].label, batch
    return None


@pytest.mark.parametrize("room", range(-1, 16))
def test_the_largest_model_and_batch_that_fit(room: int) -> None:
    expected = None if room < 0 else (f"model-{min(room, 8)}", BATCHES[min(max(room - 8, 0), len(BATCHES) - 1)])
    assert found_by(Machine(room=room)) == expected


@pytest.mark.parametrize("least", [0.0, 450.0, 600.0, 900.0, 980.0, 5000.0])
def test_the_bar_is_met_by_the_largest_model_that_a_full_search_finds(least: float) -> None:
    rates = {8: 700.0, 7: 650.0, 6: 800.0, 5: 990.0, 4: 500.0}
    expected = brute_force(Machine(room=7, tokens_per_s=rates), least)
    assert found_by(Machine(room=7, tokens_per_s=rates), least) == expected


def test_nothing_is_asked_twice_and_few_are_asked() -> None:
    machine = Machine(room=7)
    found_by(machine, 800.0)
    assert len(machine.asked) == len(set(machine.asked))
    assert len(machine.asked) < len(MODELS) * len(BATCHES) / 2


def test_a_bar_without_rates_is_an_error() -> None:
    meets = bar_of(argparse.Namespace(min_tflops=30.0, min_tokens_per_s=None))
    with pytest.raises(ChunkcError, match="needs rates: run calibrate"):
        meets(Answer(None, gpt_plan(), unpriced="run calibrate"))
    assert meets(Answer(None, gpt_plan(), timeline=replace(TIMELINE, step_ms=1e12 / 30.1e9)))
    assert not meets(Answer(None, gpt_plan(), timeline=replace(TIMELINE, step_ms=1e12 / 29.9e9)))


@pytest.fixture
def small_family(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(room=3)
    monkeypatch.setattr(frontier, "family", lambda name: MODELS)
    monkeypatch.setattr(frontier, "Scenarios", lambda tell: machine)
    return machine


def test_the_table_shows_what_was_tried(small_family: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["frontier", "--hw", "v100-240g"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if re.match(r"model-\d+  ", line)]) == len(small_family.asked)
    assert max(map(len, lines)) <= 80
    (marked,) = [line for line in lines if line.endswith("<")]
    assert marked.split()[:4] == ["model-3", "1", "full", "yes"]
    assert "model-4, batch 1 does not fit: 1.00 GiB of device memory missing" in lines
    assert lines[-2].startswith("largest: model-3, batch 1 x 16")


def test_json_and_the_exit_code_of_a_bar_that_nothing_meets(
    small_family: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["frontier", "--hw", "v100-240g", "--min-tokens-per-s", "1e9", "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["found"] is None
    assert [(row["model"], row["batch"]) for row in data["tried"]] == [
        (f"model-{number}", batch) for number, batch in small_family.asked
    ]


@pytest.mark.parametrize("text", ["nan", "inf", "0", "-3"])
@pytest.mark.parametrize("bar", ["--min-tflops", "--min-tokens-per-s"])
def test_a_bar_that_nothing_could_fail_or_meet_is_refused(
    bar: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["frontier", "--hw", "v100-240g", f"{bar}={text}"])
    assert f"{text!r} is not a positive number" in capsys.readouterr().err
