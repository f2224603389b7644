"""Occupancy of the arena: which target stands in which slot, action by action.

The verifier alone has rules of its own: it proves what all others take from here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from chunkc.ir.actions import FROM_SLOT, TO_SLOT, Action, Op
from chunkc.ir.layout import ChunkList, Layout
from chunkc.ir.plan import Plan, Program


@dataclass(slots=True)
class Occupancy:
    """The targets in the arena (``c3``, ``os3``) with their slots at one moment, and their bytes.

    ``opened``: those that came without a copy.
    """

    layout: Layout
    slot_of: dict[str, int] = field(default_factory=dict)
    used_nbytes: int = 0
    opened: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, layout: Layout, residents: Iterable[tuple[str, int]]) -> Occupancy:
        occupancy = cls(layout)
        for target, slot in residents:
            occupancy._enter(target, slot)
        return occupancy

    def apply(self, action: Action) -> tuple[str, ...]:
        """Carry out ``action``; return the targets that it moved into a slot or out of one."""
        match action.op:
            case op if op in TO_SLOT and action.slot is not None:
                self._enter(action.target, action.slot)
                if op is Op.OPEN:
                    self.opened.add(action.target)
                return (action.target,)
            case op if op in FROM_SLOT:
                self._leave(action.target)
                return (action.target,)
            case Op.GATHER:
                slots = self.gathered_slots(action.index)
                for target, slot in slots.items():
                    self._enter(target, slot)
                return tuple(slots)
            case Op.RELEASE:
                targets = tuple(f"c{chunk}" for chunk in self.layout.remote_of(action.index))
                for target in targets:
                    self._leave(target)
                return targets
        return ()

    def gathered_slots(self, group: int) -> dict[str, int]:
        """Slots of other ranks' chunks of ``group``: all stand adjacent, in the order of the ranks."""
        own_chunk = self.layout.groups[group].first_chunk + self.layout.rank
        remote = self.layout.remote_of(group)
        return {f"c{chunk}": self.slot_of[f"c{own_chunk}"] + chunk - own_chunk for chunk in remote}

    def chunk_slots(self) -> dict[int, int]:
        return {int(target[1:]): slot for target, slot in self.slot_of.items() if target.startswith("c")}

    def pairs(self) -> tuple[tuple[str, int], ...]:
        return tuple(sorted(self.slot_of.items(), key=lambda pair: (pair[1], pair[0])))

    def gathered(self) -> tuple[int, ...]:
        """Groups of which chunks of other ranks have come here, gradient chunks apart, ascending."""
        layout = self.layout
        remote = [c for c in self.chunk_slots() if layout.owner(c) != layout.rank and f"c{c}" not in self.opened]
        params = {layout.group_of(c).index for c in remote if layout.chunks[c].list is not ChunkList.GRAD}
        return tuple(sorted(params))

    def _enter(self, target: str, slot: int) -> None:
        self.slot_of[target] = slot
        self.used_nbytes += self.layout.slots[slot].nbytes

    def _leave(self, target: str) -> None:
        self.used_nbytes -= self.layout.slots[self.slot_of.pop(target)].nbytes
        self.opened.discard(target)


def occupancy_before(plan: Plan, program: Program, position: int) -> Occupancy:
    occupancy = Occupancy.of(plan.layout, program.entry.resident)
    for action in program.actions[:position]:
        occupancy.apply(action)
    return occupancy
