"""Memory of one rank while a plan is replayed: contents of slots and homes, and the true copies.

Contents are symbolic. A payload is the number of updates its param16 has seen, the parameters in it that their
gradients have overlaid, and whether these gradients are reduced. For every chunk the machine keeps the *truth*, the
newest content, beside the copies in the slot and at home; a copy that differs from the truth is stale. Of states
the machine keeps the number of updates that they have seen, with the same distinction.

Every access goes through ``read`` and ``write``, which also ask the race detector. ``moves`` and ``training`` say what
each action does to the machine.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NoReturn

from chunkc.errors import PlanError
from chunkc.ir.actions import Op
from chunkc.ir.layout import Chunk, ChunkList, Layout
from chunkc.ir.plan import Plan, Segment, State
from chunkc.ir.verify.happens_before import Accesses, Event
from chunkc.ir.verify.saved_values import SavedValues, users_by_segment

NOTHING = -1


@dataclass(frozen=True, slots=True)
class Payload:
    """Content of a chunk: param16 after ``version`` updates, but grad16 where a parameter is in ``grads``.

    ``added`` says of gradients in a gradient chunk in which micro-batches they landed, as (parameter, micro-batch), and
    ``summed`` which of these the chunk's owner has those of all ranks of. A chunk that was opened and not yet written
    has version `NOTHING`.
    """

    version: int = 0
    grads: frozenset[int] = frozenset()
    reduced: bool = False
    added: frozenset[tuple[int, int]] = frozenset()
    summed: frozenset[tuple[int, int]] = frozenset()

    @property
    def is_partial(self) -> bool:
        """Whether it holds gradients of which other ranks have a part that was not reduced."""
        return not self.reduced and (self.added != self.summed if self.added else bool(self.grads))

    def __str__(self) -> str:
        held = f"param16 after {self.version} updates" if self.version != NOTHING else "nothing"
        if self.added:
            return f"{len(self.added)} contributions to gradients of {len(self.grads)} parameters"
        return f"{held}, gradients of {len(self.grads)} parameters" if self.grads else held


class Facts:
    """Facts that follow from a plan's layout and segments, computed once.

    Attributes:
        params: per chunk, the parameters in it (for a gradient chunk those of its partner).
        lands: per segment, the parameters whose gradient lands in each chunk.
        due: per chunk, all parameters whose gradient must land before its update (empty for gradient chunks).
        grad_chunk: per trained chunk that has one, its gradient chunk.
        accumulates: whether several micro-batches may add to gradients before a step.
        to_update: the chunks of this rank that every step updates.
        overlaps: per slot, the slots that share bytes with it, itself included.
        moves: the saved values that move, by index; moves_used: per segment, those that it makes or may read.
        needs_norm: whether the plan clips or scales, so that updates wait for ``decide``.
    """

    def __init__(self, plan: Plan) -> None:
        layout = plan.layout
        self.layout: Layout = layout
        self.memory = plan.memory
        self.segments: dict[str, Segment] = {s.name: s for s in plan.segments}
        self.owned = [layout.owner(c.index) == layout.rank for c in layout.chunks]
        params: list[list[int]] = [[] for _ in layout.chunks]
        for placement in layout.placements:
            for chunk in placement.chunks:
                params[chunk].append(placement.param)
        self.grad_chunk = layout.grad_chunks()
        self.accumulates = plan.accumulate > 1
        self.params = [params[c.index if c.partner is None else c.partner] for c in layout.chunks]
        landed = {p for s in plan.segments for p in s.lands}
        self.due = [frozenset(params[c.index]) & landed for c in layout.chunks]
        self.lands = {s.name: self._by_chunk(s.lands) for s in plan.segments}
        self.reads = {s.name: self._by_chunk(s.reads) for s in plan.segments}
        trained = [c.index for c in layout.chunks if c.list is ChunkList.TRAINED and self.owned[c.index]]
        self.to_update = frozenset(c for c in trained if self.params[c])
        self.overlaps = _overlaps(layout)
        self.moves = {value.index: value for value in plan.moves}
        self.moves_used = users_by_segment(plan)
        self.needs_norm = any(a.op in (Op.NORM, Op.SUM, Op.DECIDE) for p in plan.programs for a in p.actions)

    def due_in(self, chunk: int) -> frozenset[int]:
        """All parameters whose gradient can land in ``chunk``, a gradient chunk included."""
        partner = self.layout.chunks[chunk].partner
        return self.due[chunk if partner is None else partner]

    def _by_chunk(self, params: tuple[int, ...]) -> dict[int, frozenset[int]]:
        by_chunk: dict[int, set[int]] = defaultdict(set)
        for param in params:
            for chunk in self.layout.placements[param].chunks:
                by_chunk[chunk].add(param)
        return {chunk: frozenset(by_chunk[chunk]) for chunk in sorted(by_chunk)}

    def name(self, param: int) -> str:
        return repr(self.layout.params[param].name)


def _overlaps(layout: Layout) -> dict[int, tuple[int, ...]]:
    """Slots that share bytes, by a sweep over their offsets; every slot overlaps itself."""
    overlaps: dict[int, set[int]] = {s.index: {s.index} for s in layout.slots}
    open_slots: list[tuple[int, int]] = []
    for slot in sorted(layout.slots, key=lambda s: s.offset):
        open_slots = [(index, end) for index, end in open_slots if end > slot.offset]
        for index, _ in open_slots:
            overlaps[index].add(slot.index)
            overlaps[slot.index].add(index)
        open_slots.append((slot.index, slot.end))
    return {index: tuple(sorted(others)) for index, others in overlaps.items()}


@dataclass(slots=True)
class Iteration:
    """The progress of the running iteration.

    Attributes:
        next_segment: position of the next segment of the running graph.
        landing: gradients of the last segment that have not been stashed, as (parameter, chunk).
        last_run: the event of that segment.
        begun: chunks whose update was begun, which nothing has changed since.
        normed, updated: chunks; summed, decided: whether ``sum`` and ``decide`` ran.
        num_micro_batches: backwards since the step before, the running one included.
    """

    next_segment: int = 0
    landing: set[tuple[int, int]] = field(default_factory=set)
    last_run: Event | None = None
    stashed: set[tuple[int, int]] = field(default_factory=set)
    begun: set[int] = field(default_factory=set)
    normed: set[int] = field(default_factory=set)
    updated: set[int] = field(default_factory=set)
    summed: bool = False
    decided: bool = False
    num_micro_batches: int = 0


class Machine:
    """Slots, homes and truths of one rank, read and written by the effects of actions.

    Attributes:
        slot_of: slot of every resident target (``c3``, ``os3``).
        occupant: target in every occupied slot.
        device, home: copies of payloads; device_os, home_os: copies of optimizer states, as the number of updates seen.
        truth, os_truth: the newest content of each.
        gathered: chunks that all ranks hold since the last gather.
        side: of each chunk with a second home, which of the two is its home now: 0 or 1.
        saved: where saved values that move stand.
    """

    def __init__(self, facts: Facts, entry: State) -> None:
        self.facts = facts
        self.layout = facts.layout
        self.slot_of: dict[str, int] = {}
        self.occupant: dict[int, str] = {}
        self.device: dict[int, Payload] = {}
        self.device_os: dict[int, int] = {}
        chunks = self.layout.chunks
        self.truth = {c.index: Payload() for c in chunks}
        self.os_truth = {c.index: 0 for c in chunks if c.os_home is not None}
        self.home = {c.index: Payload() for c in chunks if not c.is_resident and facts.owned[c.index]}
        self.home_os = {c.index: 0 for c in chunks if c.has_os_below and facts.owned[c.index]}
        self.gathered: set[int] = set()
        self.side = {c.index: 0 for c in chunks if c.has_second_home}
        self.saved = SavedValues(facts.moves, facts.moves_used)
        self.iteration = Iteration()
        named = {f"slot d{slot}": tuple(f"slot d{o}" for o in others) for slot, others in facts.overlaps.items()}
        self._accesses = Accesses(named)
        for target, slot in entry.resident:
            self.settle(target, slot)

    def settle(self, target: str, slot: int) -> None:
        """Put the true content of ``target`` into ``slot`` without a copy (static residents)."""
        self.slot_of[target], self.occupant[slot] = slot, target
        index = int(target.lstrip("cos"))
        if target[0] == "o":
            self.device_os[index] = self.os_truth[index]
        else:
            self.device[index] = self.truth[index]

    # --- refusals -----------------------------------------------------------------------------------------------
    def refuse(self, event: Event, reason: str) -> NoReturn:
        """Raise the verifier's error for ``event``."""
        raise PlanError(f"{event.program} {event.label} `{event.action}` ({event.moment}): {reason}")

    def read(self, event: Event, resource: str) -> None:
        """``event`` reads ``resource``; refused unless ordered after the last write."""
        other = self._accesses.read(resource, event)
        if other is not None:
            self._race(event, f"reads {resource}", other)

    def write(self, event: Event, resource: str) -> None:
        """``event`` writes ``resource``; refused unless ordered after the last write and all reads since."""
        other = self._accesses.write(resource, event)
        if other is not None:
            self._race(event, f"writes {resource}", other)

    def _race(self, event: Event, access: str, other: Event) -> NoReturn:
        self.refuse(
            event,
            f"{access} without being ordered after {other.label} `{other.action}` of {other.program}, "
            f"which uses the same bytes; a wait is missing",
        )

    def home_of(self, target: str, *, is_second: bool = False) -> str:
        """The resource of the home of ``target`` (``c3``, ``os3``) as bytes have it, or of its second home.

        Homes that change places keep their bytes, so that whoever uses one is seen after the change too.
        """
        side = self.side.get(int(target.lstrip("cos")))
        return f"home of {target}" if side is None else f"home {side ^ is_second} of {target}"

    # --- places -------------------------------------------------------------------------------------------------
    def chunk(self, event: Event) -> Chunk:
        """The chunk that ``event`` acts on, which must be this rank's."""
        chunk = self.layout.chunks[event.action.index]
        if not self.facts.owned[chunk.index]:
            owner = self.layout.owner(chunk.index)
            self.refuse(event, f"c{chunk.index} belongs to rank {owner}, this is rank {self.layout.rank}")
        return chunk

    def occupy(self, event: Event, target: str, slot: int, nbytes: int) -> None:
        """Put ``target`` into ``slot``, which must be free, large enough, and apart from occupied bytes."""
        if target in self.slot_of:
            self.refuse(event, f"{target} already stands in slot d{self.slot_of[target]}")
        if slot >= len(self.layout.slots):
            self.refuse(event, f"there is no slot d{slot}; the arena has {len(self.layout.slots)}")
        if self.layout.slots[slot].nbytes < nbytes:
            self.refuse(event, f"{target} takes {nbytes} bytes, slot d{slot} has {self.layout.slots[slot].nbytes}")
        for other in self.facts.overlaps[slot]:
            if other in self.occupant:
                self.refuse(event, f"slot d{slot} shares bytes with slot d{other}, which holds {self.occupant[other]}")
        self.slot_of[target], self.occupant[slot] = slot, target
        self.write(event, f"slot d{slot}")

    def vacate(self, event: Event, target: str, slot: int | None = None) -> None:
        """``target`` leaves its slot, which must be ``slot`` where that is given."""
        occupied = self.slot(event, target)
        if slot is not None and slot != occupied:
            self.refuse(event, f"{target} stands in slot d{occupied}, not in slot d{slot}")
        del self.slot_of[target], self.occupant[occupied]
        self.write(event, f"slot d{occupied}")

    def slot(self, event: Event, target: str) -> int:
        """The slot in which ``target`` stands."""
        if target not in self.slot_of:
            self.refuse(event, f"{target} is not on the device")
        return self.slot_of[target]

    def resident(self, event: Event, chunk: int) -> Payload:
        """The device copy of ``chunk``, which must be there and true."""
        self.slot(event, f"c{chunk}")
        if self.device[chunk] != self.truth[chunk]:
            self.refuse(
                event, f"the device copy of c{chunk} is stale: {self.device[chunk]}; newest is {self.truth[chunk]}"
            )
        return self.device[chunk]

    def at_home(self, event: Event, chunk: int) -> Payload:
        """The host copy of ``chunk``, which must exist and be true."""
        if chunk not in self.home:
            self.refuse(event, f"c{chunk} has no host home")
        if self.home[chunk] != self.truth[chunk]:
            self.refuse(event, f"the host copy of c{chunk} is stale: {self.home[chunk]}; newest is {self.truth[chunk]}")
        return self.home[chunk]

    def resident_pairs(self) -> frozenset[tuple[str, int]]:
        """Return every resident target with its slot, as a program's state lists them."""
        return frozenset(self.slot_of.items())

    def is_grad(self, chunk: int) -> bool:
        return self.layout.chunks[chunk].list is ChunkList.GRAD
