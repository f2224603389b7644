"""The chunk store: the memory of one model's layout, and views of parameters in it.

Payload homes stand one behind the other in one slab in chunk order, so a parameter that spans chunks is contiguous
there as in adjacent slots. Optimizer states of host-homed chunks stand in a second slab, per chunk param32 and the
lists of the layout's spec. Device memory is one arena; slots are byte ranges of it.

Second homes stand behind the homes in both slabs. Every step updates all chunks that have one, so that all change
places with their homes together: `side` says which of the two is the home.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from chunkc.ir.layout import Chunk, Layout
from chunkc.ir.schedule import DTYPE_NBYTES
from chunkc.runtime.devices.protocol import Device
from chunkc.runtime.storage.snapshot import Part, Snapshot
from chunkc.runtime.update.begun import BegunCounts, BegunStep
from chunkc.runtime.update.cpu_update import Piece

Offsets = dict[int, tuple[int, ...]]
"""Bytes into a slab where each chunk's home begins, and its second home if it has one, by chunk."""

ChunkStates = Mapping[str, torch.Tensor]
"""Views of the lists of one chunk's optimizer states by name, param32 first (`StateSpec.lists`): 1-D."""


class ChunkStore:
    """Arena and homes of one layout, from when the store is made to ``close``.

    Homes take their pages as parameters come (`touch`), and are pinned when all have come (`pin`). ``snapshot`` is of
    an earlier moment, as long as somebody reads it. What was `set_aside` is read from there, also after ``close``.

    Attributes:
        side: 0 or 1, which of the two homes of chunks with a second home holds their values.
        begun: the step that the latest backward expects, as long as nothing has changed what its updates read.
        begun_counts: what became of such steps.
    """

    def __init__(self, layout: Layout, device: Device) -> None:
        self.layout = layout
        self.snapshot: Snapshot | None = None
        self.side = 0
        self.begun: BegunStep | None = None
        self.begun_counts = BegunCounts()
        self._aside_payloads: dict[int, torch.Tensor] = {}
        self._aside_states: dict[int, ChunkStates] = {}
        self._nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._device = device
        payloads = [c for c in layout.owned() if not c.is_resident]
        with_states = [c for c in layout.owned() if c.has_os_below]
        seconds = [c for c in layout.owned() if c.has_second_home]
        self._payload_slab = self._states_slab = self._nothing
        self.arena = device.allocate_arena(layout.arena_nbytes)
        try:
            self._payload_slab = self._home(sum(c.nbytes for c in (*payloads, *seconds)))
            self._states_slab = self._home(sum(layout.os_nbytes_of(c) for c in (*with_states, *seconds)))
        except BaseException:
            self.close()
            raise
        self._payload_offsets = _offsets(payloads, seconds, lambda c: c.nbytes)
        self._states_offsets = _offsets(with_states, seconds, layout.os_nbytes_of)
        self._parts = [self._find_parts(index) for index in range(len(layout.params))]

    def _home(self, nbytes: int) -> torch.Tensor:
        return self._device.allocate_home(nbytes, is_pinned=False) if nbytes else self._nothing

    def touch(self, param: int) -> None:
        """Take the home pages of this rank's part of a parameter, before the parameter's first write."""
        for part in self._parts[param]:
            chunk = self.layout.chunks[part.chunk]
            if not self.is_own(part.chunk):
                continue
            if not chunk.is_resident:
                self._device.touch_home(self.payload_home(chunk)[part.in_chunk])
            if chunk.has_os_below:
                lists = self.layout.state_spec.lists()
                for entry, tensor in zip(lists, self.states_home(chunk).values(), strict=True):
                    self._device.touch_home(tensor[entry.entries(part.start, part.end)])

    def pin(self) -> None:
        """Pin the homes, in which all parameters stand; raises `HardwareError` when the system does not."""
        for slab in (self._payload_slab, self._states_slab):
            self._device.pin_home(slab)

    def set_aside(self, chunk: Chunk, payload: torch.Tensor | None, states: ChunkStates) -> None:
        """Copy what stands in an own chunk into host memory of its own, and give the pages of its homes back.

        Nothing where that was done before.
        """
        if chunk.index in self._aside_payloads or chunk.index in self._aside_states:
            return
        if payload is not None:
            self._aside_payloads[chunk.index] = payload.to("cpu", copy=True)
        if states:
            self._aside_states[chunk.index] = {name: state.to("cpu", copy=True) for name, state in states.items()}
        for side in (0, 1) if chunk.has_second_home else (0,):
            if not chunk.is_resident:
                self._device.discard_home(self._payload_home_bytes(chunk, side))
            if chunk.has_os_below:
                self._device.discard_home(self._states_home_bytes(chunk, side))

    @property
    def is_aside(self) -> bool:
        """Whether chunks were set aside; payloads of those with masters are gone then."""
        return bool(self._aside_payloads or self._aside_states)

    def let_go(self, chunk: int) -> int:
        """Free what was set aside of a chunk; return its bytes."""
        payload, states = self._aside_payloads.pop(chunk, None), self._aside_states.pop(chunk, {})
        return sum(t.nbytes for t in (payload, *states.values()) if t is not None)

    def close(self) -> None:
        """Give all memory back. The garbage collector may call this while torch traces: no operator runs here."""
        self.end_snapshot(self.snapshot)
        self.drop_begun()
        for slab in (self._payload_slab, self._states_slab):
            if slab.numel():
                self._device.free_home(slab)
        self._device.free_arena(self.arena)
        self.arena = self._payload_slab = self._states_slab = self._nothing

    def drop_begun(self) -> None:
        """Let the next step compute all updates by itself: what begun ones have read is about to change."""
        if self.begun is not None:
            self.begun.drop()
            self.begun = None

    def change_sides(self) -> None:
        """Let second homes and homes change places: a step was launched."""
        self.begun = None
        self.side ^= 1

    def before_write(self, chunk: int) -> None:
        """Return when no snapshot needs what stands in a chunk; to be called before its masters change."""
        snapshot = self.snapshot
        if snapshot is not None:
            snapshot.before_write(chunk)

    def begin_snapshot(self, snapshot: Snapshot) -> None:
        """Keep ``snapshot`` from now on, and give up an earlier one that nobody ended."""
        self.end_snapshot(self.snapshot)
        self.snapshot = snapshot

    def end_snapshot(self, snapshot: Snapshot | None) -> None:
        if snapshot is not None:
            snapshot.close()
        if self.snapshot is snapshot:
            self.snapshot = None

    def _find_parts(self, index: int) -> tuple[Part, ...]:
        placement = self.layout.placements[index]
        left, first, start = self.layout.params[index].numel, 0, placement.offset
        parts = []
        for chunk in placement.chunks:
            end = min(self.layout.chunks[chunk].numel, start + left)
            if end > start:
                parts.append(Part(chunk, start, end, first))
            left, first, start = left - (end - start), first + (end - start), 0
        return tuple(parts)

    def parts(self, param: int) -> tuple[Part, ...]:
        """Ranges of the elements of a parameter, in their order in memory."""
        return self._parts[param]

    def own_runs(self, param: int) -> tuple[tuple[Part, ...], ...]:
        """The parts of a parameter in this rank's chunks; those that follow each other are together."""
        runs: list[list[Part]] = []
        for part in self._parts[param]:
            if not self.is_own(part.chunk):
                continue
            if runs and runs[-1][-1].chunk == part.chunk - 1:
                runs[-1].append(part)
            else:
                runs.append([part])
        return tuple(tuple(run) for run in runs)

    def pieces(self, chunk: int) -> list[Piece]:
        """The parameters in a chunk, by offset, for the update."""
        params = self.layout.params_of(chunk)
        return [Piece(param, p.start, p.end) for param in params for p in self._parts[param] if p.chunk == chunk]

    def is_own(self, chunk: int) -> bool:
        """Whether this rank owns a chunk: it alone has a home for it."""
        return self.layout.owner(chunk) == self.layout.rank

    def payload_home(self, chunk: Chunk, side: int | None = None) -> torch.Tensor:
        """The used elements of a host-homed payload, 1-D; at home, or on ``side`` where there are two."""
        if chunk.index in self._aside_payloads:
            return self._aside_payloads[chunk.index]
        offset = self._offset(self._payload_offsets, chunk, side)
        return self._payload_slab[offset : offset + chunk.used_nbytes].view(_dtype(chunk.dtype))

    def _offset(self, offsets: Offsets, chunk: Chunk, side: int | None) -> int:
        of_chunk = offsets[chunk.index]
        return of_chunk[(self.side if side is None else side) % len(of_chunk)]

    def payload_slot(self, chunk: Chunk, slot: int) -> torch.Tensor:
        """The used elements of a payload in a slot, 1-D."""
        if chunk.index in self._aside_payloads:
            return self._aside_payloads[chunk.index]
        offset = self.layout.slots[slot].offset
        return self.arena[offset : offset + chunk.used_nbytes].view(_dtype(chunk.dtype))

    def group_in_slots(self, group: int, first_slot: int) -> torch.Tensor:
        """All elements of a group whose chunks stand one behind the other from ``first_slot`` on, 1-D."""
        chunks = [self.layout.chunks[c] for c in self.layout.groups[group].chunks]
        offset = self.layout.slots[first_slot].offset
        return self.arena[offset : offset + sum(c.nbytes for c in chunks)].view(_dtype(chunks[0].dtype))

    def slot_bytes(self, slot: int) -> torch.Tensor:
        info = self.layout.slots[slot]
        return self.arena[info.offset : info.end]

    def _payload_home_bytes(self, chunk: Chunk, side: int) -> torch.Tensor:
        offset = self._offset(self._payload_offsets, chunk, side)
        return self._payload_slab[offset : offset + chunk.nbytes]

    def _states_home_bytes(self, chunk: Chunk, side: int) -> torch.Tensor:
        offset = self._offset(self._states_offsets, chunk, side)
        return self._states_slab[offset : offset + self.layout.os_nbytes_of(chunk)]

    def states_home(self, chunk: Chunk, side: int | None = None) -> ChunkStates:
        if chunk.index in self._aside_states:
            return self._aside_states[chunk.index]
        return self._states(self._states_slab, self._offset(self._states_offsets, chunk, side), chunk)

    def states_slot(self, chunk: Chunk, slot: int) -> ChunkStates:
        if chunk.index in self._aside_states:
            return self._aside_states[chunk.index]
        return self._states(self.arena, self.layout.slots[slot].offset, chunk)

    def _states(self, memory: torch.Tensor, offset: int, chunk: Chunk) -> ChunkStates:
        states = {}
        for entry in self.layout.state_spec.lists():
            nbytes = entry.nbytes_of(chunk.used_numel)
            states[entry.name] = memory[offset : offset + nbytes].view(_dtype(entry.dtype))
            offset += entry.nbytes_of(chunk.numel)
        return states

    def param_in_slot(self, param: int, slot: int) -> torch.Tensor:
        """The parameter as the graphs read it, its first chunk standing in ``slot``."""
        info, placement = self.layout.params[param], self.layout.placements[param]
        if info.numel == 0:
            return torch.empty_strided(info.shape, info.stride, dtype=_dtype(info.dtype), device=self.arena.device)
        start = self.layout.slots[slot].offset + placement.offset * DTYPE_NBYTES[info.dtype]
        flat = self.arena[start : start + info.nbytes].view(_dtype(info.dtype))
        return flat.as_strided(info.shape, info.stride)


def _offsets(chunks: list[Chunk], seconds: list[Chunk], nbytes_of: Callable[[Chunk], int]) -> Offsets:
    """Offsets of homes that follow each other in one slab, those of second homes behind all others."""
    offsets: Offsets = {}
    end = 0
    for chunk in (*chunks, *seconds):
        offsets[chunk.index] = (*offsets.get(chunk.index, ()), end)
        end += nbytes_of(chunk)
    return offsets


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype
