"""Reservation of one model on a device that others may share, and what was measured of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from chunkc._torch_compat.core import outlives
from chunkc.ir.layout import Layout
from chunkc.ir.tiers import Tier
from chunkc.runtime.devices.protocol import Device


class Accounting:
    """Reservation and readings of one model on its device.

    Attributes:
        held_nbytes: bytes alive before the latest forward from the one before, which a reading does not see.
        measured_peak_nbytes: arena plus the highest non-model bytes from the latest forward to its backward's end.
        num_asked_syncs: waits for the device on behalf of somebody who asked to see a value.
    """

    def __init__(self, device: Device) -> None:
        self.held_nbytes = 0
        self.measured_peak_nbytes = 0
        self.evaluation_peak_nbytes = 0
        self.num_evaluations = 0
        self._is_training = False
        self.num_asked_syncs = 0
        self._device = device
        self._reserved_nbytes = 0
        self._outputs: list[tuple[Callable[[], bool], int]] = []
        self._inputs: list[tuple[Callable[[], bool], int]] = []

    def start(self, held_nbytes: int, inputs: Sequence[Any] = ()) -> None:
        """A forward begins; ``held_nbytes`` are bytes of those of its ``inputs`` that are no parameters."""
        self._is_training = True
        self._inputs = [(is_alive, address) for is_alive, _, address in _storages(inputs)]
        self._read_from_here(held_nbytes)

    def start_evaluation(self, held_nbytes: int) -> None:
        """A forward without gradients begins; before a backward it is part of that reading."""
        if not self._is_training:
            self._read_from_here(held_nbytes)

    def _read_from_here(self, held_nbytes: int) -> None:
        self._device.start_reading()
        self.held_nbytes = held_nbytes + sum(nbytes for is_alive, nbytes in self._outputs if is_alive())

    def end_forward(self, layout: Layout | None, outputs: Sequence[Any], *, is_first: bool) -> None:
        """A forward gave ``outputs``, which the user may hold when the next begins; after the first of a
        graph, host memory that torch takes to make its backward does not count."""
        self.measured_peak_nbytes = self._peak_nbytes(layout)
        inputs = {address for is_alive, address in self._inputs if is_alive()}  # saved for backward, they come back
        self._outputs = [(alive, nbytes) for alive, nbytes, address in _storages(outputs) if address not in inputs]
        if is_first:
            self._device.pause_reading()

    def end_evaluation(self, layout: Layout | None, outputs: Sequence[Any]) -> None:
        """A forward without gradients gave ``outputs``, which the user may hold beside those of training."""
        self.num_evaluations += 1
        if not self._is_training:
            self.evaluation_peak_nbytes = self._peak_nbytes(layout)
        self._outputs = [pair for pair in self._outputs if pair[0]()] + [pair[:2] for pair in _storages(outputs)]

    def begin_backward(self) -> None:
        """A backward begins; what its caller holds counts, also if the first piece of its work lets go of it."""
        self._device.resume_reading()
        self._device.sample_nonmodel()

    def end_backward(self, layout: Layout | None) -> None:
        self._is_training = False
        self.measured_peak_nbytes = self._peak_nbytes(layout)

    def _peak_nbytes(self, layout: Layout | None) -> int:
        arena = 0 if layout is None else layout.arena_nbytes
        return arena + self.held_nbytes + self._device.read_nonmodel_nbytes()

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

    def unreserve(self) -> None:
        self._device.unreserve(self._reserved_nbytes)
        self._reserved_nbytes = 0

    def others_nbytes(self, layout: Layout | None) -> dict[Tier, int]:
        """Bytes of the device's budgets that other models hold."""
        device, own_nbytes = self._device, 0 if layout is None else layout.nbytes_in(Tier.HOST)
        return {
            Tier.DEVICE: device.device_budget_nbytes - device.free_device_nbytes() - self._reserved_nbytes,
            Tier.HOST: device.host_budget_nbytes - device.free_host_nbytes() - own_nbytes,
        }


def _storages(values: Sequence[Any]) -> list[tuple[Callable[[], bool], int, int]]:
    """Of every storage behind ``values``: whether it is still alive, its bytes, and its address."""
    storages = {v.untyped_storage().data_ptr(): v.untyped_storage() for v in values if isinstance(v, torch.Tensor)}
    return [(outlives(storage), storage.nbytes(), address) for address, storage in storages.items()]
