"""Host copies of saved values that are away from the device between forward and backward.

Autograd keeps the tensors that a forward saves; a value that is away keeps its tensors and gives up the memory behind
them, which comes back, elsewhere, before backward reads it.

    hold        forward has made the value: its storages are noted, not kept alive
    offload     their bytes are copied to pinned memory, whatever dtype or view they have
    discard     the storages are of 0 bytes
    allocate    they have bytes again
    reload      the bytes are those of the copy

One forward that waits for its backward takes one buffer, and gives it back when nothing of what it saved is alive. When
a backward has ended and autograd still holds what it read (``retain_graph=True``), values go away again: another
backward finds them as their forward has left them.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from chunkc.errors import BudgetError
from chunkc.ir.plan import MovedValue, Plan
from chunkc.runtime.devices.protocol import Device

logger = logging.getLogger("chunkc")


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """All of a storage as uint8 elements, whatever tensors see in it."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@dataclass(slots=True)
class _Copy:
    """The copy of one storage.

    ``identity`` tells storages that are alive apart. ``is_away``: the storage has no bytes. ``returned``: it has had
    them back since it was away last.
    """

    storage: weakref.ref[torch.UntypedStorage]
    identity: int
    nbytes: int
    region: torch.Tensor
    is_away: bool = False
    returned: bool = False


class SavedCopies:
    """The copies of one forward's moved values; ``kept``: those that could not leave the device."""

    def __init__(self, device: Device, buffer: torch.Tensor, moves: Sequence[MovedValue]) -> None:
        self._device = device
        self._copies: dict[int, list[_Copy]] = {}
        self._regions: dict[int, torch.Tensor] = {}
        self.kept: list[MovedValue] = []
        self._moves = {value.index: value for value in moves}
        start = 0
        for value in moves:
            self._regions[value.index] = buffer[start : start + value.nbytes]
            start += value.nbytes

    def hold(self, made: Sequence[object], saved: Mapping[int, Collection[int]]) -> None:
        """Note the storages behind values that a segment has made: by value, positions among its results.

        A value stays on the device where its storages are not what was planned: a compiler may have made it within a
        larger buffer, or given out the same memory twice.
        """
        storages = [value.untyped_storage() if isinstance(value, torch.Tensor) else None for value in made]
        num_tensors = Counter(storage._cdata for storage in storages if storage is not None)
        for index, positions in saved.items():
            own = [storage for storage in (storages[i] for i in positions) if storage is not None]
            num_own = Counter(storage._cdata for storage in own)
            is_shared = any(num_tensors[identity] != num for identity, num in num_own.items())
            self._hold(index, {storage._cdata: storage for storage in own}, is_shared=is_shared)

    def _hold(self, index: int, storages: Mapping[int, torch.UntypedStorage], *, is_shared: bool) -> None:
        region, start, copies = self._regions[index], 0, list[_Copy]()
        is_planned = sum(s.nbytes() for s in storages.values()) == len(region) and not is_shared
        if not is_planned or not all(s.resizable() for s in storages.values()):
            self.kept.append(self._moves[index])
            return
        for identity, storage in storages.items():
            nbytes = storage.nbytes()
            part = region if nbytes == len(region) else region[start : start + nbytes]
            copies.append(_Copy(weakref.ref(storage), identity, nbytes, part))
            start += nbytes
        self._copies[index] = copies

    def offload(self, index: int) -> int:
        """Copy a value to the host; return how many bytes that are."""
        nbytes = 0
        for copy in self._copies.get(index, ()):
            storage = copy.storage()
            if storage is not None:  # else its forward has failed
                copy.region.copy_(bytes_of(storage), non_blocking=True)
                nbytes += copy.nbytes
        return nbytes

    def discard(self, index: int) -> None:
        """Give up the device memory of a value whose copy is complete."""
        for copy in self._copies.get(index, ()):
            self._free(copy)

    def _free(self, copy: _Copy) -> None:
        storage = copy.storage()
        if storage is not None and storage.nbytes():
            self._device.freed(storage)
            storage.resize_(0)
        copy.is_away, copy.returned = True, False

    def allocate(self, index: int) -> None:
        """Give a value that is away device memory, with nothing in it."""
        for copy in self._copies.get(index, ()):
            storage = copy.storage()
            if storage is not None and copy.is_away:
                storage.resize_(copy.nbytes)
                self._device.freed(storage)
                copy.is_away, copy.returned = False, True

    def reload(self, index: int) -> int:
        """Copy a value back into the memory that it was given; return how many bytes that are."""
        nbytes = 0
        for copy in self._copies.get(index, ()):
            storage = copy.storage()
            if storage is not None and copy.returned:
                bytes_of(storage).copy_(copy.region, non_blocking=True)
                nbytes += copy.nbytes
        return nbytes

    @contextmanager
    def returned(self, moved: Collection[int] = ()) -> Iterator[None]:
        """Run a backward within the block that brings ``moved`` back; all other values come back now."""
        self.end_backward()
        for index in self._copies.keys() - moved:
            self.allocate(index)
            self.reload(index)
            self._copies.pop(index)
        try:
            yield
        finally:
            self.end_backward()

    def bring_home(self) -> list[torch.UntypedStorage]:
        """Bring back all values that are away, for good; return the storages that have bytes again."""
        self.end_backward()
        away = [copy.storage() for copies in self._copies.values() for copy in copies if copy.is_away]
        with self.returned():
            return [storage for storage in away if storage is not None]

    def end_backward(self) -> None:
        """Let what came back go again, where somebody still holds it; its copy is as good as before."""
        for copy in (copy for copies in self._copies.values() for copy in copies):
            if copy.returned:
                self._free(copy)

    @property
    def away_nbytes(self) -> int:
        """Bytes that the device does not hold now."""
        return sum(copy.nbytes for copies in self._copies.values() for copy in copies if copy.is_away)

    def is_alive(self) -> bool:
        """Whether somebody holds a value that has its only elements here, or may."""
        return any(copy.storage() is not None for copies in self._copies.values() for copy in copies)

    def storages(self) -> set[int]:
        """Identities of the storages that are away."""
        return {c.identity for copies in self._copies.values() for c in copies if c.is_away}


