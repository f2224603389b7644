"""Pass ``step``: the programs of an iteration beside forward and backward, and all waits.

    restore       repeats the step (`chunkc.passes.support.updates`) action for action without updating
    accumulate    the backward of every micro-batch but the first, which ``backward`` repeats action for action with
                  gradient chunks opened, not fetched, and gradients stashed, not added
    abandon       from the end of forward back to the cold state
    resume        from there to where forward ends, for a backward that comes after something else ran

Programs of micro-batches that exchange nothing: `chunkc.passes.deferral`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from chunkc.ir.actions import Action, Op, Stream
from chunkc.ir.layout import ChunkList, Layout
from chunkc.ir.occupancy import Occupancy
from chunkc.ir.plan import Phase, Program, State
from chunkc.ir.tiers import Tier
from chunkc.passes.communication import ActionEmitter, payload_residents, slot_name
from chunkc.passes.deferral import deferring_programs, defers_reduction
from chunkc.passes.norms import with_decision, with_norms
from chunkc.passes.support.arena import shared_bytes, static_payloads, static_states
from chunkc.passes.support.draft import ActionAccess, Draft, decided
from chunkc.passes.support.hazards import joined, synchronise
from chunkc.passes.support.second_homes import with_begins
from chunkc.passes.support.update_order import host_order
from chunkc.passes.support.updates import on_host, step_accesses

_ACCUMULATED = "accumulated"


def standing(accesses: tuple[ActionAccess, ...], static: dict[int, int], layout: Layout) -> dict[int, int]:
    """Chunk -> slot after ``accesses``, of which ``static`` stood there before."""
    occupancy = Occupancy.of(layout, payload_residents(static))
    for access in accesses:
        occupancy.apply(access.action)
    return occupancy.chunk_slots()


def abandon_accesses(layout: Layout, slots: dict[int, int], static: dict[int, int]) -> tuple[ActionAccess, ...]:
    """Drop what forward left on the device beyond the static residents."""
    emitter = ActionEmitter(layout, payload_residents(slots))
    if layout.world_size > 1:
        for group in sorted({c // layout.world_size for c in slots if layout.owner(c) != layout.rank}):
            emitter.release(group)
    for chunk in sorted(c for c in slots if layout.owner(c) == layout.rank and c not in static):
        emitter.drop(chunk)
    return emitter.take()


def resume_accesses(layout: Layout, slots: dict[int, int], static: dict[int, int]) -> tuple[ActionAccess, ...]:
    """Fetch what forward leaves on the device beyond the static residents."""
    emitter = ActionEmitter(layout, payload_residents(static))
    for chunk in sorted(c for c in slots if layout.owner(c) == layout.rank and c not in static):
        emitter.fetch(chunk, slots[chunk])
    for group in sorted({c // layout.world_size for c in slots if layout.owner(c) != layout.rank}):
        emitter.gather(group)
    return emitter.take()


def static_residents(layout: Layout) -> tuple[dict[int, int], tuple[tuple[str, int], ...]]:
    """Payloads (chunk -> slot) that never move, and states that never move as a state lists them."""
    return static_payloads(layout), tuple((f"os{chunk}", slot) for chunk, slot in static_states(layout).items())


def seen_by_backward(
    forward: tuple[ActionAccess, ...], backward: tuple[ActionAccess, ...], step: tuple[ActionAccess, ...]
) -> tuple[tuple[ActionAccess, ...], ...]:
    """Make the last computation before a step follow the end of the step before.

    A step's own labels mean the running one, so backward must wait where a step copies home, or updates by a decision,
    what no graph touches.
    """
    ends = [[i for i, access in enumerate(step) if access.action.stream is Stream.D2H]]
    if any(access.action.op is Op.DECIDE for access in step):
        ends.append([i for i, access in enumerate(step) if access.action.stream is Stream.CPU])
    graphs = [list(forward), list(backward)]
    last = [
        (g, i) for g, accesses in enumerate(graphs) for i, x in enumerate(accesses) if x.action.stream is Stream.COMPUTE
    ]
    accesses = list(step)
    for position in (positions[-1] for positions in ends if positions and last):
        name = f"end of {accesses[position].action.stream}"
        graph, index = last[-1]
        seeing = graphs[graph][index]
        graphs[graph][index] = replace(seeing, reads=(*seeing.reads, name))
        accesses[position] = replace(accesses[position], writes=(*accesses[position].writes, name))
    return tuple(graphs[0]), tuple(graphs[1]), tuple(accesses)


def seen_by_forward(
    forward: tuple[ActionAccess, ...], backward: tuple[ActionAccess, ...]
) -> tuple[tuple[ActionAccess, ...], tuple[ActionAccess, ...]]:
    """Make forward follow the last copy home of the backward before, which the next backward fetches."""
    copies = [i for i, access in enumerate(backward) if access.action.stream is Stream.D2H]
    runs = [i for i, access in enumerate(forward) if access.action.op is Op.RUN]
    if not copies or not runs:
        return forward, backward
    first, second = list(forward), list(backward)
    run, copy = runs[len(runs) // 2], copies[-1]
    first[run] = replace(first[run], reads=(*first[run].reads, _ACCUMULATED))
    second[copy] = replace(second[copy], writes=(*second[copy].writes, _ACCUMULATED))
    return tuple(first), tuple(second)


def first_of_step(actions: tuple[Action, ...], layout: Layout) -> tuple[Action, ...]:
    """Turn ``actions`` of a backward that adds to gradients into those of a step's first micro-batch."""
    first, opened = [], set[str]()
    for action in actions:
        op = action.op
        if op is Op.FETCH and layout.chunks[action.index].list is ChunkList.GRAD and action.target not in opened:
            opened.add(action.target)
            op = Op.OPEN
        first.append(replace(action, op=Op.STASH if op is Op.ADD else op))
    return tuple(first)


