"""Ranks that are threads of one process: for what ranks exchange, without a job."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from chunkc.distributed.process_group import Ranks

TIMEOUT_S = 60


class ThreadRanks(Ranks):
    """One of several threads, all of which call the same methods; only ``collect`` exchanges anything."""

    def __init__(self, rank: int, slots: list[bytes], barrier: threading.Barrier) -> None:
        self.rank = self.job_rank = rank
        self.size = self.job_size = len(slots)
        self._slots = slots
        self._barrier = barrier

    def collect(self, data: bytes) -> list[bytes]:
        self._slots[self.rank] = data
        self._barrier.wait(TIMEOUT_S)
        found = list(self._slots)
        self._barrier.wait(TIMEOUT_S)
        return found

    collect_from_job = collect


def on_threads(size: int, work: Callable[[Ranks], object]) -> list[object]:
    slots, barrier = [b""] * size, threading.Barrier(size)
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(work, ThreadRanks(rank, slots, barrier)) for rank in range(size)]
        return [future.result(TIMEOUT_S) for future in futures]
