"""Reading and writing whole parameters, gradients and states in chunks, wherever a layout keeps them.

param32 is valid at every moment, so a trained parameter is read from it; the payload may hold a gradient. The caller
has drained the device. Where ranks share the chunks, all read and write together: what is read is put together in host
memory, from the first replica; of what is written each rank keeps its own part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch

from chunkc.distributed.process_group import Ranks
from chunkc.errors import ChunkcError
from chunkc.ir.layout import Chunk, ChunkList, Layout
from chunkc.ir.state_spec import MASTER
from chunkc.runtime.devices.host_slab import FreedPages
from chunkc.runtime.storage.chunk_store import ChunkStates, ChunkStore
from chunkc.runtime.storage.snapshot import Part, Snapshot, SnapshotReader
from chunkc.runtime.storage.staging import StagingStore
from chunkc.runtime.update.block_quantisation import read_list, write_list
from chunkc.runtime.update.loss_scale import multiply

Flats = Sequence[torch.Tensor]
Read = Callable[[Chunk, Part], torch.Tensor]
"""The values of a part of a parameter."""


class ChunkValues:
    """Whole-tensor access to a chunk store between programs."""

    def __init__(self, store: ChunkStore, static_slots: dict[str, int], ranks: Ranks | None = None) -> None:
        """Bind a store to ``static_slots``, of payloads (``c3``) and OS (``os3``) homed on the device."""
        self.store = store
        self._ranks = ranks or Ranks()
        self._layout: Layout = store.layout
        self._static = static_slots
        self._grad_chunks = store.layout.grad_chunks()

    def load(self, staging: StagingStore) -> None:
        """Move what is left in ``staging`` into chunks, one parameter at a time; an interrupted move resumes.

        Parameters move in the order of the chunks, so that homes take their pages as fast as ``staging`` lets go of its
        own. Raises `HardwareError` when homes cannot be pinned; all parameters stand in their chunks then.
        """
        freed = FreedPages()
        for index in sorted(filter(staging.holds, range(len(self._layout.params))), key=self._first_element):
            exact, state = staging.exact(index), staging.state(index, self._layout.state_spec.names)
            self.store.touch(index)
            self.write_param(index, exact, payload=True)
            if state is not None and self.is_trained(index):
                self.write_states(index, state.lists)
            nbytes = exact.nbytes
            staging.forget(index)
            del exact, state
            freed.add(nbytes)
        self.store.pin()

    def leave(self) -> None:
        """Move all chunks aside, into host memory of their own: arena and homes are given back.

        No snapshot is read. One that was interrupted goes on.
        """
        for chunk in self._layout.owned():
            if chunk.list is ChunkList.TRAINED:
                self.store.set_aside(chunk, None, self._states(chunk))
            elif chunk.list is not ChunkList.GRAD:
                self.store.set_aside(chunk, self._payload(chunk), {})
        self.store.close()

    def take(self, left: ChunkValues) -> None:
        """Move the values that `leave` has set aside into these chunks; all ranks together.

        Parameters move in the order of the new chunks.
        """
        freed, num_left = FreedPages(), Counter(c for p in left._layout.placements for c in p.chunks)
        for index in sorted(range(len(self._layout.params)), key=self._first_element):
            self.store.touch(index)
            self.write_param(index, left.read_param(index), payload=True)
            if self.is_trained(index) and left.is_trained(index):
                names = self._layout.state_spec.names
                self.write_states(index, {name: left.read_state(index, name) for name in names})
            for chunk in left._layout.placements[index].chunks:
                num_left[chunk] -= 1
                if not num_left[chunk]:
                    freed.add(left.store.let_go(chunk))

    def _first_element(self, index: int) -> tuple[int, int]:
        placement = self._layout.placements[index]
        return placement.chunk, placement.offset

    def is_trained(self, index: int) -> bool:
        return self._chunk_of(index).list is ChunkList.TRAINED

    def read_param(self, index: int) -> torch.Tensor:
        """A copy of the parameter's most precise value: fp32 where there is a master."""
        if self.is_trained(index):
            return self._whole(index, partial(self._read_state, 0), torch.float32)
        return self._whole(index, self._payload_part)

    def write_param(self, index: int, value: torch.Tensor, *, payload: bool) -> None:
        """Replace the parameter; ``payload`` False leaves param16 alone because a gradient stands there."""
        self._before_write(index)
        if self.is_trained(index):
            self._scatter_state(index, 0, value)
        if (payload and not self.store.is_aside) or not self.is_trained(index):
            self._scatter(index, self._payload_part, value)

    def restore_payload(self, index: int) -> None:
        """Write param16 of a trained parameter from its param32, over a gradient: each rank its own part."""
        self.store.drop_begun()
        for chunk, part in self._own_parts(index):
            self._payload(chunk)[part.in_chunk].copy_(self._states(chunk)[MASTER][part.in_chunk])

    def read_gradient(self, index: int) -> torch.Tensor:
        """A copy of the gradient in the payload or in the gradient chunk beside it."""
        return self._whole(index, self._gradient_part)

    def multiply_gradient(self, index: int, factor: torch.Tensor) -> None:
        """Multiply the gradient in chunks by ``factor``, float32 []: each rank its own part."""
        self.store.drop_begun()
        for chunk, part in self._own_parts(index):
            gradient = self._gradient_part(chunk, part)
            multiply(gradient, factor.to(gradient.device))

    def write_gradient(self, index: int, value: torch.Tensor) -> None:
        self.store.drop_begun()
        self._scatter(index, self._gradient_part, value)

    def read_state(self, index: int, name: str) -> torch.Tensor:
        """A float32 copy of an optimizer state or ``param32``; states of none trained raise."""
        if name == MASTER:
            return self.read_param(index).float()
        self._check_kept([name])
        if not self.is_trained(index):
            raise ChunkcError(
                f"an optimizer state of {self._layout.params[index].name} was loaded before the first forward, which "
                "does not train the parameter, so that the state was not kept: delete it from `optimizer.state`, and "
                "leave it out when states are loaded"
            )
        position = 1 + self._layout.state_spec.names.index(name)
        return self._whole(index, partial(self._read_state, position), torch.float32)

    def write_states(self, index: int, states: Mapping[str, torch.Tensor]) -> None:
        """Replace a parameter's optimizer states; those not given are zero; ChunkcError for one without room."""
        self._check_kept(states)
        self._before_write(index)
        for position, name in enumerate(self._layout.state_spec.names, 1):
            self._scatter_state(index, position, states.get(name))

    def _check_kept(self, names: Iterable[str]) -> None:
        spec = self._layout.state_spec
        unknown = [name for name in names if name not in spec.names]
        if unknown:
            raise ChunkcError(f"the plan has room for {spec}, and none for {', '.join(unknown)} of another optimizer")

    def write_own(self, index: int, value: Flats, states: Mapping[str, Flats] | None, *, payload: bool) -> None:
        """Replace this rank's elements of a parameter and its states: a 1-D tensor for each run of parts.

        States not given become zero; None keeps them all.
        """
        self._before_write(index)
        is_trained = self.is_trained(index)
        payload = payload and not self.store.is_aside
        replaced: list[Flats | None] = [value]
        if states is not None:
            replaced += [states.get(name) for name in self._layout.state_spec.names]
        for position, run in enumerate(self.store.own_runs(index)):
            for part in run:
                chunk = self._layout.chunks[part.chunk]
                first = part.first - run[0].first
                taken = slice(first, first + part.end - part.start)
                if is_trained:
                    for state, flats in enumerate(replaced):
                        self._write_state(state, chunk, part, None if flats is None else flats[position][taken])
                if payload or not is_trained:
                    self._payload(chunk)[part.in_chunk].copy_(value[position][taken])

    def snapshot(self, indexes: Iterable[int], max_copied_nbytes: int) -> SnapshotReader:
        """Begin a snapshot of parameters ``indexes`` and their states, to be read while training goes on.

        It is of what this rank has of them. Updates may wait until all of these are read. An earlier snapshot ends.
        ``end_snapshot`` of the store must follow the last read.
        """
        used = {part.chunk for index in indexes for part in self.store.parts(index)}
        live = partial(self._masters, side=self.store.side)
        snapshot = Snapshot(live, {c for c in used if self.store.is_own(c)}, max_copied_nbytes)
        self.store.begin_snapshot(snapshot)
        return SnapshotReader(snapshot, self.store.own_runs, partial(read_list, self._layout.state_spec))

    def _masters(self, chunk: int, side: int) -> tuple[torch.Tensor, ...]:
        """Tensors of a chunk's values: param32 and states, or the payload of an untrained chunk."""
        info = self._layout.chunks[chunk]
        if info.list is not ChunkList.TRAINED:
            return (self._payload(info),)
        states = self.store.states_home(info, side) if info.has_second_home else self._states(info)
        return tuple(states.values())

    def _before_write(self, index: int) -> None:
        self.store.drop_begun()
        for chunk, _ in self._own_parts(index):
            self.store.before_write(chunk.index)

    def _own_parts(self, index: int) -> Iterator[tuple[Chunk, Part]]:
        for part in self.store.parts(index):
            if self.store.is_own(part.chunk):
                yield self._layout.chunks[part.chunk], part

    def _chunk_of(self, index: int) -> Chunk:
        return self._layout.chunks[self._layout.placements[index].chunk]

    def _payload(self, chunk: Chunk) -> torch.Tensor:
        if chunk.is_resident:
            return self.store.payload_slot(chunk, self._static[f"c{chunk.index}"])
        return self.store.payload_home(chunk)

    def _payload_part(self, chunk: Chunk, part: Part) -> torch.Tensor:
        return self._payload(chunk)[part.in_chunk]

    def _gradient_part(self, chunk: Chunk, part: Part) -> torch.Tensor:
        grad_chunk = self._grad_chunks.get(chunk.index)
        return self._payload_part(chunk if grad_chunk is None else self._layout.chunks[grad_chunk], part)

    def _read_state(self, position: int, chunk: Chunk, part: Part) -> torch.Tensor:
        lists = tuple(self._states(chunk).values())
        return read_list(self._layout.state_spec, lists, position, part.start, part.end)

    def _write_state(self, position: int, chunk: Chunk, part: Part, value: torch.Tensor | None) -> None:
        lists = tuple(self._states(chunk).values())
        write_list(self._layout.state_spec, lists, position, part.start, part.end, value)

    def _states(self, chunk: Chunk) -> ChunkStates:
        if chunk.has_resident_os:
            return self.store.states_slot(chunk, self._static[f"os{chunk.index}"])
        return self.store.states_home(chunk)

    def _gather(self, index: int, of: Read) -> torch.Tensor:
        info, parts = self._layout.params[index], self.store.parts(index)
        ranges = [of(self._layout.chunks[part.chunk], part) for part in parts]
        dtype = ranges[0].dtype if ranges else getattr(torch, info.dtype)
        device = ranges[0].device if ranges else torch.device("cpu")
        value = torch.empty_strided(info.shape, info.stride, dtype=dtype, device=device)
        for part, elements in zip(parts, ranges, strict=True):
            _flat(value)[part.in_param].copy_(elements)
        return value

    def _whole(self, index: int, of: Read, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A parameter-shaped copy of ``of`` its chunks, which are in ``dtype`` or the parameter's own."""
        if self._ranks.size == 1:
            return self._gather(index, of)
        info = self._layout.params[index]
        value_dtype = getattr(torch, info.dtype) if dtype is None else dtype
        value = torch.empty_strided(info.shape, info.stride, dtype=value_dtype, device="cpu")
        flat = _flat(value.zero_())
        if self._ranks.replica == 0:
            for chunk, part in self._own_parts(index):
                flat[part.in_param].copy_(of(chunk, part))
        owners = {self._layout.owner(part.chunk) for part in self.store.parts(index)}
        if len(owners) == 1:
            self._ranks.broadcast(flat, owners.pop())
        else:
            self._ranks.combine(flat)
        return value

    def _scatter(self, index: int, of: Read, value: torch.Tensor) -> None:
        flat = self._flat_of(index, value)
        for chunk, part in self._own_parts(index):
            of(chunk, part).copy_(flat[part.in_param])

    def _scatter_state(self, index: int, position: int, value: torch.Tensor | None) -> None:
        flat = None if value is None else self._flat_of(index, value)
        for chunk, part in self._own_parts(index):
            self._write_state(position, chunk, part, None if flat is None else flat[part.in_param])

    def _flat_of(self, index: int, value: torch.Tensor) -> torch.Tensor:
        info, dense = self._layout.params[index], value
        if value.stride() != info.stride:
            dense = torch.empty_strided(info.shape, info.stride, dtype=value.dtype, device=value.device).copy_(value)
        return _flat(dense.detach())


def _flat(dense: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor in the order of its memory."""
    return dense.as_strided((dense.numel(),), (1,))


def static_slots(layout: Layout, resident: Sequence[tuple[str, int]]) -> dict[str, int]:
    """Slots of the payloads and optimizer states that live on the device."""
    fixed = {f"c{c.index}" for c in layout.chunks if c.is_resident}
    fixed |= {f"os{c.index}" for c in layout.chunks if c.has_resident_os}
    return {target: slot for target, slot in resident if target in fixed}
