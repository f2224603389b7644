"""Measuring gradients: where their norms are taken, and the decision that updates wait for.

Clipping by the global norm and dynamic loss scaling need all gradients before the first update. So each chunk is
measured as soon as its last gradient has landed, while backward goes on; and the step begins with one decision, the
only barrier: no update starts before it.

Where ranks share groups, each measures what it owns once that is reduced, in the queue of the reductions, so that the
compute stream does not wait for them; and backward ends with one sum over all ranks. It stands behind
everything else that ranks exchange, so that all exchange in the same order; a rank of padding takes part as well.

Where micro-batches add up, each backward measures the sums so far, since any may turn out to be the last of its step.
That reads each sum once more from the device's memory; measuring in the step would copy it over the bus.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from chunkc.ir.actions import LANDINGS, Action, Op, Stream
from chunkc.ir.layout import Layout
from chunkc.passes.support.draft import ActionAccess

_DECISION = "decision"
_SUMS = "sums"


def norm_name(chunk: int) -> str:
    """The resource name of a chunk's norm."""
    return f"n{chunk}"


def with_norms(layout: Layout, backward: Sequence[ActionAccess]) -> tuple[ActionAccess, ...]:
    """``backward`` with a norm behind each own chunk's last landing or reduction, and their sum."""
    last: dict[int, int] = {}
    for position, access in enumerate(backward):
        if access.action.op in (*LANDINGS, Op.REDUCE):
            last[_own_chunk(layout, access.action)] = position
    trained = {c.index for c in layout.owned() if c.os_home is not None and c.used_numel}
    due = {position: chunk for chunk, position in last.items() if chunk in trained}
    measured: list[ActionAccess] = []
    for position, access in enumerate(backward):
        measured.append(access)
        if position in due:
            chunk = due[position]
            norm = Action(Op.NORM, f"c{chunk}", Stream.COMPUTE if layout.world_size == 1 else Stream.COMM)
            measured.append(ActionAccess(norm, access.writes, (norm_name(chunk),)))
    if layout.world_size > 1:
        measured.append(ActionAccess(Action(Op.SUM, "", Stream.COMM), _norms_of(measured), (_SUMS,)))
    return tuple(measured)


def _norms_of(accesses: Sequence[ActionAccess]) -> tuple[str, ...]:
    """The resource names of all norms among ``accesses``."""
    return tuple(name for access in accesses if access.action.op is Op.NORM for name in access.writes)


def _own_chunk(layout: Layout, action: Action) -> int:
    """The chunk whose gradients an action leaves somewhere: of a reduced group that of this rank."""
    chunk = layout.groups[action.index].chunks[layout.rank] if action.target[0] == "g" else action.index
    partner = layout.chunks[chunk].partner
    return chunk if partner is None else partner


def with_decision(
    layout: Layout, backward: Sequence[ActionAccess], step: Sequence[ActionAccess]
) -> tuple[ActionAccess, ...]:
    """``step`` behind the decision on the norms that ``backward`` takes, or on their sum over ranks."""
    reads = _norms_of(backward) if layout.world_size == 1 else (_SUMS,)
    decide = ActionAccess(Action(Op.DECIDE, "", Stream.COMPUTE), reads, (_DECISION,))
    updates = (replace(x, reads=(*x.reads, _DECISION)) if x.action.op is Op.UPDATE else x for x in step)
    return (decide, *updates)
