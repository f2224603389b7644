"""Reports of a plan that has only ``evaluate``: every form of it, and through a file."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from schedules import chain, planned, target

from chunkc.cli import main
from chunkc.ir.actions import parse
from chunkc.ir.schedule import GraphSchedule
from chunkc.passes import PlanOptions, make_evaluation_plan
from chunkc.report import Plan


@pytest.fixture
def plan() -> Plan:
    numel, device = 16 << 10, target(192 << 10)
    layout = planned(chain(4, numel), device, PlanOptions(chunk_numel=numel)).plan.layout
    forward = replace(chain(4, numel), backward=GraphSchedule("backward", ()))
    return Plan.of(make_evaluation_plan(forward, device, layout=layout).plan)


def test_the_table(plan: Plan) -> None:
    text = str(plan)
    assert "evaluate (12 actions), a forward without gradients" in text
    assert "moved per evaluation: 256.00 KiB host to device, 0.00 KiB device to host" in text
    assert "backward (" not in text and "[fwd.0-" in text


def test_the_summary(plan: Plan) -> None:
    text = plan.summary()
    rows = {line[:20].strip(): line.split() for line in text.splitlines() if line.startswith(("fetch", "total host"))}
    assert "moved per evaluation" in text
    assert rows["fetch chunks"] == ["fetch", "chunks", "host", "to", "device", "4", "256.00"]


def test_the_full_text_parses_back(plan: Plan) -> None:
    lines = [line.split(None, 1) for line in plan.text().splitlines() if re.match(r"  e\d", line)]
    assert [str(parse(text)) for _, text in lines] == [str(a) for a in plan.program("evaluate").actions]


@pytest.mark.parametrize("form", [[], ["--full"], ["--summary"]])
def test_the_command_line_shows_a_saved_one(
    plan: Plan, form: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "evaluation.json"
    plan.save(path)
    assert Plan.load(path) == plan
    assert main(["explain", str(path), *form]) == 0
    shown = {"": str(plan), "--full": plan.text(), "--summary": plan.summary()}["".join(form)]
    assert capsys.readouterr().out == shown + "\n"
