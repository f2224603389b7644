"""Device memory of one model beside its arena: reserved, alive for backward, and measured.

    loss = distance(model(a), model(b))     what the first forward saved is alive while the second runs
    loss.backward()                         backward of b beside what a saved, then backward of a

A forward is alive while something of what it saved for backward is, or what it gave out before its backward has run.
Autograd says neither; whether their memory is still there does. Plans count bytes of live forwards as other plans say
them, so that all ranks count alike.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from chunkc.ir.layout import Layout
from chunkc.ir.tiers import Tier
from chunkc.runtime.devices.protocol import Device
from chunkc.runtime.params.shell import Shell
from chunkc.runtime.storage.saved_copies import CopyPool, SavedCopies

logger = logging.getLogger("chunkc")

MAX_REMEMBERED = 256
"""Forwards without a backward that are remembered when nothing of them is left: their backward may come yet."""


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes that a captured graph holds of the device beside its parameters.

    ``at_start_nbytes``: inputs and buffers alive when it begins; ``saved_nbytes``: what is alive when it has ended;
    ``saved``: positions of the outputs that are only saved for backward.
    """

    at_start_nbytes: int = 0
    saved_nbytes: int = 0
    saved: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Storage:
    """The memory behind a tensor, which is not kept alive by this."""

    reference: weakref.ref[torch.UntypedStorage]
    nbytes: int
    address: int

    def is_alive(self) -> bool:
        return self.reference() is not None  # its Python object lives as long as the memory (`outlives`)

    @staticmethod
    def behind(values: Iterable[Any]) -> list[Storage | None]:
        """The storage behind each of ``values``, None where that is no tensor, or one without memory."""
        return [
            Storage.of(value.untyped_storage())
            if isinstance(value, torch.Tensor) and type(value) is not Shell
            else None
            for value in values
        ]

    @staticmethod
    def of(storage: torch.UntypedStorage) -> Storage:
        return Storage(weakref.ref(storage), storage.nbytes(), storage.data_ptr())


@dataclass(slots=True, eq=False)
class LiveForward:
    """One run of a forward graph.

    ``family`` as of its `Executor`; ``call`` numbers the calls of the model; ``backwards`` are those that have run it.
    ``saved`` is what it made for backward only, ``given`` what it gave out, ``handed`` all that backward takes of both
    and of its inputs, but for what is away in ``copies``.
    """

    family: object
    call: int
    nbytes: int
    saved: list[Storage]
    given: list[Storage]
    handed: list[Storage]
    copies: SavedCopies | None = None
    backwards: set[int] = field(default_factory=set)

    def is_alive(self) -> bool:
        """Whether it holds device memory for a backward."""
        if self.copies is not None and self.copies.is_alive():
            return True
        if self.saved:
            return any(storage.is_alive() for storage in self.saved)
        return not self.backwards and any(storage.is_alive() for storage in self.given)

    def is_of(self, addresses: Collection[int], storages: Set[int]) -> bool:
        """Whether a backward that takes ``addresses``, of ``storages``, takes all that was handed to it."""
        away = set[int]() if self.copies is None else self.copies.storages()
        if away:
            return away <= storages
        return bool(self.handed) and all(s.address in addresses and s.is_alive() for s in self.handed)