@dataclass(frozen=True, slots=True)
class StepPass:
    """Decides ``programs``, with waits."""

    name: str = "step"
    requires: frozenset[str] = frozenset({"liveness", "mapping", "os_home", "segments", "actions"})
    provides: frozenset[str] = frozenset({"programs"})
    conflicts: frozenset[str] = frozenset()

    def __call__(self, draft: Draft) -> Draft:
        layout, home = decided(draft.layout, "layout"), decided(draft.os_home, "os_home")
        forward, backward = decided(draft.accesses, "actions")
        liveness, share = decided(draft.liveness, "liveness"), draft.options.streamed_share
        updates = step_accesses(layout, liveness, share, host_order(draft, on_host(layout, liveness, share)))
        if draft.options.tracks_grad_norm:
            backward = with_norms(layout, backward)
            updates = with_decision(layout, backward, updates)
        forward, backward, step = seen_by_backward(forward, backward, updates)
        backward = with_begins(layout, backward)
        accumulates = draft.options.accumulate > 1
        if accumulates:
            forward, backward = seen_by_forward(forward, backward)
        static, states = static_residents(layout)
        saved = standing(forward, static, layout)
        abandon = abandon_accesses(layout, saved, static)
        overlaps = {slot_name(s): tuple(map(slot_name, others)) for s, others in shared_bytes(layout).items()}
        actions = synchronise(forward, backward, step, abandon, overlaps, accumulates=accumulates)
        resume = joined(resume_accesses(layout, saved, static))

        def state(phase: Phase, slots: dict[int, int]) -> State:
            return State(phase, (*payload_residents(slots), *states))

        cold, between, graded = state("cold", static), state("saved", saved), state("graded", static)
        restores = tuple(replace(a, op=Op.RESTORE) if a.op is Op.UPDATE else a for a in actions[2])
        graphs = [
            Program("forward", cold, between, actions[0]),
            Program("backward", between, graded, first_of_step(actions[1], layout)),
        ]
        if accumulates:
            graphs.append(Program("backward", between, graded, actions[1], "later"))
        programs = (
            *graphs,
            Program("step", graded, cold, actions[2]),
            Program("restore", graded, cold, restores),
            Program("abandon", between, cold, actions[3]),
            Program("resume", cold, between, resume),
        )
        if defers_reduction(draft):
            accesses = decided(draft.accesses, "actions")[1]
            programs += deferring_programs(layout, accesses, graphs, tracks_grad_norm=draft.options.tracks_grad_norm)
        waits = sum(len(a.waits) for p in programs for a in p.actions)
        streams = [a.stream for a in actions[2] if a.op is Op.UPDATE]
        counts = ((streams.count(Stream.COMPUTE), Tier.DEVICE), (streams.count(Stream.CPU), Tier.HOST))
        updated = ", ".join(f"{count} updates on the {at}" for count, at in counts if count or at is home)
        return replace(draft, programs=programs, note=f"{updated}, {waits} waits")
