"""The public ``chunkc.Plan``: the representation with reports, otherwise the same plan."""

import copy
import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from plans_for_report import gpt_plan

from chunkc.errors import PlanError
from chunkc.ir import plan as ir
from chunkc.report import Plan, full_text, render, summarize


def test_it_is_the_same_plan() -> None:
    base = gpt_plan()
    plan = Plan.of(base)
    assert isinstance(plan, ir.Plan)
    assert plan == base and base == plan and hash(plan) == hash(base)
    assert plan.digest() == base.digest()
    assert Plan.of(plan) is plan
    assert plan.stages == base.stages


def test_another_plan_is_not_equal() -> None:
    plan = Plan.of(gpt_plan())
    assert plan != Plan.of(gpt_plan(num_layers=11))
    assert plan != gpt_plan(num_layers=11) and gpt_plan(num_layers=11) != plan
    assert plan != "plan"
    assert plan == replace(plan, stages=())  # how long planning took decides nothing


def test_reports_are_its_methods() -> None:
    plan = Plan.of(gpt_plan())
    assert (str(plan), plan.text(), plan.summary()) == (render(plan), full_text(plan), summarize(plan))
    assert repr(plan) == f"<chunkc.Plan {plan.digest()} of TinyGPT on emulated-4m-64m: 28 segments>"
    assert f"{[plan]}" == f"[{plan!r}]"


def test_it_survives_saving_copying_and_pickling(tmp_path: Path) -> None:
    plan = Plan.of(gpt_plan())
    plan.save(tmp_path / "plan.json")
    for other in (Plan.load(tmp_path / "plan.json"), copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        assert type(other) is Plan
        assert other == plan
        assert other.text() == plan.text()


def test_it_is_frozen() -> None:
    with pytest.raises((AttributeError, TypeError)):
        Plan.of(gpt_plan()).model = "other"  # type: ignore[misc]
    with pytest.raises((AttributeError, TypeError)):
        Plan.of(gpt_plan()).extra = 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("content", ["", "{", "[]", "3", "{}", '{"format_version": 1}'])
def test_a_file_without_a_plan_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "plan.json").write_text(content)
    with pytest.raises(PlanError, match=r"plan\.json holds no plan"):
        Plan.load(tmp_path / "plan.json")


def test_another_format_is_refused_by_number(tmp_path: Path) -> None:
    data = gpt_plan().to_json()
    data["format_version"] = 99
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(PlanError, match="99 is not supported"):
        Plan.load(tmp_path / "plan.json")


def test_an_absent_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Plan.load(tmp_path / "plan.json")


def test_names_from_a_file_bring_no_control_characters() -> None:
    """A terminal would obey them, and a line end would make a line of its own."""
    base = gpt_plan()
    params = (replace(base.layout.params[0], name="w\x1b[2J\nforged"), *base.layout.params[1:])
    plan = Plan.of(replace(base, model="m\x1b]0;title\x07", hw="h\r\u202e", layout=replace(base.layout, params=params)))
    assert "w\\x1b[2J\\nforged" in plan.text()
    for text in (str(plan), plan.text(), plan.summary(), repr(plan)):
        assert "m\\x1b]0;title\\x07" in text and "h\\r\\u202e" in text
        assert all(character.isprintable() or character == "\n" for character in text)
