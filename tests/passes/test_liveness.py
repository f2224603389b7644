"""When gradients land, and what operators need."""

import pytest
from schedules import op, param, schedule

from chunkc.errors import PlanError
from chunkc.passes.liveness import analyse

PARAMS = [param("tied", 64), param("late", 64), param("frozen", 64), param("unused", 64)]


def test_a_gradient_lands_when_final_and_read_no_more() -> None:
    backward = [op([0], [1]), op([1, 2], [0]), op([0])]
    found = analyse(schedule(PARAMS, [op([2, 0])], backward))
    assert found.trained == (0, 1)
    assert found.final_op == (1, 0, -1, -1)
    assert found.last_read_op == (2, 1, 1, -1)
    assert found.landing_op == (2, 1, -1, -1)


def test_operators_need_what_they_read_and_what_lands() -> None:
    found = analyse(schedule(PARAMS, [op([2, 0]), op()], [op([0]), op([2], [0])]))
    assert found.needs == (((2, 0), ()), ((0,), (2, 0)))
    assert found.use_order == (2, 0)
    assert found.costs[1].made == (0, 256) and found.costs[1].landed == (0, 256)


def test_two_producers_of_one_gradient_are_refused() -> None:
    backward = [op([], [0], name="first"), op([], [0], name="second")]
    with pytest.raises(PlanError, match="that of 'tied' after 'first' and 'second'"):
        analyse(schedule(PARAMS, [op([0])], backward))
