"""The verifier on plans of an evaluation: right ones pass, each broken one is refused by the action that breaks it."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from plans import SPECS

from chunkc.errors import PlanError
from chunkc.ir.actions import parse
from chunkc.ir.plan import Plan, Program, State
from chunkc.ir.verify import verify, verify_beside
from chunkc.ir.verify.states import TensorState, payload_states

ACTIONS = (
    "fetch c0 -> d0 @h2d",
    "fetch c1 -> d1 @h2d",
    "run fwd.0 @compute after e0",
    "drop c0 <- d0 @compute",
    "fetch c2 -> d0 @h2d after e3",
    "run fwd.1 @compute after e1",
    "run fwd.2 @compute after e4",
    "drop c1 <- d1 @compute",
    "drop c2 <- d0 @compute",
)
COLD = State("cold")


def evaluation(actions: tuple[str, ...] = ACTIONS, entry: State = COLD, leaving: State = COLD) -> Plan:
    training = SPECS["evicting"].build()
    segments = training.graph_segments("forward")
    program = Program("evaluate", entry, leaving, tuple(map(parse, actions)))
    return replace(training, segments=segments, programs=(program,))


def without(position: int) -> tuple[str, ...]:
    return ACTIONS[:position] + ACTIONS[position + 1 :]


def changed(position: int, text: str) -> tuple[str, ...]:
    return (*ACTIONS[:position], text, *ACTIONS[position + 1 :])


def test_a_right_plan_passes_and_stands_beside_its_training() -> None:
    verify(evaluation())
    verify_beside(evaluation(), SPECS["evicting"].build())


def test_states_end_as_they_began() -> None:
    states = payload_states(evaluation())
    assert states
    for changes in states.values():
        assert changes[0].state is changes[-1].state is TensorState.HOLD
        assert any(c.state is TensorState.HOLD_AFTER_FWD for c in changes)


BROKEN: dict[str, tuple[Callable[[], Plan], str]] = {
    "missing wait for a fetch": (lambda: evaluation(changed(2, "run fwd.0 @compute")),
     r"evaluate e2 `run fwd.0 .*reads slot d0 without being ordered after e0"),
    "early reuse of a slot": (lambda: evaluation(changed(4, "fetch c2 -> d0 @h2d")),
     r"evaluate e4 `fetch c2 .*writes slot d0 without being ordered after"),
    "chunk that is not there": (
     lambda: evaluation((*ACTIONS[:5], "drop c1 <- d1 @compute after e1", *ACTIONS[5:7], ACTIONS[8])),
     r"e6 `run fwd.1 .*c1 is not on"),
    "segment left out": (lambda: evaluation((*ACTIONS[:6], *ACTIONS[7:8], "drop c2 <- d0 @compute after e4")),
     r"evaluate, at its end: 2 of 3 segments ran"),
    "chunk left behind": (lambda: evaluation(without(8)), r"evaluate, at its end: the device holds c2 in d0 beyond"),
    "write to a home": (lambda: evaluation(changed(7, "evict c1 <- d1 @d2h after e5")),
     r"evaluate e7 `evict c1 .*no place in program evaluate"),
    "update": (lambda: evaluation((*ACTIONS, "update c0 @cpu")), r"update has no place in program evaluate"),
    "wait on another program": (lambda: evaluation(changed(0, "fetch c0 -> d0 @h2d after s0")),
     r"evaluate e0 .*waits for s0, which does not exist"),
    "another phase": (lambda: evaluation(entry=State("saved")), r"evaluate leads from saved to cold, not from cold"),
    "resident at the start": (
     lambda: evaluation(entry=State("cold", (("c0", 0),)), leaving=State("cold", (("c0", 0),))),
     r"exactly the static residents \(none\)"),
    "other ends": (lambda: evaluation(leaving=State("cold", (("c0", 0),))), r"c0 in d0 before and after evaluate"),
    "over budget": (lambda: replace(evaluation(), memory=replace(evaluation().memory, device_budget_nbytes=1)),
     r"evaluate e2 `run fwd.0.*more than the budget of 1"),
    "backward segments": (lambda: replace(evaluation(), segments=SPECS["evicting"].build().segments),
     r"an evaluation has no backward graph"),
    "training programs beside it": (
     lambda: replace(evaluation(), programs=(*evaluation().programs, SPECS["evicting"].build().programs[0])),
     r"has the programs evaluate; found evaluate, "),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_plan_is_refused(name: str) -> None:
    make, message = BROKEN[name]
    with pytest.raises(PlanError, match=message):
        verify(make())


def test_another_cold_state_is_refused_beside_training() -> None:
    training, plan = SPECS["resident"].build(), evaluation()
    plan = replace(plan, layout=training.layout)
    with pytest.raises(PlanError, match="the cold states of evaluation and training differ: c0 in d0"):
        verify_beside(plan, training)
