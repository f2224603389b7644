"""The verifier accepts right plans, and refuses broken ones by the name of the action and the chunk."""

import re
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from mutations_actions import GRADIENTS, MOVES, STEP
from mutations_begun import BEGUN
from mutations_frame import BUDGETS, COLLECTIVES, STRUCTURE
from mutations_moves import VALUES
from plans import SPECS, chain, distributed, evicting
from spec import PlanSpec

from chunkc.errors import PlanError
from chunkc.ir.plan import Plan
from chunkc.ir.verify import verify
from chunkc.ir.verify.verifier import SEQUENCE


@pytest.mark.parametrize("name", SPECS)
def test_right_plan_is_accepted(name: str) -> None:
    verify(SPECS[name].build())


def test_plan_read_from_text_is_accepted() -> None:
    plan = evicting().build()
    verify(Plan.from_json(plan.to_json()))


def test_every_legal_pair_of_programs_is_replayed() -> None:
    pairs = {"".join(pair) for pair in pairwise(SEQUENCE)}
    assert pairs == {
        "FB",
        "FA",
        "BS",
        "BR",
        "SF",
        "RF",
        "AF",
        "AU",
        "SU",
        "RU",
        "UB",
    }


def seconds_to_verify(plan: Plan) -> float:
    """Of this thread's processor time, the best of three: a process that has run all other tests collects garbage."""
    best = float("inf")
    for _ in range(3):
        start = time.thread_time()
        verify(plan)
        best = min(best, time.thread_time() - start)
    return best


def test_three_thousand_actions_take_less_than_two_seconds() -> None:
    plan = chain(375).build()
    assert sum(len(plan.program(name).actions) for name in ("forward", "backward", "step")) == 3000
    assert seconds_to_verify(plan) < 2.0


@pytest.mark.parametrize(
    ("mesh", "part"),
    [
        ((("dp_shard", 4), ("tp", 2)), "mesh dp_shard=4,tp=2 of a layout of 2 ranks along dp_shard and cp"),
        ((("tp", 2),), "of a layout of 2 ranks along dp_shard"),
        ((("dp_replicate", 2), ("dp_shard", 2)), "of a layout of 1 ranks along dp_replicate"),
        ((("dp_shard", 2), ("dp_shard", 2)), "each dimension once"),
        ((("dp_shard", 2), ("tp", 1)), "of two ranks or more"),
        ((("dp_shard", 2), ("tp", 2**20)), "at most 1048576 in all"),
    ],
)
def test_a_mesh_that_is_not_the_layouts_is_refused(mesh: tuple[tuple[str, int], ...], part: str) -> None:
    with pytest.raises(PlanError, match=part):
        verify(replace(distributed().build(), mesh=mesh))


def test_work_grows_linearly() -> None:
    """Twenty times the actions must not take two hundred times as long (graph reachability would)."""
    assert seconds_to_verify(chain(400).build()) < 60 * seconds_to_verify(chain(20).build())


MUTATIONS = [*MOVES, *GRADIENTS, *STEP, *BEGUN, *VALUES, *BUDGETS, *COLLECTIVES, *STRUCTURE]


@pytest.mark.parametrize(("change", "patterns"), [m[1:] for m in MUTATIONS], ids=[m[0] for m in MUTATIONS])
def test_broken_plan_is_refused_by_name(change: Callable[[], PlanSpec], patterns: tuple[str, ...]) -> None:
    plan = change().build()
    with pytest.raises(PlanError) as refusal:
        verify(plan)
    for pattern in patterns:
        assert re.search(pattern, str(refusal.value)), f"{pattern!r} not in {refusal.value}"


def test_refusal_is_one_line_with_action_moment_and_numbers() -> None:
    with pytest.raises(PlanError) as refusal:
        verify(evicting().but(device_budget=1511).build())
    assert str(refusal.value) == (
        "forward f1 `run fwd.0 @compute after f0` (before fwd.0): the device needs 1512 bytes (512 arena, "
        "1000 non-model), 1 more than the budget of 1511"
    )
