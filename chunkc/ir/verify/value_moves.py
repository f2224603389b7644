"""Effects of the actions that move saved values, and of segments on them."""

from __future__ import annotations

from collections.abc import Callable

from chunkc.ir.actions import Op
from chunkc.ir.plan import Segment
from chunkc.ir.verify.happens_before import Event
from chunkc.ir.verify.replay import Machine
from chunkc.ir.verify.saved_values import Place


def run_segment(machine: Machine, event: Event, segment: Segment) -> None:
    """Record what a segment makes and reads; refuse it where a value that it reads is not here."""
    saved = machine.saved
    if segment.away_nbytes and segment.away_nbytes > saved.away_nbytes:
        machine.refuse(
            event, f"{segment.away_nbytes} bytes of moved values are to be away, and {saved.away_nbytes} are"
        )
    for value in saved.users[segment.name]:
        if value.is_made_in(segment):
            machine.write(event, value.target)
            saved.put(value.index, Place.HERE)
            continue
        if saved.places[value.index] is not Place.HERE:
            machine.refuse(event, f"it reads {value.target}, which is {saved.places[value.index]}")
        machine.read(event, value.target)


def _offload(machine: Machine, event: Event) -> None:
    _expect(machine, event, Place.HERE)
    machine.read(event, event.action.target)
    machine.write(event, f"copy of {event.action.target}")
    machine.saved.copied[event.action.index] = machine.saved.num_forwards


def _discard(machine: Machine, event: Event) -> None:
    saved, index = machine.saved, event.action.index
    _expect(machine, event, Place.HERE)
    if saved.copied[index] != saved.num_forwards:
        machine.refuse(event, f"{event.action.target} has no copy yet: it must be offloaded")
    machine.write(event, event.action.target)
    saved.put(index, Place.AWAY)


def _allocate(machine: Machine, event: Event) -> None:
    saved, index = machine.saved, event.action.index
    _expect(machine, event, Place.AWAY)
    machine.write(event, event.action.target)
    saved.put(index, Place.EMPTY)


def _reload(machine: Machine, event: Event) -> None:
    saved, index = machine.saved, event.action.index
    _expect(machine, event, Place.EMPTY)
    if saved.copied[index] != saved.num_forwards:
        machine.refuse(event, f"the copy of {event.action.target} is of another forward")
    machine.read(event, f"copy of {event.action.target}")
    machine.write(event, event.action.target)
    saved.put(index, Place.HERE)


def _expect(machine: Machine, event: Event, place: Place) -> None:
    found = machine.saved.places[event.action.index]
    if found is not place:
        machine.refuse(event, f"{event.action.target} is {found}, not {place}")


VALUE_EFFECTS: dict[Op, Callable[[Machine, Event], None]] = {
    Op.OFFLOAD: _offload,
    Op.DISCARD: _discard,
    Op.ALLOCATE: _allocate,
    Op.RELOAD: _reload,
}
