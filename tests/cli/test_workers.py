"""Scenarios in processes of their own: the outcomes of this process, errors, and an end to all."""

from __future__ import annotations

import signal
import subprocess
from dataclasses import replace
from typing import IO, Any, Self

import psutil
import pytest
from tiny_transformers import TINY_GPT, TINY_LLAMA

from chunkc._torch_compat.fake_job import fake_job
from chunkc.cli.workers import Ask, Effort, Here, Processes, workers
from chunkc.errors import BudgetError, ChunkcError
from chunkc.hardware import Hardware
from chunkc.passes.rematerialise import KEEP_ALL, RECOMPUTE_ALL
from chunkc.scenarios.scenario import Answer, Estimate, Recompute, Scenario, Scenarios

HW = Hardware.parse("2xa100-40g-1024g")
ONE = Scenario(TINY_LLAMA, HW, batch=1, sequence=16, mesh="dp_shard=2", recompute=Recompute.NONE)
LINE = replace(ONE, mesh="tp=2", batch=2)


def described(outcome: object) -> object:
    """What of an outcome must be the same wherever it was found."""
    match outcome:
        case Answer():
            plan, timeline, shortage = outcome.plan, outcome.timeline, outcome.shortage
            missing = None if shortage is None else (str(shortage), shortage.missing_nbytes, shortage.tensors)
            return plan and plan.digest(), timeline and timeline.step_ms, missing
        case ChunkcError():
            return type(outcome), str(outcome)
    return outcome


@pytest.mark.long
@pytest.mark.timeout(300)
def test_processes_find_what_this_one_finds() -> None:
    told: list[str] = []
    wrong = replace(ONE, model=replace(TINY_LLAMA, config={**TINY_LLAMA.config, "num_attention_heads": 3}), mesh="tp=2")
    small = replace(ONE, hw=replace(HW, gpu_memory_nbytes=1 << 20))
    broken = replace(ONE, model=replace(TINY_LLAMA, config={**TINY_LLAMA.config, "model_type": "none"}))
    asks = [Ask(ONE), Ask(LINE), Ask(ONE, Effort.PLAN), Ask(small), Ask(wrong), Ask(LINE, Effort.PLAN), Ask(broken)]
    with workers([broken, ONE, LINE, wrong], Scenarios(told.append), num_cores=2) as processes:
        found = processes.outcomes(asks, "mesh")
        assert isinstance(processes, Processes)
    with fake_job(2):
        expected = Here(Scenarios()).outcomes(asks, "mesh")
    assert list(map(described, found)) == list(map(described, expected))
    kinds = [Estimate, Estimate, Answer, Answer, ChunkcError, Answer, ChunkcError]
    assert all(isinstance(outcome, kind) for outcome, kind in zip(found, kinds, strict=True))
    assert isinstance(found[3], Answer) and isinstance(found[3].shortage, BudgetError)
    assert len(told) == 3 and all(str(HW.num_gpus) in line for line in told)


@pytest.mark.timeout(300)
def test_a_process_that_is_killed_is_an_error_that_names_its_scenario(monkeypatch: pytest.MonkeyPatch) -> None:
    code = f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})"
    monkeypatch.setattr("chunkc.cli.workers.PROGRAM", code)
    with (
        pytest.raises(ChunkcError, match=r"mesh tp=2.* ended by signal 9.*--mesh names one"),
        workers([ONE, LINE], Scenarios(), num_cores=2) as processes,
    ):
        processes.outcomes([Ask(LINE)], "mesh")


def test_a_process_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for its replies."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError("no memory")

    monkeypatch.setattr("chunkc.cli.workers.subprocess.Popen", refuse)
    with (
        pytest.raises(ChunkcError, match="no process could be started to plan in: no memory"),
        workers([ONE, LINE], Scenarios(), num_cores=2) as processes,
    ):
        processes.outcomes([Ask(ONE), Ask(LINE)], "mesh")


FAILS = """
import os, pickle, sys
sys.path[:] = {path!r}
from chunkc.cli.serving import fork_each

def serve(asks, replies):
    ask = pickle.load(asks)
    if "tp" in ask.scenario.mesh:
        OTHER
    pickle.dump((ask.scenario, []), replies)
    replies.flush()
    pickle.load(asks)

fork_each(pickle.load(sys.stdin.buffer).pipes, serve)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("fails", "kind", "message"),
    [
        ("os.kill(os.getpid(), 9)", ChunkcError, "mesh tp=2.* ended by signal 9"),
        ("raise AssertionError", RuntimeError, "mesh tp=2.* ended with exit code 1, as it says above"),
        (
            "replies.write(pickle.dumps((bytes(300_000), []))[:150_000]); replies.flush(); os.kill(os.getpid(), 9)",
            ChunkcError,
            "mesh tp=2.* ended by signal 9",
        ),
    ],
)
def test_one_of_several_processes_that_fails_is_named(
    fails: str, kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait for more meanwhile: their pipes do not keep those of the one that failed open."""
    monkeypatch.setattr("chunkc.cli.workers.PROGRAM", FAILS.replace("OTHER", fails))
    with workers([ONE, LINE], Scenarios(), num_cores=2) as processes:
        assert processes.outcomes([Ask(ONE)], "mesh") == [ONE]
        with pytest.raises(kind, match=message):
            processes.outcomes([Ask(LINE)], "mesh")


