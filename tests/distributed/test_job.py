"""The jobs that other tests here run on: results and errors come back by rank, nothing hangs, nothing is left over."""

from __future__ import annotations

import signal

import job_checks
import pytest
import torch
from job import JobError, Pool, only_call

pytestmark = pytest.mark.distributed


def test_results_come_back_in_the_order_of_ranks(two_ranks: Pool) -> None:
    """And the next call runs in the same processes."""
    first, second = (two_ranks.run(job_checks.rank_and_sum, value) for value in (1.0, 2.0))
    assert [rank for _, rank, _ in first] == [0, 1]
    assert [pid for pid, *_ in first] == [pid for pid, *_ in second]
    assert all(torch.equal(total, torch.tensor([3.0])) for *_, total in first)
    assert all(torch.equal(total, torch.tensor([5.0])) for *_, total in second)


def test_ranks_are_forked_from_a_process_of_one_thread(two_ranks: Pool) -> None:
    """They would wait for ever for what another thread of it had in its hands."""
    assert two_ranks.run(job_checks.num_threads_before_fork) == [1, 1]


@pytest.fixture(scope="module")
def own_pool() -> object:
    """One whose processes the tests below end."""
    pool = Pool(2)
    yield pool
    pool.discard()


@pytest.mark.slow
def test_an_exception_is_told_by_rank(own_pool: Pool) -> None:
    before = own_pool.run(job_checks.rank_and_sum, 0.0)
    found = own_pool.outcomes(job_checks.raise_on, 1)
    assert found[0].value == 0 and found[0].error is None
    assert found[1].error is not None and found[1].error.kind == "ValueError"
    assert found[1].error.text == "rank 1 was asked to" and "raise_on" in found[1].error.trace
    after = own_pool.run(job_checks.rank_and_sum, 0.0)
    assert {pid for pid, *_ in before}.isdisjoint(pid for pid, *_ in after), "such processes are not used again"
    with pytest.raises(JobError, match="rank 1 raised ValueError: rank 1 was asked to"):
        own_pool.run(job_checks.raise_on, 1)


@pytest.mark.slow
def test_an_ended_rank_and_an_unsendable_result_are_told(own_pool: Pool) -> None:
    found = own_pool.outcomes(job_checks.end_on, 1)
    assert found[0].error is None
    assert found[1].error is not None and "rank 1 ended with exit code 3" in found[1].error.text
    errors = [outcome.error for outcome in own_pool.outcomes(job_checks.unpicklable)]
    assert all(error is not None and "pickle" in error.text for error in errors)


@pytest.mark.slow
def test_a_rank_that_hangs_is_shown_and_ended(own_pool: Pool) -> None:
    with pytest.raises(JobError, match=r"ranks \[1\] came to no end") as caught:
        own_pool.outcomes(job_checks.hang_on, 1, timeout_s=3)
    assert "in hang_on" in str(caught.value)
    assert len(own_pool.run(job_checks.rank_and_sum, 0.0)) == 2


def test_ends_of_processes_are_told() -> None:
    """One is killed, the other one's exchange fails and ends it."""
    with only_call(2, job_checks.exchange_for_ever, group_timeout_s=20) as job:
        job.wait_for(1, "step 3", 60)
        job.kill(1)
        ends = job.ends(20)
    assert ends[1].exit_code == -signal.SIGKILL
    assert ends[0].exit_code == 1 and ends[0].after_s < 20
    assert "exchange_for_ever" in ends[0].log
