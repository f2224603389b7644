"""What the tests of the jobs themselves run on ranks."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from job_rank import Report


def num_threads_before_fork() -> int:
    """Of the process that this one was forked from."""
    import job_preload

    return job_preload.num_threads


def rank_and_sum(value: float) -> tuple[int, int, torch.Tensor]:
    """Process, rank, and the sum over ranks of ``value`` and the rank."""
    total = torch.tensor([value + torch.distributed.get_rank()])
    torch.distributed.all_reduce(total)
    return os.getpid(), torch.distributed.get_rank(), total


def raise_on(rank: int) -> int:
    """Raises on one rank."""
    if torch.distributed.get_rank() == rank:
        raise ValueError(f"rank {rank} was asked to")
    return torch.distributed.get_rank()


def end_on(rank: int) -> None:
    """Ends the process of one rank."""
    if torch.distributed.get_rank() == rank:
        os._exit(3)


def hang_on(rank: int) -> None:
    """Hangs on one rank."""
    if torch.distributed.get_rank() == rank:
        time.sleep(1000)


def unpicklable() -> Any:
    """Cannot be sent."""
    return lambda: None


def exchange_for_ever(report: Report) -> None:
    """All-reduces until something fails."""
    for step in range(1_000_000):
        torch.distributed.all_reduce(torch.ones(4))
        if step == 3:
            report("step 3")
