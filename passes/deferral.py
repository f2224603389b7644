"""Micro-batches that exchange nothing before the last one of a step.

Every chunk must have a slot of its own: plans whose chunks come and go have no memory for a whole copy of the
gradients. Groups stay gathered, and gradients for other ranks' chunks add up where they land (DDP: ``no_sync``). The
programs repeat ``forward``, ``backward`` and ``accumulate`` with ``keep`` in place of exchanges; ``reduce_all`` makes
up for them when a step, or anything that wants to see gradients, comes early.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from chunkc.ir.actions import Op, Stream
from chunkc.ir.layout import ChunkList, Home, Layout
from chunkc.ir.plan import Program, State
from chunkc.ir.verify.structure import WITHOUT_EXCHANGES
from chunkc.passes.communication import ActionEmitter
from chunkc.passes.norms import with_norms
from chunkc.passes.support.draft import ActionAccess, Draft, decided
from chunkc.passes.support.hazards import joined


def defers_reduction(draft: Draft) -> bool:
    """Whether micro-batches before the last can do without exchanges: all gradients must land in it."""
    layout = decided(draft.layout, "layout")
    trained = {p.param for p in layout.placements if p.num_chunks and layout.chunks[p.chunk].list is ChunkList.TRAINED}
    is_shared = layout.world_size > 1 and draft.options.accumulate > 1
    return is_shared and draft.os_home is Home.DEVICE and trained <= draft.schedule.trained_params()


def without_exchanges(name: str, twin: Program, entry: State, exit_state: State) -> Program:
    """The program ``name`` of `WITHOUT_EXCHANGES`: that of its twin, which has other exchanges."""
    _, exchanges = WITHOUT_EXCHANGES[name]
    actions = (replace(a, op=Op.KEEP, slot=None) if a.op in exchanges else a for a in twin.actions)
    return Program(name, twin.role, entry, exit_state, tuple(actions))


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
    layout: Layout, accesses: tuple[ActionAccess, ...], programs: Mapping[str, Program], *, tracks_grad_norm: bool
) -> tuple[Program, ...]:
    """Programs of micro-batches that exchange nothing; ``accesses`` are those of backward."""
    saved, graded = programs["backward"].entry, programs["backward"].exit
    opened = [(a.target, a.slot) for a in programs["backward"].actions if a.op is Op.OPEN and a.slot is not None]
    unreduced = State("unreduced", (*saved.resident, *opened))
    reduce = joined(reduce_accesses(layout, accesses, unreduced, tracks_grad_norm=tracks_grad_norm))
    return (
        without_exchanges("forward_again", programs["forward"], unreduced, unreduced),
        without_exchanges("backward_unreduced", programs["backward"], saved, unreduced),
        without_exchanges("accumulate_unreduced", programs["accumulate"], unreduced, unreduced),
        without_exchanges("accumulate_last", programs["accumulate"], unreduced, graded),
        Program("reduce_all", "transition", unreduced, graded, reduce),
    )
