"""Actions of a step: the updates of chunks, and the copies around updates on the device.

Updates on the device come in the order in which the next forward first uses the chunks, so that it can start before
the last update has ended; those on the host as `update_order` says. A chunk is updated where its states are: on the
host at home, on the device in its static slot or, if they are streamed, in a buffer. On the device the payload, which
holds the gradient, is fetched and goes home again. A gradient chunk is fetched instead where there is one, and the
payload's slot is opened: the update writes it whole.

Only the order within each stream matters to a GPU. But where the thread that launches also computes, what stands behind
an update is not launched until that is done: so the copies for an update are written as soon as its slots are free, and
the update not before they are wanted for another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle

from chunkc.ir.actions import Op, Stream
from chunkc.ir.layout import ChunkList, Layout
from chunkc.passes.communication import ActionEmitter, home_name, slot_name, states_name
from chunkc.passes.support.arena import buffers_of, shared_bytes, spare_slots, static_payloads, static_states
from chunkc.passes.support.draft import ActionAccess, Liveness
from chunkc.passes.support.resident_states import streamed_chunks
from chunkc.passes.support.second_homes import second_home_name
from chunkc.passes.support.update_order import by_first_use


@dataclass(frozen=True, slots=True)
class Started:
    """An update on the device whose copies in are written; states that ``moves`` go home behind it."""

    chunk: int
    payload: int
    states: int
    moves: bool
    gradient: int | None = None

    @property
    def taken(self) -> frozenset[int]:
        """The slots that it fills."""
        gradient = () if self.gradient is None else (self.gradient,)
        return frozenset((self.payload, *gradient, *((self.states,) if self.moves else ())))


@dataclass(slots=True)
class StepEmitter:
    """Writes updates on the device with their copies, as many under way as have slots of their own."""

    emitter: ActionEmitter
    shared: Mapping[int, tuple[int, ...]]
    started: deque[Started] = field(default_factory=deque)

    def begin(self, update: Started) -> None:
        """Copies in, after whatever stands in the same bytes has been updated and has left."""
        wanted = {other for slot in update.taken for other in self.shared.get(slot, (slot,))}
        while any(wanted & other.taken for other in self.started):
            self.finish()
        if update.moves:
            self.emitter.load(update.chunk, update.states)
        if update.gradient is None:
            self.emitter.fetch(update.chunk, update.payload)
        else:
            self.emitter.fetch(self.emitter.grad_chunks[update.chunk], update.gradient)
            self.emitter.open(update.chunk, update.payload)
        self.started.append(update)

    def finish(self) -> None:
        """The oldest update, and the copies home."""
        update = self.started.popleft()
        touched = [slot_name(update.payload), slot_name(update.states)]
        read = [] if update.gradient is None else [slot_name(update.gradient)]
        self.emitter.add(Op.UPDATE, f"c{update.chunk}", Stream.COMPUTE, read, touched)
        if update.gradient is not None:
            self.emitter.drop(self.emitter.grad_chunks[update.chunk])
        self.emitter.evict(update.chunk)
        if update.moves:
            self.emitter.store(update.chunk, update.states)


def on_host(layout: Layout, liveness: Liveness, share: float) -> tuple[int, ...]:
    """Chunks that the host updates, in order of first use, where ``share`` of the states is streamed."""
    elsewhere = {*static_states(layout), *_streamed(layout, liveness, share)}
    return tuple(c for c in by_first_use(layout, liveness) if c not in elsewhere)


def step_accesses(layout: Layout, liveness: Liveness, share: float, host: Sequence[int]) -> tuple[ActionAccess, ...]:
    """Write the updates of one step in a layout with its arena.

    The chunks ``host`` come first, in this order: the host has work before a device that computes on its thread.
    """
    streamed, static, payloads = _streamed(layout, liveness, share), static_states(layout), static_payloads(layout)
    next_buffer, next_slot = cycle(buffers_of(layout)), cycle(spare_slots(layout))
    step = StepEmitter(ActionEmitter(layout), shared_bytes(layout))
    grad_chunks = step.emitter.grad_chunks
    for chunk in host:
        read = [home_name(grad_chunks[chunk])] if chunk in grad_chunks else []
        written = [home_name(chunk), states_name(chunk)]
        written += [second_home_name(chunk)] if layout.chunks[chunk].has_second_home else []
        step.emitter.add(Op.UPDATE, f"c{chunk}", Stream.CPU, read, written)
    for chunk in by_first_use(layout, liveness):
        if layout.chunks[chunk].is_resident:
            touched = [slot_name(payloads[chunk]), slot_name(static[chunk])]
            read = [slot_name(payloads[grad_chunks[chunk]])] if chunk in grad_chunks else []
            step.emitter.add(Op.UPDATE, f"c{chunk}", Stream.COMPUTE, read, touched)
        elif chunk in static:
            payload, gradient = next(next_slot)
            step.begin(Started(chunk, payload, static[chunk], moves=False, gradient=gradient))
        elif chunk in streamed:
            buffer = next(next_buffer)
            step.begin(Started(chunk, buffer.payload, buffer.states, moves=True, gradient=buffer.gradient))
    while step.started:
        step.finish()
    return step.emitter.take()


def _streamed(layout: Layout, liveness: Liveness, share: float) -> frozenset[int]:
    """Chunks whose states pass through the device; those with a second home are updated on the host."""
    streamed = streamed_chunks(layout, liveness, share) if buffers_of(layout) else ()
    return frozenset(c for c in streamed if not layout.chunks[c].has_second_home)


def step_nbytes(layout: Layout, liveness: Liveness, share: float) -> int:
    """Bytes that the steps of all ranks together copy in both directions."""
    streamed = _streamed(layout, liveness, share)
    groups = {layout.group_of(c).index for c in streamed}
    total = 0
    for chunk in (c for c in layout.chunks if c.list is ChunkList.TRAINED and not c.is_resident):
        if layout.group_of(chunk.index).index in groups:
            total += 2 * (chunk.used_nbytes + layout.used_os_nbytes_of(chunk))
        elif chunk.has_resident_os:
            total += 2 * chunk.used_nbytes
    return total
