"""The tests of the GPU on a stand-in and without plugins of pytest, and what their runner keeps when it is killed."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RUN = ROOT / "tests" / "gpu" / "run.py"
WITHOUT_PLUGINS = ("-p", "no:timeout", "-p", "no:xdist", "-p", "no:cacheprovider")


def run(*arguments: str, timeout_s: float = 500.0) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_a_few_run_on_a_stand_in_without_plugins() -> None:
    """All files are collected; one comparison of bits and one race are run."""
    chosen = "test_a_slot_that_is_reused or (smallest and odd-dtype0 and not inductor)"
    said = run("tests/gpu", "--stand-in", "double", "-k", chosen, *WITHOUT_PLUGINS)
    assert "3 passed" in said, said


@pytest.mark.long
def test_without_a_gpu_they_are_skipped_with_a_reason() -> None:
    said = run("tests/gpu/test_races_gpu.py", "tests/acceptance/test_memory.py", *WITHOUT_PLUGINS)
    assert "passed" not in said and "gpu: no CUDA device is available" in said


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("stand_in", ["emulated", "double"])
def test_all_run_on_a_stand_in(stand_in: str, tmp_path: Path) -> None:
    """By the runner, with as much time as a busy machine takes."""
    files = [path.stem.removeprefix("test_").removesuffix("_gpu") for path in RUN.parent.glob("test_*_gpu.py")]
    options = ["--out", str(tmp_path), "--stand-in", stand_in, "--limit-s", "6000", "--file-s", "2000"]
    done = subprocess.run([sys.executable, str(RUN), *options], capture_output=True, text=True, timeout=7000)
    assert done.returncode == 0, done.stdout[-4000:]
    found = journal_of(tmp_path)
    assert {r["file"] for r in found if r["kind"] == "file"} == set(files)
    assert {r["outcome"] for r in found if r["kind"] == "test"} == {"passed", "skipped"}


CONFTEST = """
def pytest_addoption(parser):
    parser.addini("timeout", "")
    parser.addoption("--stand-in")
"""
HEADER = "import os, signal, time, pytest\npytestmark = pytest.mark.gpu\n"
MEETS = """
def test_meets():
    folder = os.path.dirname(__file__)
    open(f"{{folder}}/{own}", "w").close()
    deadline_s = time.monotonic() + 60
    while not os.path.exists(f"{{folder}}/{other}"):
        assert time.monotonic() < deadline_s, "{other} does not run"
        time.sleep(0.02)
"""
FILES = {
    "fails": """
def test_passes(record_property): record_property("rate", 3)
def test_fails(): assert 1 == 2, "a reason"
@pytest.mark.skip(reason="not here")
def test_skipped(): pass
""",
    "dies": """
def test_before(): pass
def test_dies(): os.kill(os.getpid(), signal.SIGSEGV)
def test_behind(): pass
""",
    "stands": """
def test_stands():
    while True: time.sleep(0.1)
def test_behind(): pass
""",
    "lost": """
import sys, types
def refuse(): raise RuntimeError("CUDA error: an illegal memory access was encountered")
def test_breaks_the_gpu():
    cuda = types.SimpleNamespace(is_initialized=lambda: True, synchronize=refuse)
    sys.modules["torch"] = types.SimpleNamespace(cuda=cuda)
    assert False, "a kernel failed"
def test_behind(): assert "torch" not in sys.modules
""",
    "broken": "import nothing_of_this_name\n",
    "meets_left": MEETS.format(own="left", other="right"),
    "meets_right": MEETS.format(own="right", other="left"),
    "calibrate": """
