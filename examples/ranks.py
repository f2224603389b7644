"""A script's needs under torchrun: its rank, its part of every batch, and losses over all ranks.

chunkc.compile joins the job of torchrun by itself; a script joins first to know its rank before that. Without torchrun
all of this is nothing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among ``size`` that train one model."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that prints."""
        return self.rank == 0

    def part(self, batch: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a batch for all ranks: as many as each of the others has."""
        return batch.chunk(self.size)[self.rank]

    def mean(self, loss: torch.Tensor) -> float:
        """The mean over all ranks, all of which call it."""
        if self.size == 1:
            return loss.item()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total.item() / self.size

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` holds on any rank; all of them call it."""
        return self.mean(torch.tensor(float(flag), device="cpu")) > 0


@contextmanager
def joined() -> Iterator[Ranks]:
    """The ranks that torchrun has started, or this process; in the block only rank 0 prints and logs."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    ranks = Ranks(dist.get_rank(), size) if size > 1 else Ranks()
    level = logging.INFO if ranks.is_first else logging.WARNING
    logging.basicConfig(level=level, format="%(name)s: %(message)s")
    if ranks.is_first:
        yield ranks
    else:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            yield ranks
    if size > 1:
        dist.destroy_process_group()
