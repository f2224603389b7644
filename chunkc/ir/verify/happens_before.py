"""Happens-before: which actions are certainly complete when another one starts.

A stream carries out its own actions in the order in which they were issued, program after program; a wait orders an
action after another one, on any stream; the end of a transition orders everything issued later after everything issued
before. The order is kept as vector clocks (Fidge 1988, Mattern 1989): the clock of an action holds, for each stream,
the number of actions of that stream that are complete before it starts.

On top stands a race detector in the manner of FastTrack (Flanagan and Freund, PLDI 2009): every resource remembers its
last writer and the last reader on each stream, and an access that is not ordered after a conflicting one is a race.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from chunkc.ir.actions import Action, Stream
from chunkc.ir.plan import ROLE_LETTER, Program

_STREAM_INDEX = {stream: index for index, stream in enumerate(Stream)}
_NUM_STREAMS = len(_STREAM_INDEX)


@dataclass(frozen=True, slots=True)
class Event:
    """One execution of an action.

    Attributes:
        label: of the action in its program, for example ``f12``.
        program: name of the program.
        moment: where it stands in the program, for people.
        action: what is carried out.
        stream: index of its stream.
        number: how many actions were issued on that stream up to this one.
        clock: per stream, how many actions are complete before this one starts; its own number on its own stream.
    """

    label: str
    program: str
    moment: str
    action: Action
    stream: int
    number: int
    clock: tuple[int, ...]

    def follows(self, other: Event) -> bool:
        """Whether ``other`` is certainly complete when this event starts (true of an event and itself)."""
        return self.clock[other.stream] >= other.number


class HappensBefore:
    """Issues actions one after the other and gives each its clock."""

    def __init__(self) -> None:
        self._streams: list[tuple[int, ...]] = [(0,) * _NUM_STREAMS] * _NUM_STREAMS
        self._latest: dict[str, dict[str, Event]] = {}

    def begin(self, program: Program) -> None:
        """Start a program: labels mean its run, and, of a later micro-batch, what it leaves out those before."""
        if program.position == "first":
            self._latest[ROLE_LETTER[program.role]] = {}

    def issue(self, program: Program, position: int, moment: str) -> Event:
        """Issue the action at ``position`` of ``program``; waits for labels that mean nothing are satisfied."""
        action, label = program.actions[position], program.label(position)
        stream = _STREAM_INDEX[action.stream]
        clock = list(self._streams[stream])
        for wait in action.waits:
            before = self._latest.get(wait[0], {}).get(wait)
            if before is not None:
                clock = [max(pair) for pair in zip(clock, before.clock, strict=True)]
        clock[stream] += 1
        event = Event(label, program.name, moment, action, stream, clock[stream], tuple(clock))
        self._streams[stream] = event.clock
        self._latest[label[0]][label] = event
        return event

    def join(self) -> None:
        """Order everything issued from here on after everything issued so far."""
        joined = tuple(max(column) for column in zip(*self._streams, strict=True))
        self._streams = [joined] * _NUM_STREAMS


class Accesses:
    """Last accesses of every resource; a resource is a name, for example ``"slot d3"``.

    ``overlaps`` names, for a resource that shares bytes with others, all of them and itself.
    """

    def __init__(self, overlaps: Mapping[str, tuple[str, ...]]) -> None:
        self._overlaps = overlaps
        self._writers: dict[str, Event] = {}
        self._readers: dict[str, dict[int, Event]] = {}

    def read(self, resource: str, event: Event) -> Event | None:
        """Record a read; the writer with which it races, if any."""
        for name in self._overlaps.get(resource, (resource,)):
            writer = self._writers.get(name)
            if writer is not None and not event.follows(writer):
                return writer
        self._readers.setdefault(resource, {})[event.stream] = event
        return None

    def write(self, resource: str, event: Event) -> Event | None:
        """Record a write; the reader or writer with which it races, if any."""
        for name in self._overlaps.get(resource, (resource,)):
            writer = self._writers.get(name)
            if writer is not None and not event.follows(writer):
                return writer
            for reader in self._readers.get(name, {}).values():
                if not event.follows(reader):
                    return reader
        self._writers[resource] = event
        self._readers.pop(resource, None)
        return None
