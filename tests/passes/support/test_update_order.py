"""The order of updates on the host: against all orders of a few jobs, and as plans have it."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

import pytest
from costs import rates, with_work
from hypothesis import example, given
from hypothesis import strategies as st
from schedules import accumulating, budgeted, chain, mixed, planned, planned_somewhere, target

from chunkc.cost.simulate import price
from chunkc.ir.actions import Op, Stream
from chunkc.ir.plan import Plan
from chunkc.passes import PlanOptions
from chunkc.passes.support.draft import decided
from chunkc.passes.support.update_order import Job, earliest_deadline_first

NUM_JOBS = 6
"""Of which there are 720 orders."""


def lateness(jobs: Sequence[Job], deadlines: Sequence[int], order: Sequence[int]) -> int:
    """How much later than its deadline the latest update ends; ``order``: positions in ``jobs``."""
    now, worst = 0.0, -float("inf")
    for position in order:
        now = max(now, jobs[position].release) + jobs[position].duration
        worst = max(worst, now - deadlines[position])
    return round(worst)


@st.composite
def due_jobs(draw: st.DrawFn) -> tuple[list[Job], list[int]]:
    count = draw(st.integers(1, NUM_JOBS))
    deadlines = sorted(draw(st.integers(0, 30)) for _ in range(count))
    return [Job(i, draw(st.integers(0, 20)), draw(st.integers(1, 8))) for i in range(count)], deadlines


BACKWARD_THEN_FORWARD = [Job(i, 2 * (5 - i), 2) for i in range(6)], [12, 14, 16, 18, 20, 22]


@given(due_jobs())
@example(BACKWARD_THEN_FORWARD)
def test_no_order_is_better_by_a_whole_update(case: tuple[list[Job], list[int]]) -> None:
    jobs, deadlines = case
    found = earliest_deadline_first(jobs)
    assert sorted(found) == list(range(len(jobs)))
    best = min(lateness(jobs, deadlines, order) for order in permutations(range(len(jobs))))
    assert lateness(jobs, deadlines, found) < best + max(job.duration for job in jobs)


@given(due_jobs())
@example(BACKWARD_THEN_FORWARD)
def test_no_order_is_better_where_updates_are_equal_and_released_in_step(case: tuple[list[Job], list[int]]) -> None:
    """As with chunks of one size whose gradients land one update's time apart, or several."""
    jobs, deadlines = [replace(job, release=3 * job.release, duration=3.0) for job in case[0]], case[1]
    best = min(lateness(jobs, deadlines, order) for order in permutations(range(len(jobs))))
    assert lateness(jobs, deadlines, earliest_deadline_first(jobs)) == best


@given(due_jobs())
def test_the_worker_never_waits_while_an_update_is_released(case: tuple[list[Job], list[int]]) -> None:
    jobs, _ = case
    now, left = 0.0, set(range(len(jobs)))
    for position in earliest_deadline_first(jobs):
        job = jobs[position]
        released = [p for p in left if jobs[p].release <= max(now, job.release)]
        assert job.release <= now or all(jobs[p].release >= job.release for p in left), "it waited for the next one"
        assert position == min(released)
        left.remove(position)
        now = max(now, job.release) + job.duration


def test_a_slow_worker_takes_what_has_landed_and_then_what_is_due() -> None:
    jobs = [Job(chunk=i, release=5 - i, duration=2) for i in range(6)]
    assert earliest_deadline_first(jobs) == (5, 3, 1, 0, 2, 4)
    assert earliest_deadline_first([replace(job, release=5) for job in jobs]) == (0, 1, 2, 3, 4, 5)
    assert earliest_deadline_first([replace(job, duration=0.1) for job in jobs]) == (5, 4, 3, 2, 1, 0)


def updated(plan: Plan) -> list[int]:
    return [a.index for a in plan.program("step").actions if a.op is Op.UPDATE and a.stream is Stream.CPU]


ON_HOST = PlanOptions(chunk_numel=64, os_home="host", max_slots=3)


def test_plans_order_by_time_where_rates_are_known_and_else_by_positions() -> None:
    by_positions = planned(chain(6), target(), ON_HOST)
    assert updated(by_positions.plan) == [5, 3, 1, 0, 2, 4]
    slow = rates(cpu_update_gparam_per_s={"float32": 1e-9})
    fast = rates(cpu_update_gparam_per_s={"float32": 1e9})
    assert updated(planned(chain(6), replace(target(), rates=slow), ON_HOST).plan) == [5, 0, 1, 2, 3, 4]
    assert updated(planned(chain(6), replace(target(), rates=fast), ON_HOST).plan) == [5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize("update_ms", [0.5, 1.5, 4.0])
@pytest.mark.parametrize("run_ms", [1, 3])
def test_no_order_of_a_plan_is_faster_by_a_whole_update(
    update_ms: float, run_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five updates in all 120 orders, simulated in the plan of a small model through three slots."""
    known = rates(cpu_update_gparam_per_s={"float32": 64e-6 / update_ms})
    found = chain(5)

    def step_ms() -> float:
        with_rates = replace(target(), rates=known)
        return price(with_work(planned(found, with_rates, ON_HOST).plan, run_ms), known).step_ms

    mine = step_ms()
    times = {}
    for order in permutations(range(5)):
        monkeypatch.setattr("chunkc.passes.step.host_order", lambda draft, chunks, order=order: order)
        times[order] = step_ms()

    assert mine <= min(times.values()) + update_ms and mine <= times[0, 1, 2, 3, 4]


def test_nothing_is_released_before_backward_has_ended_behind_a_decision_or_on_the_launching_thread() -> None:
    for where, options in (
        (target(), replace(ON_HOST, tracks_grad_norm=True)),
        (replace(target(), runs_inline=True), ON_HOST),
    ):
        assert updated(planned(chain(6), where, options).plan) == [0, 1, 2, 3, 4, 5]


@given(mixed() | accumulating())
def test_every_plan_updates_the_same_chunks_in_any_order(request: tuple) -> None:  # type: ignore[type-arg]
    found, where, options = request
    mine = planned_somewhere(found, where, options)
    budget = mine.plan.memory
    same = budgeted(where, budget.device_budget_nbytes, budget.host_budget_nbytes)
    inline = planned(found, replace(same, runs_inline=True), options)
    assert sorted(updated(mine.plan)) == sorted(updated(inline.plan))
    assert decided(mine.drafts[-1][1].layout, "layout") == decided(inline.drafts[-1][1].layout, "layout")
