"""Ranks of one life of a job find one another in a store that still holds what earlier lives have written."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from chunkc._torch_compat.rendezvous import name_life

TIMEOUT = timedelta(seconds=30)


def live(store: dist.Store, delays_s: list[float]) -> list[str]:
    """The name that every rank gets where they come after ``delays_s``."""

    def come(rank: int) -> str:
        time.sleep(delays_s[rank])
        return name_life(store, rank, len(delays_s), TIMEOUT)

    with ThreadPoolExecutor(len(delays_s)) as pool:
        return list(pool.map(come, range(len(delays_s))))


@pytest.mark.parametrize("delays_s", [[0.3, 0.0, 0.0], [0.0, 0.3, 0.1], [0.2, 0.0, 0.4]])
def test_ranks_of_a_later_life_do_not_follow_an_earlier_one(delays_s: list[float]) -> None:
    """Also where ranks come before rank 0 has come again, and see its old offer only."""
    store = dist.HashStore()
    names = [live(store, delays_s) for _ in range(3)]
    assert all(len(set(name)) == 1 for name in names)
    assert len({name[0] for name in names}) == 3


def test_a_life_that_ended_before_all_had_come_binds_nobody() -> None:
    """Rank 0 and rank 1 met, rank 2 never came; then all are started again."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        first = [pool.submit(name_life, store, rank, 3, timedelta(seconds=0.5)) for rank in range(2)]
        old = first[1].result()
        with pytest.raises(RuntimeError):
            first[0].result()
    names = live(store, [0.2, 0.0, 0.1])
    assert len(set(names)) == 1 and names[0] != old


def test_a_rank_0_that_never_comes_is_told() -> None:
    store = dist.HashStore()
    live(store, [0.0, 0.0])
    with pytest.raises(RuntimeError, match=r"rank 0 has not greeted rank 1 within 0.3 s"):
        name_life(store, 1, 2, timedelta(seconds=0.3))
