"""Reports of the ranks, through the job's store, on where each of them stopped when exchanges failed."""

from __future__ import annotations

import time
from typing import Final

from chunkc._torch_compat.distributed import Store

_WAIT_S: Final = 2.0
"""How long a rank that saw a collective fail waits for the others to say where they stopped."""


class Stories:
    """Where the ranks of one model stopped.

    Args:
        store: of the job.
        name: of the model's ranks in it, the same on all of them.
    """

    def __init__(self, store: Store, name: str, rank: int, size: int) -> None:
        self._store, self._prefix, self._rank, self._size = store, f"{name}/stopped", rank, size

    def tell(self, place: str) -> None:
        """Tell the others, as far as they can hear, that this rank goes no further."""
        try:
            self._store.set(f"{self._prefix}/{self._rank}", place)
        except Exception:  # the store is gone with the rank that held it; then nobody hears anything
            return

    def hear(self) -> str:
        """Where each of the others stopped, as far as they say it in time."""
        told: dict[int, str] = {}
        until = time.monotonic() + _WAIT_S
        others = [rank for rank in range(self._size) if rank != self._rank]
        while len(told) < len(others) and time.monotonic() < until:
            for rank in (rank for rank in others if rank not in told):
                try:
                    key = f"{self._prefix}/{rank}"
                    if self._store.check([key]):
                        told[rank] = self._store.get(key).decode()
                except Exception:  # as in `tell`
                    return "The job's store does not answer: the rank that held it (mostly rank 0) has ended."
            time.sleep(0.05)
        silent = [str(rank) for rank in others if rank not in told]
        said = "; ".join(f"rank {rank} stopped in {place}" for rank, place in sorted(told.items()))
        quiet = f"rank {', '.join(silent)} did not say anything: ended or hanging" if silent else ""
        return f"What the others say: {'; '.join(filter(None, (said, quiet)))}."
