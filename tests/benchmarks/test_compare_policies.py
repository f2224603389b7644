"""The comparison with modelled systems: the committed page has every row, and a row says what its parts say."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from costs import RATES, with_work
from schedules import chain, planned, target

from chunkc.cost.simulate import simulate_with
from chunkc.errors import BudgetError
from chunkc.hardware import Hardware
from chunkc.ir.plan import MovedValue
from chunkc.report import Plan as ReportedPlan
from chunkc.report.units import size
from chunkc.scenarios.models import built_in
from chunkc.scenarios.scenario import Answer, Recompute, Scenario, Scenarios

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import compare_policies

        yield compare_policies
        for name in ("compare_policies", "step_bounds", "journal", "provenance"):
            sys.modules.pop(name, None)


def test_the_page_has_every_model_on_every_machine(script: ModuleType) -> None:
    page = script.PAGE.read_text()
    for model in script.MODELS:
        assert page.count(f"| {model} ") == len(script.MACHINES), model
    assert page.count("\n## ") == len(script.MACHINES)


def test_a_row_says_who_is_faster_and_what_the_step_waits_for(script: ModuleType) -> None:
    plan = planned(chain(4), target(2048)).plan
    timeline = simulate_with(with_work(plan, 2), RATES)
    bound_ms = timeline.step_ms / 1.25
    step = script.Step(timeline, {"compute": bound_ms, "exchange": bound_ms / 2}, 3, 5, 2 << 30)
    faster = script.Row("hw", "model", step, "", {"dos": timeline.step_ms / 2, "l2l": timeline.step_ms * 3})
    assert faster.best_other == "dos" and not faster.is_fastest
    assert script.cells_of(faster)[4] == "0.50"
    slower = script.Row("hw", "model", step, "", {"l2l": timeline.step_ms * 3})
    assert slower.is_fastest and script.cells_of(slower)[4] == "3.00"
    assert script.cells_of(slower)[5].endswith("(compute)") and script.cells_of(slower)[6] == "+25.0%"
    assert script.Row("hw", "model", step, "", {"l2l": timeline.step_ms}).is_fastest
    decided = script.Row("hw", "model", step, "", {}, replace(step, timeline=replace(timeline, step_ms=bound_ms * 1.5)))
    assert "+50.0%: " in script.cells_of(decided)[-1]
    assert script.cells_of(decided)[-1].endswith("; 3 of 5 chunks have a second home, host memory has 2.00 GiB left")
    near = script.Row("hw", "model", step, "", {}, replace(step, timeline=replace(timeline, step_ms=bound_ms * 1.04)))
    assert script.cells_of(near)[-1].endswith(", +4.0%")
    lacking = script.Row("hw", "model", step, "", {}, None, "misses 2 GiB of host memory")
    assert script.cells_of(lacking)[-1] == "misses 2 GiB of host memory"


@pytest.mark.parametrize("hw", ["8xv100-240g", "v100-240g"])
def test_the_slower_of_the_first_and_the_last_rank_is_shown(script: ModuleType, hw: str) -> None:
    timeline = simulate_with(with_work(planned(chain(4), target(2048)).plan, 2), RATES)
    asked = []

    class Ranks(Scenarios):
        def answer(self, scenario: Scenario) -> Answer:
            asked.append((scenario.rank, scenario.keep))
            return Answer(scenario, timeline=replace(timeline, step_ms=10.0 + scenario.rank))

    scenario = Scenario(built_in("gpt-1b"), Hardware.parse(hw), 1, 8).keeping(0.25)
    found = script.slowest(Ranks().answer(scenario), Ranks())
    assert asked == ([(0, 0.25), (7, 0.25)] if "8x" in hw else [(0, 0.25)])
    assert found.timeline.step_ms == 10.0 + asked[-1][0]


@pytest.mark.parametrize("fits", [True, False])
def test_the_same_layers_are_computed_again_with_a_decision_where_that_fits(script: ModuleType, fits: bool) -> None:
    plan = ReportedPlan.of(planned(chain(4), target(2048)).plan)
    asked = []

    class Deciding(Scenarios):
        def answer(self, scenario: Scenario) -> Answer:
            asked.append((scenario.recompute, scenario.tracks_grad_norm))
            return Answer(scenario, plan if fits or scenario.recompute is Recompute.AUTO else None)

    scenario = Scenario(built_in("gpt-1b"), Hardware.parse("v100-240g"), 1, 8, tracks_grad_norm=False)
    found = script.with_decision(Answer(scenario.keeping(0.25), plan), scenario, Deciding())
    assert found.fits
    assert asked == [(Recompute.PARTIAL, True), (Recompute.AUTO, True)][: 1 if fits else 2]


@pytest.mark.parametrize(("excess", "other_ms", "taken_ms"), [(0.05, 8.0, 10.0), (0.2, 8.0, 8.0), (0.2, 12.0, 10.0)])
def test_where_a_decision_costs_much_other_layers_are_tried(
    script: ModuleType, excess: float, other_ms: float, taken_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = ReportedPlan.of(planned(chain(4), target(2048)).plan)
    timeline = simulate_with(plan, RATES)

    class Deciding(Scenarios):
        def answer(self, scenario: Scenario) -> Answer:
            step_ms = other_ms if scenario.recompute is Recompute.AUTO else 10.0
            return Answer(scenario, plan, timeline=replace(timeline, step_ms=step_ms))

    def step_of(answer: Answer, hw: Hardware) -> Any:
        return script.Step(answer.timeline, {"compute": answer.timeline.step_ms / (1 + excess)})

    monkeypatch.setattr(script, "step_of", step_of)
    scenario = Scenario(built_in("gpt-1b"), Hardware.parse("v100-240g"), 1, 8, tracks_grad_norm=False)
    found = script.with_decision(Answer(scenario.keeping(0.25), plan), scenario, Deciding())
    assert found.timeline.step_ms == taken_ms


@pytest.mark.parametrize(("gpu_nbytes", "host_nbytes", "kind"), [(1, 1 << 30, "device"), (2048, 1, "host")])
def test_what_does_not_fit_misses_memory_of_a_kind(
    script: ModuleType, gpu_nbytes: int, host_nbytes: int, kind: str
) -> None:
    with pytest.raises(BudgetError) as caught:
        planned(chain(4), target(gpu_nbytes, host_nbytes))
    missed = f"misses {size(caught.value.missing_nbytes)} of {kind} memory"
    assert script.shortage_of(Answer(None, shortage=caught.value)) == missed
    row = script.Row("hw", "model", None, missed, {})
    assert row.is_fastest and script.cells_of(row)[1:4] == (missed, "", "none fits")
    assert not script.Row("hw", "model", None, missed, {"dos": 1.0}).is_fastest


@pytest.mark.parametrize(("keep", "text"), [(1.0, "all kept"), (0.0, "all again"), (0.375, "62% again")])
def test_a_row_says_what_becomes_of_activations(script: ModuleType, keep: float, text: str) -> None:
    scenario = Scenario(built_in("gpt-1b"), Hardware.parse("v100-240g"), 1, 8).keeping(keep)
    plan = planned(chain(4), target(2048)).plan
    moved = replace(plan, moves=(MovedValue(0, 3 << 20, 1, 2, (0, 1)),))
    assert script.activations_of(Answer(scenario, ReportedPlan.of(plan))) == text
    assert script.activations_of(Answer(scenario, ReportedPlan.of(moved))) == f"{text}, 3.00 MiB moved"
    assert script.activations_of(Answer(scenario)) == ""


def test_a_run_goes_on_from_the_rows_of_a_journal(script: ModuleType, tmp_path: Path) -> None:
    machines, journal, out = ["v100-240g", "8xv100-240g"], tmp_path / "rows.jsonl", tmp_path / "page.md"
    for number, hw in enumerate(machines):
        row = script.Row(str(Hardware.of(hw)), "gpt-1b", None, f"misses {number} GiB", {"dos": 1.0})
        script.keep(journal, script.Line.of(row), 8, 1024)
    arguments = ["--hw", *machines, "--models", "gpt-1b", "--journal", str(journal), "--out", str(out)]
    assert script.main(arguments) == 1  # another system is faster
    assert "misses 0 GiB" in out.read_text() and "misses 1 GiB" in out.read_text()
    assert "There are 2 cases in which another system fits: chunkc's plan is at least as fast in 0." in out.read_text()
    assert script.kept_lines(journal, 4, 1024) == {}
    assert len(journal.read_text().splitlines()) == 2


@pytest.mark.slow
def test_one_model_on_one_machine(script: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "page.md"
    assert script.main(["--hw", "v100-240g", "--models", "gpt-0.7b", "--out", str(out)]) == 0
    assert "| gpt-0.7b |" in out.read_text()