NO_MORE_FORKS = """
import os, pickle, sys
sys.path[:] = {path!r}
from chunkc.cli.serving import fork_each

def fork(real=os.fork, forked=[]):
    if forked:
        raise BlockingIOError(11, "no process is left")
    forked.append(1)
    return real()

def serve(asks, replies):
    pickle.dump((pickle.load(asks).scenario, []), replies)
    replies.flush()

os.fork = fork
fork_each(pickle.load(sys.stdin.buffer).pipes, serve)
"""


@pytest.mark.long
def test_a_process_that_cannot_be_forked_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chunkc.cli.workers.PROGRAM", NO_MORE_FORKS)
    with workers([ONE, LINE], Scenarios(), num_cores=2) as processes:
        assert processes.outcomes([Ask(ONE)], "mesh") == [ONE]
        with pytest.raises(ChunkcError, match=r"no process could be started to plan in: .*no process is left"):
            processes.outcomes([Ask(LINE)], "mesh")


class Interrupted:
    """A pipe that is interrupted when it is written to."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self.pipe = pipe

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.pipe.close()

    def write(self, _: bytes) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize("is_started", [False, True])
def test_a_start_that_is_interrupted_leaves_nothing(is_started: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    real, here = subprocess.Popen, psutil.Process()

    def start(*arguments: Any, **options: Any) -> Any:
        if not is_started:
            raise KeyboardInterrupt
        process: Any = real(*arguments, **options)
        process.stdin = Interrupted(process.stdin)
        return process

    monkeypatch.setattr("chunkc.cli.workers.subprocess.Popen", start)
    before = here.num_fds(), here.children()
    with pytest.raises(KeyboardInterrupt), workers([ONE, LINE], Scenarios(), num_cores=2):
        pass
    assert (here.num_fds(), here.children()) == before


ONE_ANSWERS = """
import pickle, sys, time
sys.path[:] = {path!r}
from chunkc.cli.serving import fork_each

def serve(asks, replies):
    ask = pickle.load(asks)
    time.sleep(600 if "tp" in ask.scenario.mesh else 1)
    pickle.dump((ask.scenario, ["line"]), replies)
    replies.flush()

fork_each(pickle.load(sys.stdin.buffer).pipes, serve)
"""


@pytest.mark.long
@pytest.mark.timeout(120)
def test_an_interrupt_ends_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while one works: nobody waits for what it would find."""

    def interrupted(line: str) -> None:
        raise KeyboardInterrupt(line)

    monkeypatch.setattr("chunkc.cli.workers.PROGRAM", ONE_ANSWERS)
    before = psutil.Process().children()
    with (
        pytest.raises(KeyboardInterrupt, match="line"),
        workers([ONE, LINE], Scenarios(interrupted), num_cores=2) as processes,
    ):
        processes.outcomes([Ask(ONE), Ask(LINE)], "mesh")
    assert psutil.Process().children() == before


@pytest.mark.parametrize(("choices", "num_cores"), [([ONE], 4), ([ONE, LINE], 1), ([ONE, replace(ONE, mesh="")], 4)])
def test_where_one_process_is_enough_there_is_no_other(choices: list[Scenario], num_cores: int) -> None:
    here = Scenarios()
    with workers(choices, here, num_cores) as found:
        assert found == Here(here)


@pytest.mark.long(but="1.0")
@pytest.mark.parametrize("keep", [None, RECOMPUTE_ALL, KEEP_ALL])
def test_an_estimate_leaves_its_prices_to_the_answer(keep: float | None) -> None:
    scenarios, deep = Scenarios(), replace(ONE, model=TINY_GPT, mesh="", hw=Hardware.parse("a100-40g-1024g"), batch=8)
    scenario = replace(deep, recompute=Recompute.AUTO) if keep is None else deep.keeping(keep)
    estimate = scenarios.estimate(scenario)
    answer = scenarios.answer(scenario)
    assert isinstance(estimate, Estimate) and answer.timeline is not None and answer.plan is not None
    assert estimate.num_tokens == answer.timeline.num_tokens == 8 * 16
    assert estimate.best.step_ms >= answer.timeline.step_ms * 0.999
    if keep is not None:
        assert estimate.best.step_ms == answer.timeline.step_ms
        assert estimate.best.device_nbytes == answer.plan.memory.device_peak_nbytes
