"""Pass ``communication``: write the actions of forward and backward.

Where ranks share groups, the actions include gather, release and reduce. Each rank fetches its own chunk of a group and
gathers the others before use; the group's gradients are reduced once all have landed, remote chunks are released, and
the own chunk is written back. One rank needs none of these. In a resident plan own chunks never move; groups are
gathered when forward begins, since an update has made copies stale.

A group that comes back for its gradients alone, as that of a tied embedding does when backward ends, is not gathered:
chunks of other ranks are opened, with zeros in them, and the gradients of all their parameters land there.

Gradient chunks, which micro-batches add to, are not gathered: the own one holds the sum so far, and those of other
ranks are opened beside it, with zeros in them. Every residency interval ends with a reduction of what has landed in it,
so that a group may come and go within a backward, and sums stay whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import InitVar, dataclass, field, replace

from chunkc.ir.actions import Action, Op, Stream
from chunkc.ir.layout import ChunkList, Layout
from chunkc.ir.occupancy import Occupancy
from chunkc.ir.plan import Segment
from chunkc.passes.residency import block_chunks, landed_chunks
from chunkc.passes.support.arena import static_payloads
from chunkc.passes.support.draft import ActionAccess, Demand, Draft, ResidencyInterval, Timeline, decided
from chunkc.passes.support.moved_values import with_moves


def slot_name(slot: int) -> str:
    """The resource name of an arena slot."""
    return f"d{slot}"


def home_name(chunk: int) -> str:
    """The resource name of a payload's home."""
    return f"h{chunk}"


def states_name(chunk: int) -> str:
    """The resource name of the home of a chunk's states."""
    return f"o{chunk}"


def payload_residents(slots: Mapping[int, int]) -> tuple[tuple[str, int], ...]:
    """Chunks with their slots as a program's state lists them, by chunk."""
    return tuple((f"c{chunk}", slot) for chunk, slot in sorted(slots.items()))


@dataclass(slots=True)
class ActionEmitter:
    """Writes accesses one after another, from ``residents`` on: targets with the slots where they stand."""

    layout: Layout
    residents: InitVar[Iterable[tuple[str, int]]] = ()
    accesses: list[ActionAccess] = field(default_factory=list)
    occupancy: Occupancy = field(init=False)
    grad_chunks: dict[int, int] = field(init=False)

    def __post_init__(self, residents: Iterable[tuple[str, int]]) -> None:
        self.occupancy = Occupancy.of(self.layout, residents)
        self.grad_chunks = self.layout.grad_chunks()

    def slot_of(self, chunk: int) -> int:
        """Where ``chunk`` stands now."""
        return self.occupancy.slot_of[f"c{chunk}"]

    def add(
        self,
        op: Op,
        target: str,
        stream: Stream,
        reads: Iterable[str] = (),
        writes: Iterable[str] = (),
        slot: int | None = None,
        source: str | None = None,
    ) -> None:
        """Append one action with the resources that it reads and writes."""
        action = Action(op, target, stream, slot, source)
        self.occupancy.apply(action)
        self.accesses.append(ActionAccess(action, tuple(reads), tuple(writes)))

    def fetch(self, chunk: int, slot: int) -> None:
        self.add(Op.FETCH, f"c{chunk}", Stream.H2D, [home_name(chunk)], [slot_name(slot)], slot=slot)

    def open(self, chunk: int, slot: int) -> None:
        self.add(Op.OPEN, f"c{chunk}", Stream.H2D, [], [slot_name(slot)], slot=slot)

    def open_remote(self, group: int) -> None:
        """Zeros in the slots of the group's remote chunks, which follow and precede the own chunk's."""
        own_chunk, remote = self._split(group)
        for chunk in remote:
            self.open(chunk, self.slot_of(own_chunk) + chunk - own_chunk)

    def evict(self, chunk: int) -> None:
        slot = self.slot_of(chunk)
        self.add(Op.EVICT, f"c{chunk}", Stream.D2H, [], [slot_name(slot), home_name(chunk)], slot=slot)

    def drop(self, chunk: int, after: Stream = Stream.COMPUTE) -> None:
        """Give up a clean chunk's slot, in the queue of its last use."""
        slot = self.slot_of(chunk)
        self.add(Op.DROP, f"c{chunk}", after, [], [slot_name(slot)], slot=slot)

    def load(self, chunk: int, slot: int) -> None:
        self.add(Op.LOAD, f"os{chunk}", Stream.H2D, [states_name(chunk)], [slot_name(slot)], slot=slot)

    def store(self, chunk: int, slot: int) -> None:
        self.add(Op.STORE, f"os{chunk}", Stream.D2H, [], [slot_name(slot), states_name(chunk)], slot=slot)

    def run(self, segment: Segment) -> None:
        """The segment, and then the gradients that land with it: over parameters, or added in gradient chunks."""
        slots = [slot_name(self.slot_of(c)) for c in self.layout.chunks_of(segment.reads)]
        self.add(Op.RUN, segment.name, Stream.COMPUTE, slots)
        for chunk in self.layout.chunks_of(segment.lands):
            op, target = (Op.ADD, self.grad_chunks[chunk]) if chunk in self.grad_chunks else (Op.STASH, chunk)
            self.add(op, f"c{target}", Stream.COMPUTE, [], [slot_name(self.slot_of(target))], source=segment.name)

    def gather(self, group: int) -> None:
        """Fill the slots of the group's remote chunks, which follow and precede the own chunk's."""
        own_chunk, _ = self._split(group)
        writes = [slot_name(slot) for slot in self.occupancy.gathered_slots(group).values()]
        self.add(Op.GATHER, f"g{group}", Stream.COMM, [slot_name(self.slot_of(own_chunk))], writes)

    def reduce(self, group: int) -> None:
        own_chunk, remote = self._split(group)
        reads = [slot_name(self.slot_of(c)) for c in remote]
        self.add(Op.REDUCE, f"g{group}", Stream.COMM, reads, [slot_name(self.slot_of(own_chunk))])

    def release(self, group: int, after: Stream = Stream.COMPUTE) -> None:
        """Give up the group's remote chunks, in the queue of their last use, so that no other waits."""
        _, remote = self._split(group)
        writes = [slot_name(self.slot_of(c)) for c in remote]
        self.add(Op.RELEASE, f"g{group}", after, [], writes)

    def _split(self, group: int) -> tuple[int, list[int]]:
        chunks = self.layout.groups[group].chunks
        own_chunk = chunks[self.layout.rank]
        return own_chunk, [c for c in chunks if c != own_chunk]

    def take(self) -> tuple[ActionAccess, ...]:
        """The accesses written since the last call."""
        accesses, self.accesses = tuple(self.accesses), []
        return accesses


