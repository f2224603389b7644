"""Case 16: a rank that dies, leaves or sleeps makes the others fail within the timeout, with a clear message."""

from __future__ import annotations

import random
import re
import signal
import time

import pytest
from job import Job, RankEnd, only_call
from rank_failures import train_for_ever

pytestmark = pytest.mark.distributed
SLOW = pytest.mark.slow
TIMEOUT_S = 20.0
WITHIN_S = 30.0
WARM_S = 120.0


def warm(job: Job) -> None:
    """Until all ranks train."""
    for rank in range(2):
        job.wait_for(rank, "warm", WARM_S)


def check_survivor(end: RankEnd) -> None:
    """It ended by itself, in time, with an error of ours that names where it stopped."""
    assert end.exit_code == 1, f"exit code {end.exit_code} after {end.after_s:.1f} s:\n{end.log}"
    assert end.after_s < WITHIN_S, f"{end.after_s:.1f} s"
    found = re.search(r"RankError: rank \d of 2 stopped in (.+?) after [\d.]+ s: another rank has ended", end.log)
    assert found is not None, end.log
    assert re.match(r"`.+` of \w+|(the agreement on|a broadcast|a mean|an exchange) ", found.group(1)), found.group(1)


def kill_one(rank: int, after_s: float, store: str = "file") -> None:
    """SIGKILL in the midst of training."""
    with only_call(2, train_for_ever, group_timeout_s=TIMEOUT_S, store=store) as job:
        warm(job)
        time.sleep(after_s)
        job.kill(rank)
        ends = job.ends(WITHIN_S + 5)
    assert ends[rank].exit_code == -signal.SIGKILL
    check_survivor(ends[1 - rank])


@pytest.mark.long(but="0-tcp")
@pytest.mark.parametrize(("rank", "store"), [(1, "file"), (0, "tcp")])
def test_a_killed_rank_ends_the_others(rank: int, store: str) -> None:
    """Also rank 0, with which the job's store is gone."""
    kill_one(rank, 0.2, store)


def kill_at_random(seed: int, num_kills: int) -> None:
    generator = random.Random(seed)
    for _ in range(num_kills):
        kill_one(generator.randrange(2), generator.uniform(0, 0.5), generator.choice(["file", "tcp"]))


@pytest.mark.long
def test_a_rank_killed_at_any_moment_ends_the_others() -> None:
    kill_at_random(seed=0, num_kills=1)


@SLOW
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(1, 6))
def test_a_rank_killed_at_any_of_many_moments_ends_the_others(seed: int) -> None:
    kill_at_random(seed, num_kills=10)


@SLOW
@pytest.mark.parametrize("end", ["exit", "sleep", "raise"])
def test_a_rank_that_leaves_or_sleeps_ends_the_others(end: str) -> None:
    with only_call(2, train_for_ever, end, 1, group_timeout_s=TIMEOUT_S) as job:
        warm(job)
        begun_s = time.monotonic()
        while time.monotonic() - begun_s < WITHIN_S and not job.has_ended(0):
            time.sleep(0.05)
        ends = job.ends(0.5)
    check_survivor(ends[0])
    assert ends[1].exit_code == {"exit": 3, "sleep": None, "raise": 1}[end]
    assert ("data loader failed" in ends[1].log) == (end == "raise")
