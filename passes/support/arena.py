"""Slots of the arena and their purposes.

In the arena payloads come and go, and some triples stand or pass through.

    payload slots   all of one size and adjacent, from byte 0 on; forward and backward fetch into them
    static slots    one for each payload that stays on the device, behind the payload slots
    triple slots    one for each OS triple that stays on the device, behind the static slots
    buffer slots    for triples that pass through in the step, over the bytes of the last payload slots

In the step no payload has to stand on the device but those that are being updated, so that the bytes of all payload
slots are free for that. A *buffer* is one payload slot (two where gradients have chunks of their own: the second is for
them) and, right behind, a buffer slot over the bytes of the next ones. Buffers lie at the end of the payload slots,
which the next forward fills last. What a slot is for follows from its place and offset, so that a layout says it all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from chunkc.ir.layout import Home, Layout, Slot
from chunkc.passes.support.budget import chunk_nbytes
from chunkc.passes.support.draft import Liveness
from chunkc.passes.support.triples import streamed_chunks

MAX_BUFFERS = 3
"""One triple on its way in, one in use, one on its way out: more would wait for the link all the same."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """Slots of a payload and a triple that are updated together and share no bytes.

    ``gradient``: the slot of the gradient chunk, where there is one.
    """

    payload: int
    triple: int
    gradient: int | None = None


def payload_slots(layout: Layout, num_slots: int) -> tuple[Slot, ...]:
    """``num_slots`` adjacent slots of one chunk each."""
    nbytes = chunk_nbytes(layout)
    return tuple(Slot(i, i * nbytes, nbytes) for i in range(num_slots))


def num_payload_slots(layout: Layout) -> int:
    """How many of the slots are for payloads that come and go: those before static slots and triple slots."""
    num_triples = sum(1 for c in layout.owned() if c.os_home is Home.DEVICE)
    return _first_buffer(layout) - len(_staying(layout)) - num_triples


def _first_buffer(layout: Layout) -> int:
    """The index of the first slot that does not begin where the one before it ends."""
    return next((s.index for before, s in pairwise(layout.slots) if s.offset != before.end), len(layout.slots))


def _staying(layout: Layout) -> list[int]:
    """The chunks whose payloads stay on the device, in order."""
    return [c.index for c in layout.chunks if c.home is Home.DEVICE]


def static_payloads(layout: Layout) -> dict[int, int]:
    """The slot of each payload that stays on the device, by chunk; in a resident plan those of all ranks."""
    first = num_payload_slots(layout)
    return {chunk: first + i for i, chunk in enumerate(_staying(layout))}


def static_triples(layout: Layout) -> dict[int, int]:
    """The slot of each triple of this rank that stays on the device, by chunk."""
    first = num_payload_slots(layout) + len(_staying(layout))
    return {c.index: first + i for i, c in enumerate(c for c in layout.owned() if c.os_home is Home.DEVICE)}


def buffers_of(layout: Layout) -> tuple[Buffer, ...]:
    """The buffers of the arena, the one at its end first."""
    nbytes, lead = chunk_nbytes(layout), lead_slots(layout)
    return tuple(
        Buffer(s.offset // nbytes - lead, s.index, s.offset // nbytes - 1 if lead > 1 else None)
        for s in layout.slots[_first_buffer(layout) :]
    )


def lead_slots(layout: Layout) -> int:
    """Return how many payload slots one update on the device takes.

    An update takes one slot, and one more where gradients have chunks of their own.
    """
    return 2 if layout.grad_chunks() else 1


def spare_slots(layout: Layout) -> tuple[tuple[int, int | None], ...]:
    """Return slots of payload and gradient chunk for updates whose triples stay on the device.

    The gradient chunk's slot is None where the gradient overlays the payload. The slots are the last ones beside the
    buffers, where there are such slots.
    """
    buffers, count, lead = buffers_of(layout), num_payload_slots(layout), lead_slots(layout)
    end = min((b.payload for b in buffers), default=count)
    end = end if end >= lead else count
    firsts = range(end - lead, -1, -lead)[:MAX_BUFFERS]
    return tuple((first, first + 1 if lead > 1 else None) for first in firsts)


def lay_out(layout: Layout, liveness: Liveness, num_places: int, most_places: int, share: float) -> Layout:
    """``layout`` with its arena.

    Args:
        layout: its homes are decided.
        num_places: places that forward and backward use; a place is ``world_size`` slots.
        most_places: places for which there is memory. Some more than ``num_places`` are laid out where the step could
            not copy in and out at the same time without.
        share: of the triples at home on the host, those to be streamed.
    """
    size, nbytes = layout.world_size, chunk_nbytes(layout)
    staying = [c for c in layout.owned() if c.os_home is Home.DEVICE]
    passing_nbytes = [layout.os_nbytes_of(layout.chunks[c]) for c in streamed_chunks(layout, liveness, share)]
    lead = lead_slots(layout)
    num_fetched = sum(1 for c in staying if c.home is Home.HOST)
    width, spare = lead - (-max(passing_nbytes, default=0) // nbytes), lead * min(2, num_fetched)
    most_places = max(num_places, most_places, lead if num_fetched else 0)
    wanted = min(MAX_BUFFERS, len(passing_nbytes), _num_fitting(most_places * size, width, spare))
    places = max(num_places, min(most_places, -(-(min(2, wanted) * width + spare) // size)))
    slots = list(payload_slots(layout, places * size))
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
    """Return how many buffers of ``width`` slots fit beside ``spare`` slots.

    The spare slots share the bytes of the only buffer if they must.
    """
    return max((num_slots - spare) // width, min(1, num_slots // width))


def shared_bytes(layout: Layout) -> dict[int, tuple[int, ...]]:
    """For every slot that shares bytes with others: they and itself."""
    count, nbytes = num_payload_slots(layout), chunk_nbytes(layout)
    found: dict[int, set[int]] = {}
    for buffer in buffers_of(layout):
        slot = layout.slots[buffer.triple]
        for other in range(slot.offset // nbytes, min(count, -(-slot.end // nbytes))):
            found.setdefault(other, {other}).add(slot.index)
            found.setdefault(slot.index, {slot.index}).add(other)
    return {slot: tuple(sorted(others)) for slot, others in found.items()}
