"""Chunks as they were at one moment, read one by one while training goes on.

    waiting   nobody has written the chunk since: where it lives is what it was
    copied    it was about to be written, so the writer copied it aside first (copy-on-write, per chunk)
    taken     the reader has it

The copies aside are bounded. A writer that finds no room waits until the reader has caught up, so a slow disk slows the
steps down instead of taking a second model's memory. What is read is therefore always that moment, never a mixture.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from chunkc.errors import ChunkcError

Live = Callable[[int], tuple[torch.Tensor, ...]]
"""The tensors of a chunk where it lives, by its index: what a writer is about to change."""


class Snapshot:
    """See the module docstring. One thread reads; any threads write, and say so before by `before_write`.

    Args:
        live: gives the memory of a chunk between programs.
        chunks: indexes of the chunks to keep. Nothing may be writing to them now.
        max_copied_nbytes: bound of the copies aside. A chunk larger than that is waited for.

    Attributes:
        num_copies, num_waits: how many chunks were copied aside, and how many writers had to wait.
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
        """Somebody is about to write to ``chunk``: returns when that cannot change what will be read."""
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

        Raises:
            KeyError: when it was taken before, or is none of the snapshot's.
            ChunkcError: when the snapshot was closed, so that the chunk may have been written to since.
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
        """Nobody reads any more: writers go on."""
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


class PartOfParam(Protocol):
    """Elements ``[start, end)`` of ``chunk`` belong to a parameter."""

    @property
    def chunk(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...


class SnapshotReader:
    """Parameters out of a snapshot, in the order in which they stand in chunks.

    A chunk is taken when its first parameter is read and let go when one is read that has no part of it.

    Attributes:
        snapshot: what it reads.
    """

    def __init__(self, snapshot: Snapshot, runs: Callable[[int], Sequence[Sequence[PartOfParam]]]) -> None:
        """Read ``snapshot`` by the runs of each parameter.

        ``runs`` gives the runs of a parameter by its index: parts in chunks of the snapshot. Parts that follow each
        other in the parameter are together.
        """
        self.snapshot = snapshot
        self._runs = runs
        self._taken: dict[int, tuple[torch.Tensor, ...]] = {}

    def read(self, index: int, position: int = 0) -> tuple[torch.Tensor, ...]:
        """Parameter ``index`` (position 0), or its state of a position from 1 on, as it was, in host memory.

        Returns:
            the elements of each run, 1-D.

        Raises:
            KeyError: when parameters are read in another order than that of their chunks.
            ChunkcError: after the end.
        """
        runs = self._runs(index)
        needed = [part.chunk for run in runs for part in run]
        if needed:
            self._taken = {chunk: held for chunk, held in self._taken.items() if chunk in needed}
        for chunk in needed:
            if chunk not in self._taken:
                self._taken[chunk] = self.snapshot.take(chunk)
        return tuple(torch.cat([self._taken[p.chunk][position][p.start : p.end] for p in run]) for run in runs)
