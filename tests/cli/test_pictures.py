"""The options that write pictures: on which commands, with which times, and what is refused before anything is done."""

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from costs import calibration, with_work
from plans import evicting

from chunkc.cli import main
from chunkc.hardware import Hardware
from chunkc.ir.plan import Plan


@pytest.fixture
def plan() -> Plan:
    return replace(with_work(evicting().build(), 10**6), hw="v100-240g", num_tokens=7)


@pytest.fixture
def function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "pictures_model.py").write_text("import torch\ndef build():\n    return torch.nn.Linear(1, 1), ()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return "pictures_model:build"


def files(folder: Path) -> tuple[list[str], list[Path]]:
    paths = [folder / "out.png", folder / "out.html", folder / "out.json"]
    return [str(x) for pair in zip(("--plot", "--html", "--trace"), paths, strict=True) for x in pair], paths


def test_simulate_writes_all_three(plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan.save(tmp_path / "plan.json")
    options, paths = files(tmp_path)
    assert main(["simulate", str(tmp_path / "plan.json"), "--json", *options]) == 0
    found = capsys.readouterr()
    assert json.loads(found.out)["plan_digest"] == plan.digest()
    assert [line for line in found.err.splitlines() if line.startswith("saved")] == [f"saved {path}" for path in paths]
    assert paths[0].read_bytes().startswith(b"\x89PNG") and "bound by" in paths[1].read_text()
    assert {event["ph"] for event in json.loads(paths[2].read_text())["traceEvents"]} == set("MXCsf")


def test_plan_writes_all_three_with_the_rates_of_its_hardware(
    plan: Plan, function: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def planner(model: Any, **options: Any) -> Plan:
        return plan

    options, paths = files(tmp_path)
    assert main(["plan", function, "--hw", "v100-240g", *options], planner=planner) == 0
    assert all(path.stat().st_size > 1000 for path in paths)
    assert "simulated" in paths[1].read_text() and "order of actions" not in capsys.readouterr().err


def test_plan_draws_the_order_where_rates_are_unknown(
    plan: Plan, function: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    emulated = replace(plan, hw="emulated-1m-1m")
    command = ["plan", function, "--hw", "emulated-1m-1m", "--table"]
    assert main([*command, "--html", str(tmp_path / "out.html")], planner=lambda model, **options: emulated) == 0
    found = capsys.readouterr()
    assert "pictures show the order of actions, not times" in found.err and "chunkc calibrate" in found.err
    assert "step time unknown" in (tmp_path / "out.html").read_text() and "forward (" in found.out
    trace = str(tmp_path / "out.json")
    assert main([*command, "--trace", trace], planner=lambda model, **options: emulated) == 2
    assert "a trace has times" in capsys.readouterr().err


def test_a_profile_gives_the_rates(plan: Plan, function: str, tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    replace(Hardware.parse("emulated-1m-1m"), rates=calibration({})).save(profile)
    calibrated = replace(plan, hw="emulated-1m-1m (calibrated)")
    command = ["plan", function, "--hw", str(profile), "--html", str(tmp_path / "out.html")]
    assert main(command, planner=lambda model, **options: calibrated) == 0
    assert "simulated, not measured" in (tmp_path / "out.html").read_text()


def test_without_options_nothing_is_said_of_pictures(
    plan: Plan, function: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", function, "--hw", "emulated-1m-1m", "--table"]
    assert main(command, planner=lambda model, **options: replace(plan, hw="emulated-1m-1m")) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("option", "name", "piece"),
    [("--plot", "out.bmp", ".png, .svg, .pdf"), ("--plot", "absent/out.png", "missing"), ("--html", ".", "folder")],
)
def test_a_bad_name_is_refused_before_planning(
    option: str, name: str, piece: str, function: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["plan", function, option, name], planner=lambda model, **options: pytest.fail("planned"))
    assert piece in capsys.readouterr().err


def test_without_matplotlib_a_picture_is_refused_before_planning_and_a_page_is_made(
    plan: Plan, function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit):
        main(["plan", function, "--plot", "out.png"], planner=lambda model, **options: pytest.fail("planned"))
    assert "pip install 'chunkc[plot]'" in capsys.readouterr().err
    page = tmp_path / "out.html"
    command = ["plan", function, "--hw", "v100-240g", "--html", str(page)]
    assert main(command, planner=lambda model, **options: plan) == 0 and page.stat().st_size > 1000
