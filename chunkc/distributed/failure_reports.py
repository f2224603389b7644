"""The first failure of a rank, and reports of where ranks stopped, through the store of the job."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Final

from chunkc._torch_compat.distributed import Store
from chunkc.errors import RankError

_WAIT_S: Final = 2.0
"""How long a rank that saw a collective fail waits for the reports of the others."""
_RESTART: Final = "Start the job again from its last checkpoint"


class FailureReports:
    """Reports of the ranks of one model, of one ``name`` in the job's ``store``.

    ``first``: the failure of this rank after which it exchanges nothing more.
    """

    def __init__(self, store: Store, name: str, rank: int, size: int, timeout: timedelta) -> None:
        self._store, self._prefix, self._rank, self._size = store, f"{name}/stopped", rank, size
        self._timeout, self._lock = timeout, threading.Lock()
        self.first: RankError | None = None

    def exchange_failed(self, place: str, after_s: float, error: BaseException) -> RankError:
        """Return the first failure; if it is this one, report it to the others and add their reports to it."""
        with self._lock:
            if self.first is None:
                self._report(place)
                cause = [*str(error).strip().splitlines(), type(error).__name__][0]
                self.first = RankError(
                    f"rank {self._rank} of {self._size} stopped in {place} after {after_s:.1f} s: another rank has "
                    f"ended, failed, or did not come within the timeout of {self._timeout.total_seconds():g} s, or "
                    f"this one cannot exchange. {self._collect()} {_RESTART}. torch says: {cause}"
                )
            return self.first

    def work_failed(self, place: str, error: BaseException) -> None:
        """Report ``error`` of this rank's own work, on which the others count, as the first failure."""
        self._report(f"{place}: {type(error).__name__}: {error}")
        self.first = RankError(
            f"rank {self._rank} of {self._size} failed in {place}, where the other ranks count on it, so that they "
            f"have ended too ({type(error).__name__}: {error}). {_RESTART}"
        )

    def _report(self, place: str) -> None:
        """Tell the others, as far as the store answers, that this rank goes no further."""
        try:
            self._store.set(f"{self._prefix}/{self._rank}", place)
        except Exception:  # the store is gone with the rank that held it; then nobody hears anything
            return

    def _collect(self) -> str:
        """Where each of the others stopped, as far as they report it in time."""
        places: dict[int, str] = {}
        until = time.monotonic() + _WAIT_S
        others = [rank for rank in range(self._size) if rank != self._rank]
        while len(places) < len(others) and time.monotonic() < until:
            for rank in (rank for rank in others if rank not in places):
                try:
                    key = f"{self._prefix}/{rank}"
                    if self._store.check([key]):
                        places[rank] = self._store.get(key).decode()
                except Exception:  # as in `_report`
                    return "The job's store does not answer: the rank that held it (mostly rank 0) has ended."
            time.sleep(0.05)
        silent = [str(rank) for rank in others if rank not in places]
        reported = "; ".join(f"rank {rank} stopped in {place}" for rank, place in sorted(places.items()))
        quiet = f"rank {', '.join(silent)} did not say anything: ended or hanging" if silent else ""
        return f"What the others say: {'; '.join(filter(None, (reported, quiet)))}."