def write_intervals(
    layout: Layout, demand: Demand, lines: tuple[Timeline, Timeline]
) -> tuple[tuple[ActionAccess, ...], ...]:
    """The accesses of forward and backward with the residency intervals of a plan; one rank may have none."""
    emitter = ActionEmitter(layout, payload_residents(static_payloads(layout)))
    intervals = [interval for line in lines for freed in line.frees for interval in freed]
    landed = dict(zip(intervals, landed_chunks(layout, demand, intervals), strict=True))
    overwritten = _overwritten(layout, demand, lines) if layout.world_size > 1 else {}
    last_reduced = next((interval for interval in reversed(intervals) if interval.dirty), None)
    result = []
    for line in lines:
        for segment, fetched, freed in zip(line.segments, line.fetches, line.frees, strict=True):
            for interval in fetched:
                _enter(emitter, demand, interval, overwritten.get(interval, frozenset()))
            emitter.run(segment)
            for interval in freed:
                _leave(emitter, demand, interval, landed[interval], joins=interval is last_reduced)
        result.append(emitter.take())
    return tuple(result)


def _groups(layout: Layout, chunks: range) -> range:
    return range(chunks[0] // layout.world_size, chunks[-1] // layout.world_size + 1)


def _overwritten(
    layout: Layout, demand: Demand, lines: tuple[Timeline, Timeline]
) -> dict[ResidencyInterval, frozenset[int]]:
    """By interval, the groups of which nothing is read, and in which gradients of all parameters land.

    An interval that begins in forward has none: some group of its block is read there, and all of them come together.
    """
    segments = [segment for line in lines for segment in line.segments]
    reads = [{c // layout.world_size for c in layout.chunks_of(s.reads)} for s in segments]
    params: dict[int, set[int]] = {}
    for placement in layout.placements:
        for chunk in placement.chunks:
            params.setdefault(chunk // layout.world_size, set()).add(placement.param)
    fetches = (fetched for line in lines for fetched in line.fetches)
    begins = {interval: i for i, fetched in enumerate(fetches) for interval in fetched}
    frees = (freed for line in lines for freed in line.frees)
    ends = {interval: i for i, freed in enumerate(frees) for interval in freed if interval.dirty}
    num_forward, found = len(lines[0].segments), {}
    for interval in (interval for interval in ends if begins[interval] >= num_forward):
        span = range(begins[interval], ends[interval] + 1)
        landed = {param for j in span for param in segments[j].lands}
        groups = _groups(layout, block_chunks(layout, demand, interval.block))
        unread = [g for g in groups if g in params and not any(g in reads[j] for j in span)]
        found[interval] = frozenset(g for g in unread if params[g] <= landed)
    return found


def _enter(emitter: ActionEmitter, demand: Demand, interval: ResidencyInterval, overwritten: frozenset[int]) -> None:
    """Bring the chunks of an interval; of groups ``overwritten`` nothing but the own chunk."""
    layout = emitter.layout
    chunks = block_chunks(layout, demand, interval.block)
    is_grad = layout.chunks[chunks[0]].list is ChunkList.GRAD
    for position, chunk in enumerate(chunks):
        slot = interval.slot_range * layout.world_size + position
        if layout.owner(chunk) == layout.rank:
            emitter.fetch(chunk, slot)
        elif is_grad or chunk // layout.world_size in overwritten:
            emitter.open(chunk, slot)
    if layout.world_size > 1 and not is_grad:
        for group in _groups(layout, chunks):
            if group not in overwritten:
                emitter.gather(group)


def _leave(
    emitter: ActionEmitter, demand: Demand, interval: ResidencyInterval, landed: tuple[int, ...], *, joins: bool
) -> None:
    """The last uses of an interval's slots.

    Computing goes on beside a reduction, except beside the last one (``joins``), which orders later iterations behind
    all of them.
    """
    layout = emitter.layout
    chunks = block_chunks(layout, demand, interval.block)
    is_reduced = layout.world_size > 1 and interval.dirty
    last_use = Stream.COMM if is_reduced and not joins else Stream.COMPUTE
    reduced = {chunk // layout.world_size for chunk in landed}
    if layout.world_size > 1:
        for group in _groups(layout, chunks):
            if group in reduced:
                emitter.reduce(group)
            emitter.release(group, last_use)
    for chunk in chunks:
        if layout.owner(chunk) == layout.rank:
            if chunk in landed:
                emitter.evict(chunk)
            else:
                emitter.drop(chunk, last_use)


def write_resident(layout: Layout, lines: tuple[Timeline, Timeline]) -> tuple[tuple[ActionAccess, ...], ...]:
    """The accesses of a resident plan of several ranks, in which chunk ``i`` stands in slot ``i``."""
    emitter = ActionEmitter(layout, payload_residents(static_payloads(layout)))
    used = [c for c in layout.chunks if c.list is not ChunkList.UNUSED]
    gathered = sorted({c.index // layout.world_size for c in used if c.list is not ChunkList.GRAD})
    first, last = _landings(layout, lines[1])
    result = []
    for line in lines:
        if line.graph == "forward":
            for group in gathered:
                emitter.gather(group)
        for segment in line.segments:
            for group in sorted(g for g, name in first.items() if name == segment.name and g not in gathered):
                emitter.open_remote(group)
            emitter.run(segment)
            for group in sorted(g for g, name in last.items() if name == segment.name):
                emitter.reduce(group)
                emitter.release(group, Stream.COMM)
        if line.graph == "backward":
            for group in gathered:
                if group not in last:
                    emitter.release(group)
        result.append(emitter.take())
    return tuple(result)


def _landings(layout: Layout, backward: Timeline) -> tuple[dict[int, str], dict[int, str]]:
    """Segments of each group: of its first landing, and the one behind which it may be reduced.

    That is the segment of the last landing, or of the last read of a parameter that another graph trains.
    """
    first: dict[int, str] = {}
    last: dict[int, str] = {}
    grad_chunks = layout.grad_chunks()
    for segment in backward.segments:
        for chunk in layout.chunks_of(segment.lands):
            group = grad_chunks.get(chunk, chunk) // layout.world_size
            first.setdefault(group, segment.name)
            last[group] = segment.name
        read = {chunk // layout.world_size for chunk in layout.chunks_of(segment.reads)}
        last.update(dict.fromkeys(read & first.keys(), segment.name))
    return first, last


@dataclass(frozen=True, slots=True)
class CommunicationPass:
    """Decides ``actions`` of forward and backward, without waits."""

    name: str = "communication"
    requires: frozenset[str] = frozenset({"mapping", "os_home", "segments", "prefetch"})
    provides: frozenset[str] = frozenset({"actions"})
    conflicts: frozenset[str] = frozenset({"programs"})

    def __call__(self, draft: Draft) -> Draft:
        layout, demand = decided(draft.layout, "layout"), decided(draft.demand, "demand")
        lines = decided(draft.timelines, "prefetch")
        if draft.is_resident and layout.world_size > 1:
            forward, backward = write_resident(layout, lines)
        else:
            forward, backward = write_intervals(layout, demand, lines)
        if draft.moves:
            forward = with_moves(forward, lines[0].segments, draft.moves)
            backward = with_moves(backward, lines[1].segments, draft.moves)
        collectives = sum(i.action.stream is Stream.COMM for i in (*forward, *backward))
        return replace(draft, accesses=(forward, backward), note=f"{collectives} collectives")
