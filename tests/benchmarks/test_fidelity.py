"""Simulated steps hold in real time on a throttled device; with --soak, since only an idle machine tells."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import chunkc
from chunkc.ir.actions import Stream

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CHOSEN = ("compute-bound", "copy-bound", "update-bound", "with a decision", "begun", "begun, decision")
NAMES = (*CHOSEN, "moving wins", "recomputed", "moving loses", "moved")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import fidelity

    yield fidelity
    for name in ("fidelity", "fidelity_runs"):
        sys.modules.pop(name, None)


@pytest.fixture
def runs(script: ModuleType) -> ModuleType:
    return sys.modules["fidelity_runs"]


def test_there_is_a_model_for_every_bound(script: ModuleType) -> None:
    assert tuple(case.name for case in script.CASES) == NAMES


@pytest.mark.long
@pytest.mark.parametrize("name", ["moving wins", "moving loses"])
def test_plans_move_saved_values_where_that_is_faster(name: str, script: ModuleType) -> None:
    """Simulated: over a slow link most blocks are computed again, over a fast one none; the other way is slower."""
    case, other = script.CASES[NAMES.index(name) :][:2]
    chosen, rejected = (
        chunkc.plan(c.build(), c.machine(), example_inputs=(c.batch(),), **c.options()) for c in (case, other)
    )
    assert script.moves_most(chosen) == case.moves != script.moves_most(rejected)
    step_ms = [chunkc.simulate(plan, case.machine()).step_ms for plan in (chosen, rejected)]
    assert step_ms[0] < 0.95 * step_ms[1]
    num_ops = [sum(s.end_op - s.first_op for s in plan.segments) for plan in (chosen, rejected)]
    assert (num_ops[0] < num_ops[1]) == case.moves, "what does not move is computed again"
    assert {case.activations, other.activations} == {"auto", "recompute" if case.moves else "offload"}


@pytest.mark.slow
@pytest.mark.parametrize("position", range(len(NAMES)), ids=NAMES)
def test_a_step_takes_the_simulated_time_and_hides_its_copies(position: int, script: ModuleType) -> None:
    """Within 10 % of the step and 5 % of the peak, 90 % of the copies that the plan hides; its bound has its name."""
    case = script.CASES[position]
    run = script.train(case)
    assert script.failures_of(case, run) == []
    assert run.simulated.is_steady
    assert run.simulated.next_bound is not None
    moved = {stream: run.plan.moved_nbytes(stream) for stream in (Stream.H2D, Stream.D2H)}
    assert min(moved.values()) > 0
    # Another process of tests may have half of the machine, which makes real work longer; the script runs alone.
    assert run.work_share < 1.5 * script.MAX_WORK_SHARE, f"this machine is not five times as fast: {run.work_shares}"


@pytest.mark.slow
def test_without_overlap_nothing_is_hidden_and_the_step_is_as_long_as_all_its_actions(script: ModuleType) -> None:
    """The control: the same measurement of a run in which each action waits for the one before fails the bounds."""
    case = script.CASES[NAMES.index("update-bound")]
    run = script.train(case, num_steps=3, settings="throttle,sync")
    assert run.hidden_share < 0.1
    assert run.step_ms == pytest.approx(sum(s.alone_ms for s in run.simulated.slices), rel=0.1)
    wrong = "\n".join(script.failures_of(case, run))
    assert "ms of copies that the plan hides were hidden" in wrong
    assert "the simulated step is off by -" in wrong


def test_exposed_time_is_that_of_copies_beside_which_nothing_runs(runs: ModuleType) -> None:
    ran = [
        (Stream.H2D, 0.0, 10.0), (Stream.COMPUTE, 4.0, 6.0), (Stream.D2H, 8.0, 12.0),
        (Stream.CPU, 11.0, 15.0), (Stream.H2D, 14.0, 30.0),
    ]  # fmt: skip
    assert runs.exposed_ms(ran, 0.0, 20.0) == pytest.approx(4 + 2 + 3 + 5)
    assert runs.exposed_ms(ran, 5.0, 9.0) == pytest.approx(3)
    assert runs.exposed_ms(ran, 30.0, 40.0) == 0.0


@pytest.mark.slow
def test_the_benchmark_writes_what_it_prints(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "result.json"
    assert script.main(["--steps=3", f"--out={out}"]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["case"] for row in rows] == [n for n in NAMES for _ in range(1 if n in ("recomputed", "moved") else 2)]
    printed = capsys.readouterr().out
    assert all(f"{row['step_ms']:9.1f}" in printed for row in rows)
    assert all(abs(row["step_error"]) <= 0.1 for row in rows if row["settings"] == "throttle")
