"""What a step costs the launching thread: counts are the plan's, figures those of the fit."""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType

import pytest

import chunkc

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import executor_overhead

    yield executor_overhead
    for name in ("executor_overhead", "updates_beside_launches"):
        sys.modules.pop(name, None)


def test_the_fit_finds_the_figures_that_made_the_times(script: ModuleType) -> None:
    case = script.CASES[0]
    counts = [(42, 0, 12, 24), (426, 40, 108, 216), (110, 0, 28, 216), (1864, 0, 144, 72), (779, 716, 30, 216)]
    rows = [script.Row(case, a, m, s, p, 500 + 3 * a + 5 * m + 2 * s + 10 * p + 7 * p, 7 * p) for a, m, s, p in counts]
    found = script.fit(rows, 2.0, with_torch=False)
    assert found == pytest.approx(
        {"action": 3, "move": 8, "segment": 2, "parameter": 10, "step": 500, "largest_error": 0}, abs=1e-3
    )
    assert script.fit(rows, 2.0, with_torch=True)["parameter"] == pytest.approx(17, abs=1e-3)


def test_the_least_of_several_results(script: ModuleType, tmp_path: Path) -> None:
    made, rows = (
        {**script.provenance.describe(), "commit": "a", "device": "cuda"},
        [script.Row(script.CASES[0], 42, 0, 12, 24, 5.0, 2.0)],
    )
    paths = []
    for name, step_us, segment in (("one", 4.0, 3.0), ("two", 6.0, 2.0)):
        found = [{**asdict(row), "step_us": step_us} for row in rows]
        paths.append(tmp_path / name)
        paths[-1].write_text(json.dumps({**made, "rows": found, "figures_us": {"segment": segment}}))
    described, least, segment = script.least_of(paths)
    assert (described["commit"], described["runs"]) == ("a", 2)
    assert (least, segment) == ([replace(rows[0], step_us=4.0)], 2.0)
    paths[1].write_text(json.dumps({**made, "commit": "b", "rows": [], "figures_us": {"segment": 1.0}}))
    with pytest.raises(SystemExit, match="of one commit"):
        script.least_of(paths)


@pytest.mark.long
def test_a_case_counts_what_its_plan_does(script: ModuleType) -> None:
    args = script.parse(["--steps", "3", "--warm-up", "2"])
    plans, plan_of = list[chunkc.Plan](), chunkc.plan_of
    with pytest.MonkeyPatch.context() as watching:
        watching.setattr(script.chunkc, "plan_of", lambda model: plans.append(plan_of(model)) or plans[-1])
        row = script.measure(script.Case(3, 2, 16, 512), args)
    actions = [action for program in plans[-1].programs if program.is_repeated for action in program.actions]
    assert (row.num_actions, row.num_params) == (len(actions), 6)
    assert row.num_segments == len(plans[-1].segments) > 2, "chunks move, so that there is more than one segment"
    assert row.step_us > row.plain_us > 0


@pytest.mark.long
def test_updates_are_slowed_by_unbounded_launches_alone(script: ModuleType, tmp_path: Path) -> None:
    """Of real updates beside a thread that holds the GIL in C, as Inductor's launcher does with a full queue.

    In one of several measurements: what else runs on the machine slows both down.
    """
    import updates_beside_launches

    def is_slower() -> bool:
        out = tmp_path / "result.json"
        updates_beside_launches.main(["--rounds", "3", "--passes", "10", "--least", "0", "--out", str(out)])
        shares = json.loads(out.read_text())["share_of_speed_alone"]
        return bool(shares["beside launches"] > 2 * shares["beside unbounded launches"])

    assert any(is_slower() for _ in range(5))