def test_environment(): assert os.environ["TORCHINDUCTOR_VEC_ISA_OK"] == "1"
""",
    "many": "".join(f"def test_{n}(): time.sleep(0.02)\n" for n in range(200)),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "files"
    found.mkdir()
    (found / "conftest.py").write_text(CONFTEST)
    for stem, text in FILES.items():
        (found / f"test_{stem}_gpu.py").write_text(HEADER + text)
    return found


def start(folder: Path, out: Path, stems: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, str(RUN), "--tests", str(folder), "--out", str(out), "--only", stems]
    command += [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def journal_of(out: Path) -> list[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        from journal import records

        return records(out / "suite.jsonl")


def outcomes(out: Path) -> dict[str, dict[str, Any]]:
    found = [record for record in journal_of(out) if record["kind"] == "test"]
    return {record["test"]: record for record in found}


@pytest.mark.long
def test_what_fails_dies_or_stands_still_costs_one_test(folder: Path, tmp_path: Path) -> None:
    runner = start(folder, tmp_path, "fails,dies,stands,lost,broken", still_s=4, jobs=3)
    said, _ = runner.communicate(timeout=120)
    found = {name.replace("_gpu.py", ""): record for name, record in outcomes(tmp_path).items()}
    assert {name: record["outcome"] for name, record in found.items()} == {
        "test_fails::test_passes": "passed",
        "test_fails::test_fails": "failed",
        "test_fails::test_skipped": "skipped",
        "test_dies::test_before": "passed",
        "test_dies::test_dies": "crashed",
        "test_dies::test_behind": "passed",
        "test_stands::test_stands": "stood still",
        "test_stands::test_behind": "passed",
        "test_lost::test_breaks_the_gpu": "failed",
        "test_lost::test_behind": "passed",
        "test_broken": "failed",
    }
    assert runner.returncode == 1
    assert found["test_fails::test_passes"]["readings"] == {"rate": 3}
    assert "a reason" in found["test_fails::test_fails"]["text"] and "a reason" in said
    assert found["test_fails::test_skipped"]["text"].endswith("not here")
    assert "in test_dies" in found["test_dies::test_dies"]["text"] and "in test_dies" in said
    assert "in test_stands" in found["test_stands::test_stands"]["text"]
    assert "nothing_of_this_name" in found["test_broken"]["text"]
    first, *_, last = journal_of(tmp_path)
    assert {"date", "command", "commit", "hardware", "versions"} <= first.keys() and last["kind"] == "end"
    assert last["outcomes"] == {"passed": 5, "failed": 3, "skipped": 1, "crashed": 1, "stood still": 1}


@pytest.mark.long
def test_files_run_at_the_same_time_and_those_of_the_whole_gpu_alone(folder: Path, tmp_path: Path) -> None:
    """Two files wait for each other; the third, which is named first, begins when both have ended."""
    runner = start(folder, tmp_path, "calibrate,meets_left,meets_right", jobs=2)
    runner.communicate(timeout=120)
    assert runner.returncode == 0 and {r["outcome"] for r in outcomes(tmp_path).values()} == {"passed"}
    kinds = [(r["kind"], r["file"]) for r in journal_of(tmp_path) if r["kind"] in ("process", "file")]
    assert {kind for kind, _ in kinds[:2]} == {"process"} and {kind for kind, _ in kinds[2:4]} == {"file"}
    assert kinds[4:] == [("process", "calibrate"), ("file", "calibrate")]
    assert "1 passed" in (tmp_path / "meets_left.log").read_text()


def test_a_runner_that_is_told_to_end_ends_what_it_started(folder: Path, tmp_path: Path) -> None:
    runner = start(folder, tmp_path, "stands,meets_left,many", jobs=2)
    deadline_s = time.monotonic() + 100
    while sum(r["kind"] == "start" for r in journal_of(tmp_path)) < 2 and time.monotonic() < deadline_s:
        time.sleep(0.05)
    runner.terminate()
    runner.communicate(timeout=60)
    assert runner.returncode == 143
    pids = [r["pid"] for r in journal_of(tmp_path) if r["kind"] == "process"]
    assert len(pids) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert outcomes(tmp_path) == {}


@pytest.mark.long
def test_files_without_time_are_not_run(folder: Path, tmp_path: Path) -> None:
    """A test that is cut off is named, those behind it are, and so is a file that was not begun."""
    runner = start(folder, tmp_path, "stands,fails", limit_s=7)
    said, _ = runner.communicate(timeout=120)
    assert runner.returncode == 1 and "2 not run" in said
    assert [record["outcome"] for record in outcomes(tmp_path).values()] == ["out of time"]
    missing = {r["file"]: r["tests"] for r in journal_of(tmp_path) if r["kind"] == "not run"}
    assert [name.split("::")[-1] for name in missing["stands"]] == ["test_behind"] and missing["fails"] == []


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_a_runner_that_is_killed_keeps_what_it_found(seed: int, folder: Path, tmp_path: Path) -> None:
    runner = start(folder, tmp_path, "fails,many")
    deadline_s = time.monotonic() + 100
    while len(outcomes(tmp_path)) < 4 and time.monotonic() < deadline_s:
        time.sleep(0.05)
    time.sleep(random.Random(seed).uniform(0, 1.5))
    ended = outcomes(tmp_path)
    runner.kill()
    runner.communicate()
    kept = outcomes(tmp_path)
    for record in journal_of(tmp_path):
        if record["kind"] == "process":
            end_group(record["pid"])
    assert len(ended) >= 4 and ended.items() <= kept.items()
    assert kept["test_fails_gpu.py::test_fails"]["outcome"] == "failed"


def end_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
