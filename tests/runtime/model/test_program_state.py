"""Phases of a model: who may follow whom, and what an exception between two of them leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from chunkc.distributed.process_group import Ranks
from chunkc.errors import ChunkcError
from chunkc.ir.plan import name_of
from chunkc.runtime.devices.emulated import EmulatedDevice
from chunkc.runtime.model.program_state import AtStake, ModelPhase, ProgramState
from chunkc.runtime.params.gradients import Gradients


class RecordedExecutor:
    def __init__(self, *, defers_reduction: bool = False) -> None:
        self.calls: list[str] = []
        self.graded_params = (0,)
        self.norm_table = None
        self.defers_reduction = defers_reduction
        self.program = lambda role, position="first", reduces=True: name_of((role, position, reduces))

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.calls.append(name)


def state_with(executor: Any, accumulate: int = 1) -> ProgramState:
    params = [nn.Parameter(torch.ones(2))]
    state = ProgramState(EmulatedDevice("emulated", 1 << 20, 1 << 20), Ranks(), Gradients(params, accumulate))
    state.executors[0] = executor
    state.switch_to(executor)
    return state


def test_before_the_first_forward_nothing_runs() -> None:
    state = ProgramState(EmulatedDevice("emulated", 1 << 20, 1 << 20), Ranks(), Gradients([]))
    with pytest.raises(ChunkcError, match="has not run a compiled forward yet"):
        _ = state.running
    state.to_cold()
    assert state.phase is ModelPhase.COLD


@pytest.mark.parametrize(
    ("phase", "calls"),
    [
        (ModelPhase.COLD, []),
        (ModelPhase.SAVED, ["abandon"]),
        (ModelPhase.UNREDUCED, ["agree", "reduce_all"]),
        (ModelPhase.BROKEN, []),
    ],
)
def test_whatever_was_left_goes_before_the_cold_state(phase: ModelPhase, calls: list[str]) -> None:
    executor = RecordedExecutor()
    state = state_with(executor)
    state.enter(phase)
    state.to_cold()
    assert executor.calls == calls
    assert state.phase is (ModelPhase.BROKEN if phase is ModelPhase.BROKEN else ModelPhase.COLD)


def test_broken_models_stay_broken_until_they_are_closed() -> None:
    state = state_with(RecordedExecutor())
    state.enter(ModelPhase.BROKEN)
    for phase in (ModelPhase.COLD, ModelPhase.SAVED, ModelPhase.UNREDUCED):
        state.enter(phase)
        assert state.phase is ModelPhase.BROKEN
    state.recover()
    assert state.phase is ModelPhase.BROKEN
    state.enter(ModelPhase.CLOSED)
    state.enter(ModelPhase.COLD)
    assert state.phase is ModelPhase.CLOSED


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("at_stake", [AtStake.DEVICE, AtStake.GRADIENTS])
def test_an_exception_between_two_phases_leaves_the_cold_state(at_stake: AtStake, accumulate: int) -> None:
    """Gradients in chunks of their own survive where only what stands on the device was at stake."""
    executor = RecordedExecutor()
    state = state_with(executor, accumulate)
    state.enter(ModelPhase.SAVED)
    state.gradients.land([0])
    with pytest.raises(KeyboardInterrupt), state.changing(at_stake):
        raise KeyboardInterrupt
    assert executor.calls == []
    state.settle()
    assert executor.calls == ["forget_launched", "recover"]
    assert state.phase is ModelPhase.COLD
    assert state.gradients.pending == (accumulate == 2 and at_stake is AtStake.DEVICE)
    state.settle()
    assert executor.calls == ["forget_launched", "recover"], "nothing is at stake any more"


def test_an_inner_change_puts_no_less_at_stake() -> None:
    state = state_with(RecordedExecutor(), accumulate=2)
    state.gradients.land([0])
    with pytest.raises(RuntimeError), state.changing(AtStake.GRADIENTS), state.changing(AtStake.DEVICE):
        raise RuntimeError
    state.settle()
    assert not state.gradients.pending


def test_a_program_that_raises_leaves_the_cold_state_at_once() -> None:
    executor = RecordedExecutor()
    state = state_with(executor)

    def run() -> list[Any]:
        state.enter(ModelPhase.SAVED)
        raise ValueError("a kernel failed")

    with pytest.raises(ValueError, match="a kernel failed"), state.changing(AtStake.DEVICE):
        state.guarded(run)
    assert state.phase is ModelPhase.COLD and executor.calls == ["forget_launched", "recover"]


def test_another_executor_waits_for_the_one_before() -> None:
    first, second = RecordedExecutor(), RecordedExecutor()
    state = state_with(first)
    state.switch_to(second)
    state.switch_to(second)
    assert (first.calls, second.calls) == (["join"], []) and state.executor is second


@pytest.mark.parametrize(
    ("phase", "accumulated", "number", "is_unscaled", "program"),
    [
        (ModelPhase.SAVED, False, 1, True, "backward_unreduced"),
        (ModelPhase.SAVED, False, 2, True, "backward"),
        (ModelPhase.UNREDUCED, True, 1, True, "accumulate_unreduced"),
        (ModelPhase.UNREDUCED, True, 2, True, "accumulate_last"),
        (ModelPhase.UNREDUCED, True, 2, False, "accumulate"),
        (ModelPhase.SAVED, True, 2, True, "accumulate"),
    ],
)
def test_the_last_micro_batch_exchanges(
    phase: ModelPhase, accumulated: bool, number: int, is_unscaled: bool, program: str
) -> None:
    """Of two declared ones the second is the last; gradients that were scaled meanwhile are exchanged at once."""
    executor = RecordedExecutor(defers_reduction=True)
    state = state_with(executor, accumulate=2)
    state.enter(phase)
    if accumulated:
        state.gradients.land([0])
    assert state.backward_program(executor, number, lambda: is_unscaled) == program  # type: ignore[arg-type]
    wanted = "forward_again" if phase is ModelPhase.UNREDUCED and accumulated else "forward"
    assert state.forward_program(executor) == wanted  # type: ignore[arg-type]