class LiveForwards:
    """The forwards of one model that are alive, oldest first."""

    def __init__(self) -> None:
        self._forwards: list[LiveForward] = []

    def add(
        self, family: object, call: int, held: Held, outputs: Sequence[Storage | None], inputs: Collection[int]
    ) -> None:
        """A graph has run forward in ``call``; memory at the addresses ``inputs`` is its caller's."""
        is_saved = frozenset(held.saved)
        sized = [(i, s) for i, s in enumerate(outputs) if s is not None and s.nbytes and s.address]
        given = [storage for i, storage in sized if i not in is_saved and storage.address not in inputs]
        handed = [storage for i, storage in sized if i in is_saved]
        of_caller = {*inputs, *(storage.address for storage in given)}
        saved = [storage for storage in handed if storage.address not in of_caller]
        self._forwards.append(LiveForward(family, call, held.saved_nbytes, saved, given, handed))
        gone = [f for f in self._forwards if not f.is_alive()]
        left = {id(f) for f in gone if f.backwards} | {id(f) for f in gone[:-MAX_REMEMBERED]}
        self._forwards = [f for f in self._forwards if id(f) not in left]

    def keep(self, copies: SavedCopies | None) -> None:
        """The newest forward has ``copies`` of what it saved; their bytes are none of the device's."""
        if copies is not None and self._forwards:
            self._forwards[-1].copies = copies
            self._forwards[-1].nbytes -= copies.away_nbytes

    @contextmanager
    def returned(self, forward: LiveForward | None, moved: Set[int]) -> Iterator[SavedCopies | None]:
        """Within the block the backward of ``forward`` brings ``moved`` back, from the copies given, if any."""
        if forward is None or forward.copies is None:
            yield None
            return
        with forward.copies.returned(moved):
            yield forward.copies

    def away_nbytes(self, family: object) -> int:
        """Bytes that live forwards of ``family`` take of the device when all that they saved is back."""
        copies = [f.copies for f in self._forwards if f.family is family and f.copies is not None]
        return sum(one.away_nbytes for one in copies if one.is_alive())

    def bring_home(self, family: object) -> None:
        """Bring back for good what is away of live forwards of ``family``, and count it as theirs."""
        for forward in self._forwards:
            if forward.family is family and forward.copies is not None:
                home = [Storage.of(storage) for storage in forward.copies.bring_home()]
                forward.saved, forward.handed = [*forward.saved, *home], [*forward.handed, *home]
                forward.nbytes += sum(storage.nbytes for storage in home)

    def nbytes(self, other_than: LiveForward | None = None) -> int:
        """Bytes that forwards hold, but for one of them."""
        return sum(f.nbytes for f in self._forwards if f is not other_than and f.is_alive())

    def find(self, family: object, args: Sequence[Any]) -> LiveForward | None:
        """The forward whose backward takes ``args``; where nothing tells, the newest that is alive and waits."""
        own = [forward for forward in reversed(self._forwards) if forward.family is family]
        if len(own) <= 1:
            return own[0] if own else None
        taken = [value.untyped_storage() for value in args if isinstance(value, torch.Tensor)]
        addresses, storages = {s.data_ptr() for s in taken}, {s._cdata for s in taken}
        fitting = [forward for forward in own if forward.is_of(addresses, storages)] or own
        waiting = [forward for forward in fitting if not forward.backwards]
        return next((forward for forward in waiting if forward.is_alive()), (waiting or fitting)[0])

    def clear(self) -> None:
        self._forwards.clear()


