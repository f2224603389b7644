"""Case 24: an exception at every line of a step, a backward, a save and a load leaves a whole number of steps.

Values, moments, counts and the loss scale are compared to the bit with a run that is not interrupted, before the call
and after it, and training goes on exactly from there.
"""

from __future__ import annotations

import _thread
import gc
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import pytest
import torch
from interrupted_runs import RECIPES, Storm, Twins, spread
from pair import Pair, Tower, batch
from raise_points import Raised, RaisePoint

import chunkc
from chunkc.runtime.execution.executor import Executor

pytestmark = [
    # a signal may come between ``open`` and its ``with``; the file is closed when the exception is gone
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    # one that comes in a finalizer is lost: Python drops what finalizers raise
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

SLOW = pytest.mark.slow
GetTwins = Callable[[str], Twins]

NUM_POINTS = {"forward": 2, "backward": 4, "step": 8, "save": 4, "load": 3}
"""Lines of each call at which the ordinary run raises; the soak run raises at `NUM_SOAKED` of each recipe."""

NUM_SOAKED = 480


@pytest.fixture(scope="module")
def twins_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GetTwins]:
    yield cache(lambda name: Twins(RECIPES[name], tmp_path_factory.mktemp(name)))


def raise_at_lines(twins: Twins, call: str, num_wanted: int, *, per_instruction: bool = False) -> None:
    num_points = twins.num_points(call, per_instruction=per_instruction)
    for count, position in enumerate(spread(num_points, num_wanted)):
        point = RaisePoint(position, per_instruction=per_instruction)
        try:
            twins.interrupt(call, point, trains_on=count % 2 == 1)
        except Exception as error:
            error.add_note(f"after an exception at {point.place}, number {position} of {num_points}")
            raise


@pytest.mark.long(but="step")
@pytest.mark.parametrize("call", NUM_POINTS)
def test_an_exception_at_a_line_leaves_the_call_done_or_undone(call: str, twins_of: GetTwins) -> None:
    raise_at_lines(twins_of("mixed"), call, NUM_POINTS[call])


@SLOW
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("call", NUM_POINTS)
@pytest.mark.parametrize("name", RECIPES)
def test_an_exception_at_any_line_leaves_the_call_done_or_undone(name: str, call: str, twins_of: GetTwins) -> None:
    raise_at_lines(twins_of(name), call, NUM_SOAKED)


@SLOW
@pytest.mark.timeout(7200)
def test_an_exception_at_any_instruction_of_a_step_leaves_it_done_or_undone(twins_of: GetTwins) -> None:
    raise_at_lines(twins_of("mixed"), "step", 4 * NUM_SOAKED, per_instruction=True)


SENDERS: dict[str, Callable[[], object]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGINT),
    "raise_signal": lambda: signal.raise_signal(signal.SIGINT),
    "interrupt_main": _thread.interrupt_main,
}


@pytest.mark.parametrize("num_storms", [1, pytest.param(100, marks=[SLOW, pytest.mark.timeout(3600)])])
@pytest.mark.parametrize("sender", SENDERS)
def test_storms_of_signals_leave_calls_done_or_undone(sender: str, num_storms: int, twins_of: GetTwins) -> None:
    """Up to three signals come in one call, so that handlers are interrupted too, and the wait for a transaction."""
    twins, generator = twins_of("mixed"), random.Random(sender)
    for number in range(num_storms):
        for call in ("backward", "step", "save", "load"):
            delays_s = [generator.uniform(0, 0.004) for _ in range(generator.randint(1, 3))]
            twins.interrupt(call, Storm(SENDERS[sender], delays_s), trains_on=number % 2 == 1)


