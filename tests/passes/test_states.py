"""States over an iteration, and the overlay proof."""

from dataclasses import replace

import pytest
from schedules import op, param, schedule

from chunkc.errors import PlanError
from chunkc.passes.liveness import analyse
from chunkc.passes.states import history, prove_overlays
from chunkc.passes.support.draft import Overlay

PARAMS = [param("tied", 64), param("frozen", 64)]
FOUND = schedule(PARAMS, [op([0]), op([1, 0])], [op([0], name="early"), op([1], [0]), op([0], name="late")])


def test_history_of_a_parameter_read_twice_in_both_graphs() -> None:
    states = [(c.moment, str(c.state)) for c in history(FOUND, analyse(FOUND), 0)]
    assert states == [
        ("start", "hold"),
        ("fwd 0", "compute"),
        ("fwd 0", "hold_after_fwd"),
        ("fwd 1", "compute"),
        ("fwd 1", "hold_after_fwd"),
        ("forward ends", "hold"),
        ("bwd 0", "compute"),
        ("bwd 0", "hold"),
        ("bwd 2", "compute"),
        ("bwd 2", "hold_after_bwd"),
        ("step", "hold"),
    ]


def test_history_of_a_frozen_parameter_ends_as_it_began() -> None:
    assert [str(c.state) for c in history(FOUND, analyse(FOUND), 1)][-3:] == ["hold", "compute", "hold"]


def test_overlays_are_proved_for_trained_parameters() -> None:
    assert prove_overlays(FOUND, analyse(FOUND)) == (Overlay(0, final_op=1, last_read_op=2, landing_op=2),)


def test_a_read_after_the_landing_is_refused() -> None:
    wrong = replace(analyse(FOUND), landing_op=(1, -1))
    with pytest.raises(PlanError, match="the gradient of 'tied' cannot overlay it: 'late' reads the parameter"):
        prove_overlays(FOUND, wrong)
