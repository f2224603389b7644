"""Pass ``step``: the order of updates, the other programs of an iteration, and all waits.

Updates come in the order in which the next forward first uses the chunks, so that it can start before the last update
has ended. ``restore`` repeats the step action for action without updating, so that labels agree whichever ran.
``abandon`` leads from the end of forward back to the cold state, ``resume`` from there to where forward ends, for a
backward that comes after something else ran.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from chunkc.ir.actions import Op, Stream
from chunkc.ir.layout import Home, Layout
from chunkc.ir.plan import Phase, Program, State
from chunkc.passes.communication import Writer, home_name, slot_name
from chunkc.passes.draft import Draft, Item, Liveness, decided
from chunkc.passes.hazards import joined, synchronise
from chunkc.passes.os_placement import os_slot


def update_order(layout: Layout, liveness: Liveness) -> tuple[int, ...]:
    """Own trained chunks in order of first use, those that only other graphs use last (padding is none)."""
    order: dict[int, None] = {}
    for param in liveness.use_order:
        order.update(dict.fromkeys(layout.placements[param].chunks))
    own = dict.fromkeys(c.index for c in layout.owned() if c.os_home is not None and c.used_numel)
    return (*(c for c in order if c in own), *(c for c in own if c not in order))


def step_items(layout: Layout, liveness: Liveness, home: Home) -> tuple[Item, ...]:
    """The updates of one step."""
    writer = Writer(layout)
    for chunk in update_order(layout, liveness):
        if home is Home.DEVICE:
            touched = [slot_name(chunk), slot_name(os_slot(layout, chunk))]
            writer.add(Op.UPDATE, f"c{chunk}", Stream.COMPUTE, [], touched)
        else:
            writer.add(Op.UPDATE, f"c{chunk}", Stream.CPU, [], [home_name(chunk), f"o{chunk}"])
    return writer.take()


def standing(items: tuple[Item, ...], static: dict[int, int], layout: Layout) -> dict[int, int]:
    """Chunk -> slot after ``items``, of which ``static`` stood there before."""
    where = dict(static)
    for item in items:
        action = item.action
        if action.op is Op.FETCH and action.slot is not None:
            where[action.index] = action.slot
        elif action.op in (Op.EVICT, Op.DROP):
            del where[action.index]
        elif action.op is Op.GATHER:
            group = layout.groups[action.index]
            first = where[group.chunks[layout.rank]] - layout.rank
            where.update({chunk: first + position for position, chunk in enumerate(group.chunks)})
        elif action.op is Op.RELEASE:
            chunks = layout.groups[action.index].chunks
            where = {c: s for c, s in where.items() if c not in chunks or layout.owner(c) == layout.rank}
    return where


def abandon_items(layout: Layout, where: dict[int, int], static: dict[int, int]) -> tuple[Item, ...]:
    """Drop what forward left on the device beyond the static residents."""
    writer = Writer(layout, slot_of=dict(where))
    if layout.world_size > 1:
        for group in sorted({c // layout.world_size for c in where if layout.owner(c) != layout.rank}):
            writer.release(group)
    for chunk in sorted(c for c in where if layout.owner(c) == layout.rank and c not in static):
        writer.drop(chunk)
    return writer.take()


def resume_items(layout: Layout, where: dict[int, int], static: dict[int, int]) -> tuple[Item, ...]:
    """Fetch what forward leaves on the device beyond the static residents."""
    writer = Writer(layout, slot_of=dict(static))
    own = [c for c in sorted(where) if layout.owner(c) == layout.rank]
    for chunk in own:
        if chunk not in static:
            writer.fetch(chunk, where[chunk])
    for group in sorted({c // layout.world_size for c in where if layout.owner(c) != layout.rank}):
        writer.gather(group)
    return writer.take()


def static_residents(layout: Layout) -> tuple[dict[int, int], tuple[tuple[str, int], ...]]:
    """Own payloads (chunk -> slot) that never move, and them with their triples as a state lists them."""
    payloads = {c.index: c.index for c in layout.owned() if c.home is Home.DEVICE}
    triples = [(f"os{c.index}", os_slot(layout, c.index)) for c in layout.owned() if c.os_home is Home.DEVICE]
    return payloads, tuple(triples)


@dataclass(frozen=True, slots=True)
class StepPass:
    """Decides ``programs``: forward, backward, step, restore, abandon and resume with all waits."""

    name: str = "step"
    requires: frozenset[str] = frozenset({"liveness", "mapping", "os_home", "actions"})
    provides: frozenset[str] = frozenset({"programs"})
    conflicts: frozenset[str] = frozenset()

    def __call__(self, draft: Draft) -> Draft:
        layout, home = decided(draft.layout, "layout"), decided(draft.os_home, "os_home")
        forward, backward = decided(draft.items, "actions")
        step = step_items(layout, decided(draft.liveness, "liveness"), home)
        static, triples = static_residents(layout)
        saved = standing(forward, static, layout)
        abandon = abandon_items(layout, saved, static)
        actions = synchronise(forward, backward, step, abandon)
        resume = joined(resume_items(layout, saved, static))

        def state(phase: Phase, where: dict[int, int]) -> State:
            return State(phase, (*((f"c{c}", s) for c, s in sorted(where.items())), *triples))

        cold, between, graded = state("cold", static), state("saved", saved), state("graded", static)
        restores = tuple(replace(a, op=Op.RESTORE) for a in actions[2])
        programs = (
            Program("forward", "forward", cold, between, actions[0]),
            Program("backward", "backward", between, graded, actions[1]),
            Program("step", "step", graded, cold, actions[2]),
            Program("restore", "step", graded, cold, restores),
            Program("abandon", "transition", between, cold, actions[3]),
            Program("resume", "transition", cold, between, resume),
        )
        waits = sum(len(a.waits) for p in programs for a in p.actions)
        return replace(draft, programs=programs, note=f"{len(step)} updates on the {home}, {waits} waits")
