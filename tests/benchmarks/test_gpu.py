"""The benchmark of the GPU without one: what it keeps when something fails, is late or is killed; the whole flow."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu
import gpu_cases
import gpu_contest
import pytest
import torch
from gpu_cases import STAND_IN_CONTESTS
from gpu_models import Shape
from gpu_table import figures, table
from journal import records

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPT = BENCHMARKS / "gpu.py"

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, the benchmark itself is run")

CONTESTANT = """
import json, sys, time
def answer(event, **fields):
    print("what a library says", flush=True)
    print("answer: " + json.dumps({"event": event, **fields}), flush=True)
system = sys.argv[sys.argv.index("--system") + 1]
answer("device", seconds=0.1)
answer("ready", seconds=0.2, settings={})
for line in sys.stdin:
    command = line.split()[0]
    if (system, command) == ("zero_offload", "facts"):
        sys.exit("it has no facts")
    while (system, command) == ("fsdp2", "trace"):
        time.sleep(0.1)
    time.sleep(0.1)
    if command == "block":
        answer("block", num_steps=8, seconds=0.1)
    elif command == "facts":
        answer("facts", losses={"first": 2.0, "last": 1.0})
    else:
        answer("trace", busy_shares={"compute": 0.5, "h2d": 0.0, "d2h": 0.0, "cpu": 0.0}, num_steps=2)
"""
DRIVER = """
import sys
from pathlib import Path
sys.path.insert(0, {benchmarks!r})
import gpu, gpu_contest
gpu_contest.CONTESTANT = Path({contestant!r})
gpu.calibrate = lambda *given: None
gpu.kernels = lambda args, journal, deadline_s: journal.write("kernels", outcome="ran", kernels={{}})
sys.exit(gpu.main(sys.argv[1:]))
"""


def journal_of(out: Path) -> list[dict[str, Any]]:
    return records(out / "benchmark.jsonl")


def kinds(found: list[dict[str, Any]], kind: str) -> list[tuple[str, str]]:
    return [(record["contest"], record["system"]) for record in found if record["kind"] == kind]


def drive(tmp_path: Path, *options: str) -> subprocess.Popen[str]:
    contestant = tmp_path / "contestant.py"
    contestant.write_text(CONTESTANT)
    program = DRIVER.format(benchmarks=str(BENCHMARKS), contestant=str(contestant))
    command = [sys.executable, "-c", program, "--stand-in", "--out", str(tmp_path), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.long
def test_systems_that_fail_or_are_late_leave_the_others_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a contest of three: one ends when it is asked for facts, one never ends its trace."""
    contestant = tmp_path / "contestant.py"
    contestant.write_text(CONTESTANT)
    monkeypatch.setattr(gpu_contest, "CONTESTANT", contestant)
    monkeypatch.setattr(gpu_contest, "TRACE_S", 1.0)
    monkeypatch.setattr(gpu, "calibrate", lambda *given: None)
    monkeypatch.setattr(gpu_cases, "STAND_IN_CONTESTS", (short(gpu_cases.STAND_IN_CONTESTS[0]),))
    assert gpu.main(["--stand-in", "--out", str(tmp_path), "--limit-s", "14"]) == 1  # the kernels got no time
    found = journal_of(tmp_path)
    assert kinds(found, "block") == [("toy capped", s) for s in ("chunkc", "zero_offload", "fsdp2", "chunkc", "fsdp2")]
    assert kinds(found, "facts") == [("toy capped", s) for s in ("chunkc", "fsdp2")]
    assert kinds(found, "trace") == [("toy capped", "chunkc")]
    reasons = {record["system"]: record["why"] for record in found if record["kind"] == "lost"}
    assert "exit code 1" in reasons["zero_offload"] and "it has no facts" in reasons["zero_offload"]
    assert "timed out" in reasons["fsdp2"] and "File" in reasons["fsdp2"]
    first, last = found[0], found[-1]
    assert {"date", "command", "commit", "hardware", "versions"} <= first.keys() and last["kind"] == "end"
    assert next(r for r in found if r["kind"] == "kernels")["outcome"] == "not run"
    said = table(found)
    assert "chunkc" in said and "it has no facts" in said


