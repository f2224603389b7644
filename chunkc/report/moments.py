"""Contents of the device at each moment: a plan's actions replayed in the order of the plan.

A moment is the boundary before a segment. The static arena is allocated once and counts in full towards the device
total, however little of it is in use; non-model bytes come on top.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from chunkc.ir.actions import Op
from chunkc.ir.occupancy import Occupancy
from chunkc.ir.plan import Plan, Program, Segment


@dataclass(frozen=True, slots=True)
class Moment:
    """The device before one segment runs; ``position`` is that of its ``run`` action in the program.

    ``resident`` pairs a target (``c3``, ``os3``) with its slot, by slot; chunks of other ranks too. ``gathered``:
    groups of which chunks of other ranks stand here, gradient chunks apart. ``total_nbytes``: the whole arena and
    non-model bytes.
    """

    position: int
    segment: Segment
    resident: tuple[tuple[str, int], ...]
    gathered: tuple[str, ...]
    used_nbytes: int
    total_nbytes: int


def moments(plan: Plan, program: Program) -> Iterator[Moment]:
    """The moments of ``program``, one for each of its ``run`` actions, in order."""
    segments = {segment.name: segment for segment in plan.segments}
    occupancy = Occupancy.of(plan.layout, program.entry.resident)
    for position, action in enumerate(program.actions):
        if action.op is not Op.RUN:
            occupancy.apply(action)
            continue
        segment = segments[action.target]
        yield Moment(
            position=position,
            segment=segment,
            resident=occupancy.pairs(),
            gathered=tuple(f"g{group}" for group in occupancy.gathered()),
            used_nbytes=occupancy.used_nbytes,
            total_nbytes=plan.layout.arena_nbytes + segment.nonmodel_nbytes,
        )
