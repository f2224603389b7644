"""Micro-batches that exchange nothing before the last one of a step.

Every chunk must have a slot of its own: plans whose chunks come and go have no memory for a whole copy of the
gradients. Groups stay gathered, and gradients for other ranks' chunks add up where they land (DDP: ``no_sync``). The
programs repeat ``forward``, ``backward`` and ``accumulate`` without exchanges; ``reduce_all`` makes up for them when a
step, or anything that wants to see gradients, comes early.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

from chunkc.ir.actions import Action, Op, Stream
from chunkc.ir.layout import ChunkList, Layout
from chunkc.ir.plan import Position, Program, State
from chunkc.passes.communication import ActionEmitter
from chunkc.passes.norms import with_norms
from chunkc.passes.support.draft import ActionAccess, Draft, decided
from chunkc.passes.support.hazards import joined


def defers_reduction(draft: Draft) -> bool:
    """Whether micro-batches before the last can do without exchanges: all gradients must land in it."""
    layout = decided(draft.layout, "layout")
    trained = {p.param for p in layout.placements if p.num_chunks and layout.chunks[p.chunk].list is ChunkList.TRAINED}
    is_shared = layout.world_size > 1 and draft.options.accumulate > 1
    return is_shared and draft.is_resident and trained <= draft.schedule.trained_params()


def variant(twin: Program, entry: State, exit_state: State, position: Position, *, reduces: bool) -> Program:
    """The program that repeats ``twin`` but for what it leaves out."""
    program = replace(twin, entry=entry, exit=exit_state, position=position, reduces=reduces)
    kept = _ordered_alike(twin, program.left_out)
    return replace(program, actions=tuple(kept.values()), numbers=tuple(kept))


def _ordered_alike(twin: Program, left_out: Set[Op]) -> dict[int, Action]:
    """The other actions of ``twin`` by number, each behind all others that it is behind in ``twin``.

    Where a left-out action stood, an order that went through it goes on: who waited for it, or follows it on its
    stream, waits for what it waited for and for the last action on its stream.
    """
    kept: dict[int, Action] = {}
    behind: dict[str, tuple[str, ...]] = {}  # by label of a left-out action: labels of kept ones and other programs
    owed: dict[Stream, tuple[str, ...]] = {}
    latest: dict[Stream, str] = {}
    for number, (label, action) in enumerate(twin.labelled()):
        waits = (*(w for each in action.waits for w in (each, *behind.get(each, ()))), *owed.get(action.stream, ()))
        if action.op in left_out:
            owed[action.stream] = waits
            behind[label] = (*waits, *((latest[action.stream],) if action.stream in latest else ()))
        else:
            kept[number] = replace(action, waits=tuple(dict.fromkeys(waits)))
            owed[action.stream], latest[action.stream] = (), label
    return kept


def reduce_accesses(
    layout: Layout, backward: tuple[ActionAccess, ...], entry: State, *, tracks_grad_norm: bool
) -> tuple[ActionAccess, ...]:
    """Reduce and release what stands on the device at ``entry``, in the order of ``backward``."""
    emitter = ActionEmitter(layout, entry.resident)
    for action in (access.action for access in backward):
        if action.op is Op.REDUCE:
            emitter.reduce(action.index)
        elif action.op is Op.RELEASE:
            emitter.release(action.index, Stream.COMM)
    return with_norms(layout, emitter.take()) if tracks_grad_norm else emitter.take()


def deferring_programs(
    layout: Layout, accesses: tuple[ActionAccess, ...], graphs: Sequence[Program], *, tracks_grad_norm: bool
) -> tuple[Program, ...]:
    """Programs of micro-batches that exchange nothing, from forward and both backwards (``accesses``)."""
    forward, backward, accumulate = graphs
    saved, graded = backward.entry, backward.exit
    opened = [(a.target, a.slot) for a in backward.actions if a.op is Op.OPEN and a.slot is not None]
    unreduced = State("unreduced", (*saved.resident, *opened))
    reduce = joined(reduce_accesses(layout, accesses, unreduced, tracks_grad_norm=tracks_grad_norm))
    return (
        variant(forward, unreduced, unreduced, "later", reduces=False),
        variant(backward, saved, unreduced, "first", reduces=False),
        variant(accumulate, unreduced, unreduced, "later", reduces=False),
        variant(accumulate, unreduced, graded, "last", reduces=True),
        Program("reduce_all", unreduced, graded, reduce),
    )
