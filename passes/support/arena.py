"""Slots of the arena and their purposes.

In the arena payloads come and go, and some states stand or pass through.

    payload slots   all of one size and adjacent, from byte 0 on; forward and backward fetch into them
    static slots    one for each payload that stays on the device, behind the payload slots
    state slots     one for the states of each chunk that stay on the device, behind the static slots
    buffer slots    for states that pass through in the step, over the bytes of the last payload slots

In the step no payload has to stand on the device but those that are being updated. A *buffer* is one payload slot (two
with gradient chunks) and, right behind, a buffer slot over the bytes of the next ones. Buffers lie at the end of the
payload slots, which the next forward fills last. What a slot is for follows from its size and offset.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from chunkc.ir.layout import Layout, Slot
from chunkc.passes.support.budget import chunk_nbytes
from chunkc.passes.support.draft import Liveness
from chunkc.passes.support.resident_states import streamed_chunks

MAX_BUFFERS = 3
"""One chunk's states on their way in, one in use, one on their way out: more would wait for the link all the same."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """Slots of a payload, its gradient chunk (if any) and its states, which share no bytes."""

    payload: int
    states: int
    gradient: int | None = None


def payload_slots(layout: Layout, num_slots: int) -> tuple[Slot, ...]:
    nbytes = chunk_nbytes(layout)
    return tuple(Slot(i, i * nbytes, nbytes) for i in range(num_slots))


def num_payload_slots(layout: Layout) -> int:
    """The slots for payloads that come and go: those before static slots and slots of states."""
    num_states = sum(1 for c in layout.owned() if c.has_resident_os)
    return _first_buffer(layout) - len(_staying(layout)) - num_states


def _first_buffer(layout: Layout) -> int:
    return next((s.index for before, s in pairwise(layout.slots) if s.offset != before.end), len(layout.slots))


def _staying(layout: Layout) -> list[int]:
    """The chunks of all ranks whose payloads stay on the device, in order."""
    return [c.index for c in layout.chunks if c.is_resident]


def static_payloads(layout: Layout) -> dict[int, int]:
    """The slot of each payload of this rank that stays on the device, by chunk."""
    first = num_payload_slots(layout)
    return {c: first + i for i, c in enumerate(_staying(layout)) if layout.owner(c) == layout.rank}


def static_states(layout: Layout) -> dict[int, int]:
    """The slot of the states of this rank that stay on the device, by chunk."""
    first = num_payload_slots(layout) + len(_staying(layout))
    return {c.index: first + i for i, c in enumerate(c for c in layout.owned() if c.has_resident_os)}


def buffers_of(layout: Layout) -> tuple[Buffer, ...]:
    """The buffers of the arena, the one at its end first."""
    nbytes, lead = chunk_nbytes(layout), lead_slots(layout)
    return tuple(
        Buffer(s.offset // nbytes - lead, s.index, s.offset // nbytes - 1 if lead > 1 else None)
        for s in layout.slots[_first_buffer(layout) :]
    )


def lead_slots(layout: Layout) -> int:
    """Payload slots that one update on the device takes: also one for the gradient chunk, if any."""
    return 2 if layout.grad_chunks() else 1


def spare_slots(layout: Layout) -> tuple[tuple[int, int | None], ...]:
    """Slots of payload and gradient chunk (if any) for updates whose states stay on the device."""
    buffers, count, lead = buffers_of(layout), num_payload_slots(layout), lead_slots(layout)
    end = min((b.payload for b in buffers), default=count)
    end = end if end >= lead else count
    firsts = range(end - lead, -1, -lead)[:MAX_BUFFERS]
    return tuple((first, first + 1 if lead > 1 else None) for first in firsts)


def lay_out(layout: Layout, liveness: Liveness, num_ranges: int, most_ranges: int, share: float) -> Layout:
    """``layout`` with its arena, where ``share`` of the states at home on the host are streamed.

    Of the ``most_ranges`` slot ranges for which there is memory, forward and backward use ``num_ranges``; more are laid
    out where the step could not copy in and out at the same time without.
    """
    size, nbytes = layout.world_size, chunk_nbytes(layout)
    staying = [c for c in layout.owned() if c.has_resident_os]
    passing_nbytes = [layout.os_nbytes_of(layout.chunks[c]) for c in streamed_chunks(layout, liveness, share)]
    lead = lead_slots(layout)
    num_fetched = sum(1 for c in staying if not c.is_resident)
    width, spare = lead - (-max(passing_nbytes, default=0) // nbytes), lead * min(2, num_fetched)
    most_ranges = max(num_ranges, most_ranges, lead if num_fetched else 0)
    wanted = min(MAX_BUFFERS, len(passing_nbytes), _num_fitting(most_ranges * size, width, spare))
    num_laid_out = max(num_ranges, min(most_ranges, -(-(min(2, wanted) * width + spare) // size)))
    slots = list(payload_slots(layout, num_laid_out * size))
    end = arena_nbytes = len(slots) * nbytes
    num_buffers = min(wanted, _num_fitting(len(slots), width, spare))
    for size_nbytes in (*(nbytes for _ in _staying(layout)), *(layout.os_nbytes_of(c) for c in staying)):
        slots.append(Slot(len(slots), arena_nbytes, size_nbytes))
        arena_nbytes = slots[-1].end
    for _ in range(num_buffers):
        end -= width * nbytes
        slots.append(Slot(len(slots), end + lead * nbytes, (width - lead) * nbytes))
    return replace(layout, slots=tuple(slots), arena_nbytes=arena_nbytes)


def _num_fitting(num_slots: int, width: int, spare: int) -> int:
    """Buffers of ``width`` slots beside ``spare`` slots, which share an only buffer's bytes."""
    return max((num_slots - spare) // width, min(1, num_slots // width))


def shared_bytes(layout: Layout) -> dict[int, tuple[int, ...]]:
    """For every slot that shares bytes with others: they and itself."""
    count, nbytes = num_payload_slots(layout), chunk_nbytes(layout)
    overlaps: dict[int, set[int]] = {}
    for buffer in buffers_of(layout):
        slot = layout.slots[buffer.states]
        for other in range(slot.offset // nbytes, min(count, -(-slot.end // nbytes))):
            overlaps.setdefault(other, {other}).add(slot.index)
            overlaps.setdefault(slot.index, {slot.index}).add(other)
    return {slot: tuple(sorted(others)) for slot, others in overlaps.items()}