def test_the_comparison_finds_a_step_whose_counts_stayed_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order in which values and counts once changed: an exception between them left values without their counts."""
    twins = Twins(RECIPES["device"], tmp_path)
    counts = twins.runs[0].optimizer._counts
    with monkeypatch.context() as patch, pytest.raises(AssertionError):
        patch.setattr(counts, "advance", lambda *_: None)
        twins.interrupt("step", RaisePoint())


def test_a_step_that_is_left_twice_is_carried_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """One exception goes on when the step has ended, a second one at once; what comes next waits for the step."""
    pair = Pair("emulated-64m-1g", Tower(depth=1))
    pair.train(0)
    launch, sent = Executor.step, list[int]()

    def slow_step(self: Executor, *args: object) -> object:
        for number in (1, 2):
            sent.append(number)
            _thread.interrupt_main()
            has_left.acquire(timeout=0.5)
        return launch(self, *args)  # type: ignore[arg-type]

    has_left = _thread.allocate_lock()
    has_left.acquire()
    pair.both(lambda model, _: model(*batch(1)).backward())
    with monkeypatch.context() as patch:
        patch.setattr(Executor, "step", slow_step)
        with pytest.raises(KeyboardInterrupt):
            pair.optimizer.step()
        has_left.release()
        assert sent == [1, 2]
        pair.plain_optimizer.step()
        assert set(pair.optimizer.step_counts.values()) == {2}
    pair.both(lambda _, optimizer: optimizer.zero_grad())
    pair.check()
    pair.train(2)
    pair.check()


def test_what_fails_in_a_step_is_raised_where_it_was_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that has really failed halfway is still one that has."""
    pair = Pair("emulated-64m-1g", Tower(depth=1))
    pair.train(0)
    pair.model(*batch(1)).backward()

    def failing(self: Executor, *_: object) -> None:
        raise RuntimeError("in the middle of a step")

    with monkeypatch.context() as patch:
        patch.setattr(Executor, "step", failing)
        with pytest.raises(RuntimeError, match="in the middle of a step"):
            pair.optimizer.step()
    pair.optimizer.zero_grad()
    with pytest.raises(chunkc.ChunkcError, match="an update failed halfway"):
        pair.model(*batch(1))


class FinalizerPoints:
    """Within the block the thread raises `Raised` in every finalizer that is written in Python; ``places`` of them."""

    def __init__(self) -> None:
        self.places: list[str] = []

    def __enter__(self) -> Self:
        sys.settrace(self._enter_frame)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        sys.settrace(None)

    def _enter_frame(self, frame: FrameType, event: str, argument: Any) -> None:
        if frame.f_code.co_name == "__del__":
            self.places.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
            raise Raised(self.places[-1])


@pytest.mark.long(but="eager")
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_no_finalizer_loses_ctrl_c_in_a_step(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever shows what a finalizer raised may keep it, and so the frames around it and what forward saved in them.

    As pytest does, and as a debugger may. Then the next forward found no room beside the memory of the one before.
    """
    kept: list[BaseException | None] = []
    pair = Pair(backend=backend)
    for seed in range(3):
        pair.train(seed)
    gc.collect()
    monkeypatch.setattr(sys, "unraisablehook", lambda lost: kept.append(lost.exc_value))
    gc.disable()  # finalizers of other tests' objects
    try:
        for seed in range(2):
            with FinalizerPoints() as points:
                pair.model(*batch(seed)).backward()
                pair.optimizer.step()
                pair.optimizer.zero_grad()
            assert not kept, f"lost in finalizers at {points.places}"
    finally:
        gc.enable()


def test_raise_points_raise() -> None:
    """At each line of chunkc in turn, and nowhere else."""
    counted = RaisePoint()
    with counted:
        chunkc.Hardware.parse("emulated-64m-1g")
    places = set()
    for position in range(counted.num_passed):
        point = RaisePoint(position)
        with pytest.raises(Raised), point:
            chunkc.Hardware.parse("emulated-64m-1g")
        places.add(point.place)
    assert len(places) > 10
    with RaisePoint(0):
        torch.zeros(1)
