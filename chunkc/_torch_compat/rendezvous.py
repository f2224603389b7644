"""Meeting the other ranks of this life of a job.

torchrun restarts workers with the key-value store of their predecessors, so a rank may find where its peers listened
before they died. (Its restart counter does not tell lives apart: every node has its own.) Rank 0 offers a random name
for this life, every other rank answers with a random name of its own, and goes on when rank 0 confirms that.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

_OFFER = "chunkc/life"
_POLL_S = 0.05


def meet(timeout: timedelta) -> tuple[Store, int, int]:
    """Meet the job's other ranks: a store without writes of earlier lives, this rank, their number.

    Raises RuntimeError when not all have come within ``timeout``, ValueError when the environment names no job.
    """
    store, rank, world_size = next(iter(rendezvous("env://")))
    store.set_timeout(timeout)
    return PrefixStore(name_life(store, rank, world_size, timeout), store), rank, world_size


def name_life(store: Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """A name that all ranks alive share, and no rank of an earlier life has had; raises as `meet`."""
    return _invite(store, world_size, timeout) if rank == 0 else _follow(store, rank, timeout)


def _invite(store: Store, world_size: int, timeout: timedelta) -> str:
    life, deadline = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    store.set(_OFFER, life)
    for rank in range(1, world_size):
        answer = f"{_OFFER}/{life}/answer/{rank}"
        store.wait([answer], timedelta(seconds=max(0.001, deadline - time.monotonic())))
        store.set(f"{_OFFER}/{life}/welcome/{rank}", store.get(answer).decode())
    return life


def _follow(store: Store, rank: int, timeout: timedelta) -> str:
    """Answer offers, each once, until one is confirmed."""
    name, answered = uuid.uuid4().hex, ""
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        life = store.get(_OFFER).decode()
        if life != answered:
            store.set(f"{_OFFER}/{life}/answer/{rank}", name)
            answered = life
        welcome = f"{_OFFER}/{life}/welcome/{rank}"
        if store.check([welcome]) and store.get(welcome).decode() == name:
            return life
        time.sleep(_POLL_S)
    raise RuntimeError(f"rank 0 has not greeted rank {rank} within {timeout.total_seconds():g} s")
