"""What the tests of the jobs themselves run on ranks."""

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
    total = torch.tensor([value + torch.distributed.get_rank()])
    torch.distributed.all_reduce(total)
    return os.getpid(), torch.distributed.get_rank(), total


def raise_on(rank: int) -> int:
    if torch.distributed.get_rank() == rank:
        raise ValueError(f"rank {rank} was asked to")
    return torch.distributed.get_rank()


def end_on(rank: int) -> None:
    if torch.distributed.get_rank() == rank:
        os._exit(3)


def hang_on(rank: int) -> None:
    if torch.distributed.get_rank() == rank:
        time.sleep(1000)


def unpicklable() -> Any:
    return lambda: None


def exchange_for_ever(report: Report) -> None:
    for step in range(1_000_000):
        torch.distributed.all_reduce(torch.ones(4))
        if step == 3:
            report("step 3")