@dataclass(slots=True)
class _Buffer:
    """Pinned memory, and the copies that it holds, if any."""

    memory: torch.Tensor
    holder: SavedCopies | None = None

    @property
    def is_free(self) -> bool:
        return self.holder is None or not self.holder.is_alive()


@dataclass(slots=True)
class CopyPool:
    """The buffers of one model, within the host budget of its device."""

    device: Device
    _buffers: list[_Buffer] = field(default_factory=list)
    _has_said: bool = False

    @property
    def nbytes(self) -> int:
        return sum(len(buffer.memory) for buffer in self._buffers)

    def prepare(self, plan: Plan) -> None:
        """Have a buffer for each forward of ``plan`` in flight; BudgetError where there is no room."""
        if plan.moves:
            num_fitting = sum(len(buffer.memory) >= plan.copies_nbytes for buffer in self._buffers)
            for _ in range(plan.in_flight - num_fitting):
                self._add(plan)

    def begin(self, plan: Plan) -> SavedCopies | None:
        """The copies of a forward of ``plan`` that begins; None where nothing moves.

        Raises:
            BudgetError: when forwards that wait for their backward hold too much of the host's budget.
        """
        if not plan.moves:
            return None
        for latest in (buffer.holder for buffer in self._buffers if buffer.holder is not None):
            self._note_kept(latest)
        buffer = self._take(plan)
        buffer.holder = SavedCopies(self.device, buffer.memory, plan.moves)
        return buffer.holder

    def _note_kept(self, copies: SavedCopies) -> None:
        """Say once that values could not leave the device although the plan counts on it."""
        if copies.kept and not self._has_said:
            self._has_said = True
            nbytes = sum(value.nbytes for value in copies.kept)
            logger.warning(
                "%d saved values stay on the device, %d bytes more than planned: their compiled segments make them "
                "within larger buffers (activations='keep' or 'recompute' plans without moves)",
                *(len(copies.kept), nbytes),
            )

    def _take(self, plan: Plan) -> _Buffer:
        needed_nbytes = plan.copies_nbytes
        free = [b for b in self._buffers if b.is_free and len(b.memory) >= needed_nbytes]
        return min(free, key=lambda b: len(b.memory)) if free else self._add(plan)

    def _add(self, plan: Plan) -> _Buffer:
        """A further buffer for one forward of ``plan``."""
        needed_nbytes = plan.copies_nbytes
        self._make_room(needed_nbytes)
        missing_nbytes = needed_nbytes - self.device.free_host_nbytes()
        if missing_nbytes > 0:
            raise self._refusal(plan, missing_nbytes)
        buffer = _Buffer(self.device.allocate_home(needed_nbytes))
        self._buffers.append(buffer)
        return buffer

    def _make_room(self, nbytes: int) -> None:
        """Give buffers back that nothing needs, if ``nbytes`` are not free."""
        unused = [b for b in self._buffers if b.is_free]
        if unused and self.device.free_host_nbytes() < nbytes:
            self.device.synchronize()
            for buffer in unused:
                self._buffers.remove(buffer)
                self.device.free_home(buffer.memory)

    def _refusal(self, plan: Plan, missing_nbytes: int) -> BudgetError:
        num_waiting = sum(1 for b in self._buffers if not b.is_free)
        budget_nbytes = self.device.host_budget_nbytes
        return BudgetError(
            f"{plan.model} cannot run forward now: {num_waiting} forwards wait for their backward, with "
            f"{self.nbytes} bytes of activations in host memory, and this one would take {plan.copies_nbytes} more, "
            f"{missing_nbytes} more than {plan.hw} has left of {budget_nbytes} bytes. Run their backward or let go of "
            "their outputs first, or keep activations on the device (activations='keep' or 'recompute')",
            moment="forward",
            tensors=(),
            missing_nbytes=missing_nbytes,
            min_device_nbytes=plan.memory.device_budget_nbytes,
            min_host_nbytes=budget_nbytes + missing_nbytes,
        )

    def close(self) -> None:
        """Give all memory back."""
        for buffer in self._buffers:
            buffer.holder = None
            self.device.free_home(buffer.memory)
        self._buffers.clear()