def short(contest: Any) -> Any:
    return replace(contest, limit_s=8, least_s=5)


def test_contests_without_time_are_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "calibrate", lambda *given: None)
    assert gpu.main(["--stand-in", "--out", str(tmp_path), "--limit-s", "6"]) == 1
    found = journal_of(tmp_path)
    assert "not run" in capsys.readouterr().out
    names = ["toy capped", "toy alone", "toy resident"]
    assert [r["contest"] for r in found if r["kind"] == "not run"] == names
    assert [r["contest"] for r in found if r["kind"] == "contest"] == names


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 15))])
def test_a_benchmark_that_is_killed_keeps_what_it_measured(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every line parses, blocks that had been written are there, and the table is made of them."""
    runner = drive(tmp_path, "--only", "toy alone", "--only", "toy resident")
    deadline_s = time.monotonic() + 100
    while not kinds(journal_of(tmp_path), "block") and time.monotonic() < deadline_s:
        time.sleep(0.02)
    time.sleep(random.Random(seed).uniform(0, 1.5))
    before = journal_of(tmp_path)
    runner.send_signal(signal.SIGTERM if seed % 2 else signal.SIGKILL)
    runner.communicate()
    after = journal_of(tmp_path)
    assert kinds(before, "block") and after[: len(before)] == before
    assert "chunkc" in table(after)
    assert gpu.main(["--show", str(tmp_path)]) == 0 and capsys.readouterr().out == table(after) + "\n"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_whole_flow_runs_on_stand_ins(tmp_path: Path) -> None:
    options = ["--stand-in", "--out", str(tmp_path), "--limit-s", "3000"]
    env = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options], env=env, capture_output=True, text=True, timeout=3400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = journal_of(tmp_path)
    assert not kinds(found, "lost")
    contests = {r["contest"]: r for r in found if r["kind"] == "contest"}
    assert list(contests) == [contest.name for contest in STAND_IN_CONTESTS]
    for contest in STAND_IN_CONTESTS:
        losses = {}
        for system in contest.systems:
            row = figures(found, contests[contest.name], system)
            assert row is not None and len(row["step_ms_of_blocks"]) == contest.num_rounds
            assert row["of_bound"] > 0 and row["busy_shares"]["cpu"] > 0
            facts = next(r for r in found if r["kind"] == "facts" and kinds([r], "facts") == [(contest.name, system)])
            losses[system] = facts["losses"]
            if system == "chunkc":
                assert row["of_simulated"] > 0 and facts["stats"]["budget_nbytes"] == contest.device_nbytes
                assert (facts["stats"]["h2d_nbytes"] > 0) == (contest.name != "toy resident")
        assert all(abs(found["first"] - 4.85) < 0.1 and found["last"] < found["first"] for found in losses.values())
    for row in next(r for r in found if r["kind"] == "kernels")["kernels"].values():
        assert 0 < row["ratio_20_80"][0] <= row["ratio"] <= row["ratio_20_80"][1]
    traces = sorted(path.name for path in tmp_path.glob("*.json.gz"))
    assert traces == [f"trace-toy-capped-{system}.json.gz" for system in ("chunkc", "fsdp2", "zero_offload")]
    assert json.loads((tmp_path / "benchmark.jsonl").read_text().splitlines()[-1])["kind"] == "end"


def test_step_flops_are_those_of_the_formula() -> None:
    """By hand for a model of two layers, and close to the published size of a large one."""
    shape = Shape(layers=2, hidden=64, heads=2, batch=2, length=32, vocabulary=128)
    block = 12 * 64 * 64 + 13 * 64
    assert shape.num_params() == 128 * 64 + 32 * 64 + 2 * block + 2 * 64
    matmul = 128 * 64 + 2 * block + 2 * 64
    assert shape.step_flops() == (6 * matmul + 12 * 2 * 64 * 32) * 64
    assert Shape(layers=24, hidden=2048, heads=16, batch=1).num_params() == pytest.approx(1.31e9, rel=0.01)
