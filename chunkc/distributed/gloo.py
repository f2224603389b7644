"""All-gather and reduce-scatter between hosts by direct sends of just what each rank needs.

torch's gloo backend gathers through a second copy of the whole group, and its reduce-scatter sends twice the payload.
Here each rank sends its part to all others, or each of the others' parts to its owner, from and to the memory of the
chunks: (p - 1) / p of the group goes out and comes in, at 3 to 4 times gloo's speed between processes of one machine
(see ``benchmarks/results``). Contributions are added up in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from chunkc._torch_compat.distributed import Group

Allocator = Callable[[int], torch.Tensor]
"""Host memory of so many bytes, uint8, to be kept."""

_NUM_RECEIVED: Final = 2
"""Contributions that are on their way at a time: one is added up while the next one comes."""


class DirectExchange:
    """The collectives of one rank over ``group``, a gloo group of all ranks; one thread uses them.

    ``allocate`` gives host memory of so many bytes, uint8, where contributions are received; enlarged where needed.
    """

    def __init__(self, group: Group, rank: int, size: int, allocate: Allocator) -> None:
        self._group, self._rank, self._size = group, rank, size
        self._allocate = allocate
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor) -> None:
        parts, works = whole.tensor_split(self._size), []
        for target, source in self._rounds():
            works.append(self._receive(parts[source], source))
            works.append(self._send(own, target))
        _finish(works)

    def reduce_scatter(self, own: torch.Tensor, whole: torch.Tensor, *, mean: bool) -> None:
        parts, rounds = whole.tensor_split(self._size), list(self._rounds())
        received, total = self._buffers(own)
        sends = [self._send(parts[target], target) for target, _ in rounds]
        arrivals = [self._receive(received[k], source) for k, (_, source) in enumerate(rounds[:_NUM_RECEIVED])]
        total.copy_(own)
        for k in range(len(rounds)):
            _finish([arrivals[k]])
            total.add_(received[k % _NUM_RECEIVED])
            if k + _NUM_RECEIVED < len(rounds):
                arrivals.append(self._receive(received[k % _NUM_RECEIVED], rounds[k + _NUM_RECEIVED][1]))
        _finish(sends)
        own.copy_(total.div_(self._size) if mean else total)

    def all_reduce(self, whole: torch.Tensor, *, mean: bool) -> None:
        """Replace ``whole`` (1-D) by its sum or mean, the same bits on all: each rank makes one part for all."""
        own = whole.tensor_split(self._size)[self._rank]
        self.reduce_scatter(own, whole, mean=mean)
        self.all_gather(whole, own)

    def _rounds(self) -> list[tuple[int, int]]:
        """In each round every rank sends to one and receives from one: (to, from)."""
        return [((self._rank + k) % self._size, (self._rank - k) % self._size) for k in range(1, self._size)]

    def _buffers(self, like: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        nbytes = like.numel() * like.element_size()
        needed = _NUM_RECEIVED * nbytes + 4 * like.numel()
        if self._buffer.numel() < needed:
            self._buffer = self._allocate(needed)
        received = [self._buffer[k * nbytes : (k + 1) * nbytes].view(like.dtype) for k in range(_NUM_RECEIVED)]
        start = _NUM_RECEIVED * nbytes
        return received, self._buffer[start : start + 4 * like.numel()].view(torch.float32)

    def _send(self, part: torch.Tensor, target: int) -> Any:
        return self._group.send([part], target, 0)

    def _receive(self, part: torch.Tensor, source: int) -> Any:
        return self._group.recv([part], source, 0)


def _finish(works: list[Any]) -> None:
    for work in works:
        work.wait()
