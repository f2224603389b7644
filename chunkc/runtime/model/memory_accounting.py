"""Reservation of one model on a device that others may share, and what was measured of it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from chunkc.ir.layout import Layout
from chunkc.ir.tiers import Tier
from chunkc.runtime.devices.protocol import Device
from chunkc.runtime.model.live_forwards import Storage

logger = logging.getLogger("chunkc")


class Accounting:
    """Reservation and readings of one model on its device.

    Attributes:
        held_nbytes: bytes alive before the latest forward from earlier ones, which a reading does not see.
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
        self._warned_nbytes = 0
        self._outputs: list[Storage] = []
        self._inputs: list[Storage] = []

    def start(self, held_nbytes: int, inputs: Sequence[Any] = ()) -> None:
        """A forward begins; ``held_nbytes`` are bytes of those of its ``inputs`` that are no parameters."""
        self._is_training = True
        self._inputs = Storage.all_of(inputs)
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

    def end_forward(self, layout: Layout | None, outputs: Sequence[Any], *, is_first: bool) -> None:
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
        self._keep(outputs)

    def _keep(self, outputs: Sequence[Any]) -> None:
        """Count ``outputs`` as held from now on, but for inputs, which come back where backward needs them."""
        known = {*self.input_addresses(), *(storage.address for storage in self._outputs if storage.is_alive())}
        self._outputs += [storage for storage in Storage.all_of(outputs) if storage.address not in known]

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
        if layout is not None:
            self._warn_above_budget(layout, peak_nbytes)
        return peak_nbytes

    def _warn_above_budget(self, layout: Layout, peak_nbytes: int) -> None:
        """Say that more was taken than the model may take; again when it is more than was said."""
        budget_nbytes = self._device.device_budget_nbytes - self.others_nbytes(layout)[Tier.DEVICE]
        if peak_nbytes > max(budget_nbytes, self._warned_nbytes):
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
