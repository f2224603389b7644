"""Contents of the device at each moment: a plan's actions replayed in the order of the plan.

A moment is the boundary before a segment. The static arena is allocated once and counts in full towards the device
total, however little of it is in use; non-model bytes and elastic bytes come on top.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from chunkc.ir.actions import FROM_SLOT, TO_SLOT, Action, Op
from chunkc.ir.layout import Layout
from chunkc.ir.plan import Plan, Program, Segment


@dataclass(frozen=True, slots=True)
class Moment:
    """The device before one segment runs.

    Attributes:
        position: of the ``run`` action in its program.
        segment: the segment that runs.
        resident: pairs of a target (``c3``, ``os3``) and the slot that holds it, by slot.
        gathered: communication groups and chunks gathered and not yet released or reduced.
        used_nbytes: bytes of the slots in ``resident``.
        elastic_nbytes: bytes taken by ``grow`` and not yet given back.
        total_nbytes: whole arena, elastic bytes and the segment's non-model bytes.
    """

    position: int
    segment: Segment
    resident: tuple[tuple[str, int], ...]
    gathered: tuple[str, ...]
    used_nbytes: int
    elastic_nbytes: int
    total_nbytes: int


class _Replay:
    """The running state of one program's replay."""

    def __init__(self, layout: Layout, program: Program) -> None:
        self.layout = layout
        self.resident = dict(program.entry.resident)
        self.gathered: set[str] = set()
        self.elastic_nbytes = 0

    def apply(self, action: Action) -> None:
        if action.op in TO_SLOT and action.slot is not None:
            self.resident[action.target] = action.slot
        elif action.op in FROM_SLOT:
            self.resident.pop(action.target, None)
        elif action.op is Op.GATHER:
            self.gathered.add(action.target)
        elif action.op in (Op.RELEASE, Op.REDUCE):
            self.gathered.discard(action.target)
            if action.op is Op.RELEASE:
                for chunk in self.layout.remote_of(action.target):
                    self.resident.pop(f"c{chunk}", None)
        elif action.op is Op.GROW:
            self.elastic_nbytes += action.index
        elif action.op is Op.SHRINK:
            self.elastic_nbytes -= action.index

    def used_nbytes(self) -> int:
        return sum(self.layout.slots[slot].nbytes for slot in set(self.resident.values()))


def moments(plan: Plan, program: Program) -> Iterator[Moment]:
    """The moments of ``program``, one for each of its ``run`` actions, in order."""
    segments = {segment.name: segment for segment in plan.segments}
    replay = _Replay(plan.layout, program)
    for position, action in enumerate(program.actions):
        if action.op is not Op.RUN:
            replay.apply(action)
            continue
        segment = segments[action.target]
        yield Moment(
            position=position,
            segment=segment,
            resident=tuple(sorted(replay.resident.items(), key=lambda pair: (pair[1], pair[0]))),
            gathered=tuple(sorted(replay.gathered, key=lambda target: (target[0], int(target[1:])))),
            used_nbytes=replay.used_nbytes(),
            elastic_nbytes=replay.elastic_nbytes,
            total_nbytes=plan.layout.arena_nbytes + replay.elastic_nbytes + segment.nonmodel_nbytes,
        )