class Accounting:
    """Reservation and readings of one model on its device.

    Attributes:
        held_nbytes: bytes alive before the latest forward from earlier ones, which a reading does not see.
        measured_peak_nbytes: arena plus the highest non-model bytes from the latest forward to its backward's end.
        num_asked_syncs: waits for the device on behalf of somebody who asked to see a value.
        copies: host memory for saved values that are away.
    """

    def __init__(self, device: Device) -> None:
        self.held_nbytes = 0
        self.measured_peak_nbytes = 0
        self.evaluation_peak_nbytes = 0
        self.num_evaluations = 0
        self._is_training = False
        self.num_asked_syncs = 0
        self.copies = CopyPool(device)
        self._device = device
        self._reserved_nbytes = 0
        self._warned_nbytes = 0
        self._outputs: list[Storage] = []
        self._inputs: list[Storage] = []

    def start(self, held_nbytes: int, inputs: Sequence[Any] = ()) -> None:
        """A forward begins; ``held_nbytes`` are bytes of those of its ``inputs`` that are no parameters."""
        self._is_training = True
        self._inputs = [storage for storage in Storage.behind(inputs) if storage is not None]
        self._read_from_here(held_nbytes)

    def start_evaluation(self, held_nbytes: int) -> None:
        """A forward without gradients begins; before a backward it is part of that reading."""
        if not self._is_training:
            self._read_from_here(held_nbytes)

    def _read_from_here(self, held_nbytes: int) -> None:
        self._device.start_reading()
        inputs = self.input_addresses()
        self._outputs = [storage for storage in self._outputs if storage.is_alive()]
        self.held_nbytes = held_nbytes + sum(s.nbytes for s in self._outputs if s.address not in inputs)

    def input_addresses(self) -> set[int]:
        """Where inputs of the latest forward stand that are still alive."""
        return {storage.address for storage in self._inputs if storage.is_alive()}

    def end_forward(self, layout: Layout | None, outputs: Sequence[Storage | None], *, is_first: bool) -> None:
        """A forward gave ``outputs``, which may be held when the next ones begin; after the first of a
        graph, host memory that torch takes to make its backward does not count."""
        self.measured_peak_nbytes = self._peak_nbytes(layout)
        self._keep(outputs)
        if is_first:
            self._device.pause_reading()

    def end_evaluation(self, layout: Layout | None, outputs: Sequence[Any]) -> None:
        """A forward without gradients gave ``outputs``, which the user may hold beside those of training."""
        self.num_evaluations += 1
        if not self._is_training:
            self.evaluation_peak_nbytes = self._peak_nbytes(layout)
        self._keep(Storage.behind(outputs))

    def _keep(self, outputs: Sequence[Storage | None]) -> None:
        """Count ``outputs`` as held from now on, but for inputs, which come back where backward needs them."""
        known = {*self.input_addresses(), *(storage.address for storage in self._outputs if storage.is_alive())}
        for storage in outputs:
            if storage is not None and storage.address not in known:
                known.add(storage.address)
                self._outputs.append(storage)

    def begin_backward(self) -> None:
        """A backward begins; what its caller holds counts, also if the first piece of its work lets go of it."""
        self._device.resume_reading()
        self._device.sample_nonmodel()

    def end_backward(self, layout: Layout | None) -> None:
        self._is_training = False
        self.measured_peak_nbytes = self._peak_nbytes(layout)

    def _peak_nbytes(self, layout: Layout | None) -> int:
        arena = 0 if layout is None else layout.arena_nbytes
        peak_nbytes = arena + self.held_nbytes + self._device.read_nonmodel_nbytes()
        if layout is not None and peak_nbytes > max(self._reserved_nbytes, self._warned_nbytes):
            self._warn_above_budget(peak_nbytes)
        return peak_nbytes

    def _warn_above_budget(self, peak_nbytes: int) -> None:
        """Say that more was taken than the model may take; again when it is more than was said."""
        budget_nbytes = self._device.free_device_nbytes() + self._reserved_nbytes
        if peak_nbytes > budget_nbytes + self._device.reading_error_nbytes:
            self._warned_nbytes = peak_nbytes + peak_nbytes // 8
            logger.warning(
                "%d bytes of device memory were in use, %d more than the budget of %d. Tensors that the script holds "
                "beside the model count too: let go of outputs and inputs before the next forward, or name less "
                "memory in hw (reserve=<bytes>), so that the plan leaves room for them",
                *(peak_nbytes, peak_nbytes - budget_nbytes, budget_nbytes),
            )

    def num_unasked_syncs(self) -> int:
        """How often the host has waited for the device without anyone having asked to see a value."""
        return self._device.num_host_syncs() - self.num_asked_syncs

    def reserve(self, nbytes: int) -> None:
        """Make the model's device reservation at least ``nbytes``."""
        if nbytes > self._reserved_nbytes:
            self._device.reserve(nbytes - self._reserved_nbytes)
            self._reserved_nbytes = nbytes

    def can_reserve(self, nbytes: int) -> bool:
        """Whether the device has room for a reservation of ``nbytes`` in place of the model's own."""
        return nbytes - self._reserved_nbytes <= self._device.free_device_nbytes()

    def close(self) -> None:
        """Give the reservation and the copies back."""
        self.copies.close()
        self._device.unreserve(self._reserved_nbytes)
        self._reserved_nbytes = 0

    def others_nbytes(self, layout: Layout | None) -> dict[Tier, int]:
        """Bytes of the device's budgets that other models hold."""
        device, own_nbytes = self._device, self.copies.nbytes + (0 if layout is None else layout.nbytes_in(Tier.HOST))
        return {
            Tier.DEVICE: device.device_budget_nbytes - device.free_device_nbytes() - self._reserved_nbytes,
            Tier.HOST: device.host_budget_nbytes - device.free_host_nbytes() - own_nbytes,
        }
