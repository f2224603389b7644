"""Training that ends badly on one rank; the only call of a job (`job.only_call`)."""

import os
import time

import torch
from job_rank import Report
from pair import SMALL, batch
from scripted_loops import LR, TIGHT, seeded_tower

import chunkc

WARM_STEP = 3
ENDS = ("exit", "sleep", "raise")


def train_for_ever(report: Report, end: str = "", on_rank: int = -1, hw: str = TIGHT, shard: str = "all") -> None:
    """Trains, and reports ``warm`` once; then one rank does what ``end`` says in the middle of a step."""
    rank = torch.distributed.get_rank()
    model = chunkc.compile(seeded_tower(), hw, **SMALL, shard=shard)
    optimizer = chunkc.AdamW(model.parameters(), lr=LR)
    for step in range(1_000_000):
        loss = model(*batch(2 * step + rank))
        if step == WARM_STEP:
            report("warm")
            if rank == on_rank:
                _end(end)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _end(how: str) -> None:
    if how == "exit":
        os._exit(3)
    if how == "sleep":
        time.sleep(1000)
    raise RuntimeError("this rank's data loader failed")
