"""The states that payloads go through, and the changes that are refused."""

import itertools

import pytest
from plans import SPECS, distributed, evicting, grad_chunk, spanning
from spec import PlanSpec

from chunkc.errors import PlanError
from chunkc.ir.verify.states import LEGAL_TRANSITIONS, TensorState, payload_states

F, C, H = TensorState.FREE, TensorState.COMPUTE, TensorState.HOLD
TRAINING = ("forward", "backward", "step")
AF, AB = TensorState.HOLD_AFTER_FWD, TensorState.HOLD_AFTER_BWD


def states(spec: PlanSpec, param: int, chunk: int, *programs: str) -> list[TensorState]:
    plan = spec.build()
    return [change.state for change in payload_states(plan, map(plan.program, programs or TRAINING))[param, chunk]]


def test_trained_parameter_over_one_iteration() -> None:
    assert states(evicting(), 3, 2) == [H, C, AF, H, C, H, C, AB, H]


def test_parameter_that_is_read_again_before_its_gradient_lands() -> None:
    assert states(evicting(), 0, 0) == [H, C, AF, H, C, H, C, H, C, AB, H]


def test_restore_ends_like_update() -> None:
    assert states(evicting(), 3, 2, "forward", "backward", "restore") == states(evicting(), 3, 2)


def test_abandoned_forward_holds() -> None:
    assert states(evicting(), 3, 2, "forward", "abandon") == [H, C, AF, H]


def test_frozen_parameter_is_only_held_and_read() -> None:
    assert states(spanning(), 2, 2) == [H, C, AF, H, C, H]


def test_spanning_parameter_has_the_same_states_in_each_chunk() -> None:
    assert states(spanning(), 0, 0) == states(spanning(), 0, 1) == [H, C, AF, H, C, AB, H]


def test_gradient_chunk_is_free_until_the_stash_and_after_the_update() -> None:
    assert states(grad_chunk(), 0, 1) == [F, H, C, AB, F]
    assert states(grad_chunk(), 0, 0) == [H, C, AF, H, C, H, C, H]


def test_remote_chunk_is_free_unless_gathered() -> None:
    assert states(distributed(), 1, 1) == [F, H, C, AF, F, H, C, H, C, AB, F]
    assert states(distributed(), 0, 0) == [H, C, AF, H, C, H, C, AB, H]


def test_changes_say_where_they_happen() -> None:
    changes = payload_states(evicting().build())[3, 2]
    assert [(c.program, c.label) for c in changes[:4]] == [
        ("start", "start"),
        ("forward", "f6"),
        ("forward", "f6"),
        ("forward", "end"),
    ]
    assert (changes[-1].program, changes[-1].label) == ("step", "s2")


@pytest.mark.parametrize("name", SPECS)
def test_every_change_is_legal_and_the_cycle_closes(name: str) -> None:
    plan = SPECS[name].build()
    for changes in payload_states(plan).values():
        steps = [c.state for c in changes]
        assert all(pair in LEGAL_TRANSITIONS for pair in itertools.pairwise(steps))
        assert steps[0] == steps[-1]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            evicting().set("backward", 4, "stash c1 of bwd.1 @compute").insert("backward", 5, "run bwd.1 @compute"),
            r"backward b5 `run bwd\.1 @compute`: parameter 'w2' in chunk c1 cannot go from hold_after_bwd to compute",
        ),
        (
            evicting().insert("step", 1, "update c0 @cpu"),
            r"step s1 `update c0 @cpu`: parameter 'w0' in chunk c0 cannot go from hold to hold",
        ),
        (
            distributed().delete("forward", 1),
            r"forward f1 `run fwd\.0 .*`: parameter 'w1' in chunk c1 cannot go from free to compute",
        ),
        (
            distributed().insert("forward", 2, "gather g0 @comm"),
            r"forward f2 `gather g0 @comm`: parameter 'w1' in chunk c1 cannot go from hold to hold",
        ),
        (
            distributed().delete("backward", 3),
            r"backward b3 `release g1 @compute`: chunk c3 holds gradients that were not reduced",
        ),
        (
            distributed().insert("abandon", 1, "release g1 @compute"),
            r"abandon t1 `release g1 @compute`: parameter 'w3' in chunk c3 cannot go from free to free",
        ),
    ],
)
def test_illegal_change_is_refused_by_name(spec: PlanSpec, message: str) -> None:
    plan = spec.build()
    programs = ("forward", "abandon") if "abandon" in message else TRAINING
    with pytest.raises(PlanError, match=message):
        payload_states(plan, map(plan.program, programs))


def test_table_is_the_architectures() -> None:
    assert len(LEGAL_TRANSITIONS) == 11
    assert (AB, C) not in LEGAL_TRANSITIONS and (F, C) not in LEGAL_TRANSITIONS and (H, AB) not in LEGAL_TRANSITIONS
