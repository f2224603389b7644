"""The report of a simulation, and the command that prints it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from costs import RATES, calibration, with_work
from plans import chain, evicting, resident

import chunkc
from chunkc.cli import main
from chunkc.cost import simulate_with
from chunkc.hardware import Hardware
from chunkc.ir.plan import Plan
from chunkc.report.timeline import MAX_STALLS, Timeline, render_timeline
from chunkc.report.trace import trace


def timeline_of(plan: Plan) -> Timeline:
    return Timeline.of(simulate_with(plan, RATES))


EXPECTED = """\
Toy on round, plan DIGEST: simulated, not measured
  step        29.000 ms, 241.4 tokens/s, 68.97 samples/s
  each rank   0 TFLOPS, 0 with what is computed again, 3.708e-07 as PatrickStar
              counts
  bound by    computing on the device (82.8 % of the critical path); next
              updates on the host (busy 20.7 %)
  memory      device 1.48 KiB at fwd.0, arena at most 0.50 KiB in use at fwd.1,
              host 3.00 KiB

stream            busy ms    share    alone ms    critical ms    actions    KiB
--------------  ---------  -------  ----------  -------------  ---------  -----
device             24.000   82.8 %      24.000         24.000         12  11.25
host to device      4.000   13.8 %       4.000          2.000          4   1.00
device to host      3.000   10.3 %       3.000          1.000          3   0.75
host                6.000   20.7 %       6.000          2.000          3   2.25
overhead                                                0.000

the device waits 5.000 ms of a step in 2 stalls

   ms  before        waits for          meanwhile, ms
-----  ------------  -----------------  ----------------------------------------
4.000  f1 run fwd.0  f0 fetch c0 -> d0  host 2.000, device to host 1.000, host
                                        to device 1.000
1.000  f6 run fwd.2  f5 fetch c2 -> d0  host to device 1.000
"""


def words(text: str) -> list[list[str]]:
    return [line.replace("-", " ").split() for line in text.splitlines() if line.strip(" -")]


def test_the_whole_report() -> None:
    plan = replace(with_work(evicting().build(), 3), num_tokens=7, num_samples=2)
    report = str(timeline_of(plan))
    assert words(report) == words(EXPECTED.replace("DIGEST", plan.digest()))
    assert max(map(len, report.splitlines())) <= 80


def test_only_the_longest_stalls_are_shown() -> None:
    timeline = timeline_of(with_work(chain(20).build(), 0))
    assert len(timeline.stalls) > MAX_STALLS
    text = render_timeline(timeline)
    assert f"in {len(timeline.stalls)} stalls; the {MAX_STALLS} longest" in text
    assert text.count(" waits for ") == 1 and len(text.splitlines()) < 30


def test_a_plan_that_never_waits_says_so() -> None:
    assert "the device never waits" in str(timeline_of(with_work(resident().build(), 3)))


@pytest.fixture
def saved(tmp_path: Path) -> str:
    plan = replace(with_work(evicting().build(), 10**6), hw="v100-240g", num_tokens=7)
    plan.save(tmp_path / "plan.json")
    return str(tmp_path / "plan.json")


def test_the_command_prints_the_report(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", saved]) == 0
    assert capsys.readouterr().out == f"{chunkc.simulate(chunkc.Plan.load(saved))}\n"


def test_the_command_takes_a_profile_and_writes_a_trace(
    saved: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile, written = tmp_path / "profile.json", tmp_path / "trace.json"
    replace(Hardware.parse("emulated-1m-1m"), rates=calibration({})).save(profile)
    assert main(["simulate", saved, "--hw", str(profile), "--json", "--trace", str(written)]) == 0
    found = json.loads(capsys.readouterr().out)
    expected = chunkc.simulate(chunkc.Plan.load(saved), profile)
    assert found == json.loads(json.dumps(expected.to_json()))
    assert json.loads(written.read_text()) == json.loads(json.dumps(trace(chunkc.Plan.load(saved), expected)))


def test_a_machine_without_rates_is_an_error_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evicting().build().save(tmp_path / "plan.json")
    assert main(["simulate", str(tmp_path / "plan.json")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and "chunkc calibrate --hw emulated-1m-1m" in err
