"""Forwards that wait for their backward, and what they hold on the device meanwhile.

    loss = distance(model(a), model(b))     what the first forward saved is alive while the second runs
    loss.backward()                         backward of b beside what a saved, then backward of a

A forward is alive while something of what it saved for backward is, or what it gave out before its backward has run.
Autograd says neither; whether their memory is still there does. Plans count bytes of live forwards as other plans say
them, so that all ranks count alike.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from chunkc._torch_compat.core import outlives

MAX_REMEMBERED = 256
"""Forwards without a backward that are remembered when nothing of them is left: their backward may come yet."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a captured graph holds of the device beside its parameters.

    ``at_start_nbytes``: inputs and buffers alive when it begins; ``saved_nbytes``: what is alive when it has ended;
    ``saved``: positions of the outputs that are only saved for backward.
    """

    at_start_nbytes: int = 0
    saved_nbytes: int = 0
    saved: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Storage:
    """The memory behind a tensor, which is not kept alive by this."""

    is_alive: Callable[[], bool]
    nbytes: int
    address: int

    @staticmethod
    def all_of(values: Iterable[Any]) -> list[Storage]:
        """The storages behind the tensors among ``values``, each once."""
        storages = {v.untyped_storage().data_ptr(): v.untyped_storage() for v in values if isinstance(v, torch.Tensor)}
        return [Storage(outlives(storage), storage.nbytes(), address) for address, storage in storages.items()]


@dataclass(slots=True, eq=False)
class LiveForward:
    """One run of a forward graph.

    ``family`` as of its `Executor`; ``call`` numbers the calls of the model; ``backwards`` are those that have run it.
    """

    family: object
    call: int
    nbytes: int
    saved: list[Storage]
    given: list[Storage]
    backwards: set[int] = field(default_factory=set)

    def is_alive(self) -> bool:
        """Whether it holds device memory for a backward."""
        if any(storage.nbytes and storage.is_alive() for storage in self.saved):
            return True
        return not self.backwards and any(storage.nbytes and storage.is_alive() for storage in self.given)

    def saved_one_of(self, addresses: Collection[int]) -> bool:
        return any(s.address in addresses and s.nbytes and s.is_alive() for s in self.saved)


class LiveForwards:
    """The forwards of one model that are alive, oldest first."""

    def __init__(self) -> None:
        self._forwards: list[LiveForward] = []

    def add(self, family: object, call: int, held: Held, outputs: Sequence[Any], inputs: Collection[int]) -> None:
        """A graph has run forward in ``call``; memory at the addresses ``inputs`` is its caller's."""
        saved = [outputs[position] for position in held.saved]
        given = [value for position, value in enumerate(outputs) if position not in held.saved]
        of_caller = {*inputs, *(storage.address for storage in Storage.all_of(given))}
        forward = LiveForward(
            *(family, call, held.saved_nbytes),
            saved=[storage for storage in Storage.all_of(saved) if storage.address not in of_caller],
            given=[storage for storage in Storage.all_of(given) if storage.address not in inputs],
        )
        self._forwards.append(forward)
        gone = [f for f in self._forwards if not f.is_alive()]
        left = {id(f) for f in gone if f.backwards} | {id(f) for f in gone[:-MAX_REMEMBERED]}
        self._forwards = [f for f in self._forwards if id(f) not in left]

    def nbytes(self, other_than: LiveForward | None = None) -> int:
        """Bytes that forwards hold, but for one of them."""
        return sum(f.nbytes for f in self._forwards if f is not other_than and f.is_alive())

    def find(self, family: object, args: Sequence[Any]) -> LiveForward | None:
        """The forward whose backward takes ``args``; where nothing tells, the newest that waits for one."""
        own = [forward for forward in reversed(self._forwards) if forward.family is family]
        addresses = {storage.address for storage in Storage.all_of(args)}
        for forward in own:
            if forward.saved_one_of(addresses):
                return forward
        return next((forward for forward in own if not forward.backwards), own[0] if own else None)

    def clear(self) -> None:
        self._forwards.clear()
