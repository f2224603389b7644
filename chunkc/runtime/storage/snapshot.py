"""Chunks as they were at one moment, read one by one while training goes on.

    waiting   nobody has written the chunk since: where it lives is what it was
    copied    it was about to be written, so the writer copied it aside first (copy-on-write, per chunk)
    taken     the reader has it

The copies aside are bounded. A writer that finds no room waits until the reader has caught up, so a slow disk slows the
steps down instead of taking a second model's memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from chunkc.errors import ChunkcError

Live = Callable[[int], tuple[torch.Tensor, ...]]
"""The tensors of a chunk where it lives, by its index: what a writer is about to change."""


class Snapshot:
    """One moment of ``chunks``: one thread reads; any threads write, each after `before_write`.

    ``live`` gives the memory of a chunk between programs. ``max_copied_nbytes`` bounds the copies aside.
    """

    def __init__(self, live: Live, chunks: Iterable[int], max_copied_nbytes: int) -> None:
        self.num_copies = 0
        self.num_waits = 0
        self._live = live
        self._waiting = set(chunks)
        self._copied: dict[int, tuple[torch.Tensor, ...]] = {}
        self._copied_nbytes = 0
        self._max_copied_nbytes = max_copied_nbytes
        self._changed = threading.Condition()
        self._is_closed = False

    def before_write(self, chunk: int) -> None:
        """Return when a write to ``chunk`` cannot change what will be read."""
        with self._changed:
            if chunk not in self._waiting:
                return
            tensors = self._live(chunk)
            nbytes = _nbytes(tensors)
            if not self._has_room(nbytes):
                self.num_waits += 1
                self._changed.wait_for(lambda: chunk not in self._waiting or self._has_room(nbytes))
            if chunk in self._waiting:
                self._copied[chunk] = _copies(tensors)
                self._copied_nbytes += nbytes
                self._waiting.discard(chunk)
                self.num_copies += 1

    def take(self, chunk: int) -> tuple[torch.Tensor, ...]:
        """The chunk as it was, in host memory that belongs to the caller; once for each chunk.

        Raises KeyError for a chunk that was taken before, `ChunkcError` when the snapshot was closed.
        """
        with self._changed:
            if self._is_closed:
                raise ChunkcError("the snapshot was given up before all of it was read: nothing of it can be used")
            if chunk in self._copied:
                tensors = self._copied.pop(chunk)
                self._copied_nbytes -= _nbytes(tensors)
            else:
                self._waiting.remove(chunk)
                tensors = _copies(self._live(chunk))
            self._changed.notify_all()
            return tensors

    def close(self) -> None:
        """Let writers go on: nobody reads any more."""
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            self._copied.clear()
            self._copied_nbytes = 0
            self._changed.notify_all()

    def _has_room(self, nbytes: int) -> bool:
        return self._copied_nbytes + nbytes <= self._max_copied_nbytes


def _copies(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    with torch.inference_mode(False), torch.no_grad():
        return tuple(torch.empty_like(t, device="cpu").copy_(t) for t in tensors)


def _nbytes(tensors: tuple[torch.Tensor, ...]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


@dataclass(frozen=True, slots=True)
class Part:
    """Elements ``[start, end)`` of ``chunk``, which hold a parameter's elements from ``first`` on."""

    chunk: int
    start: int
    end: int
    first: int

    @property
    def in_chunk(self) -> slice:
        return slice(self.start, self.end)

    @property
    def in_param(self) -> slice:
        return slice(self.first, self.first + self.end - self.start)


class SnapshotReader:
    """Parameters out of a snapshot, in the order in which they stand in chunks.

    A chunk is taken when its first parameter is read and let go when one is read that has no part of it. ``runs`` gives
    parts of a parameter by its index, together where they follow each other; ``values`` elements [start, end) of a
    chunk's tensors, in float32 where they are states, by the position of a list among them.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        runs: Callable[[int], Sequence[Sequence[Part]]],
        values: Callable[[Sequence[torch.Tensor], int, int, int], torch.Tensor],
    ) -> None:
        self.snapshot = snapshot
        self._runs, self._values = runs, values
        self._taken: dict[int, tuple[torch.Tensor, ...]] = {}

    def read(self, index: int, position: int = 0) -> tuple[torch.Tensor, ...]:
        """Runs of parameter ``index`` (position 0) or its state (from 1 on) as it was: 1-D, on the host.

        Raises KeyError when parameters are read in another order than that of their chunks.
        """
        runs = self._runs(index)
        needed = [part.chunk for run in runs for part in run]
        if needed:
            self._taken = {chunk: held for chunk, held in self._taken.items() if chunk in needed}
        for chunk in needed:
            if chunk not in self._taken:
                self._taken[chunk] = self.snapshot.take(chunk)
        return tuple(
            torch.cat([self._values(self._taken[p.chunk], position, p.start, p.end) for p in run]) for run in runs
        )
