"""Second homes, and the updates that are begun into them while backward runs.

Clipping, loss scaling, and a `step()` that is called only after backward hold every update until backward has ended,
and the host idles meanwhile. An update that is not permitted yet can be computed all the same, into memory that nobody
reads: the *second home* of a chunk. The step commits it, or computes anew where it turns out otherwise.

    backward     ... evict c7   evict c6   evict c5 ...
    host             begin c7      begin c6      begin c5
    step                                               decide   update c7 c6 c5 (nothing is left to do)   update c0 ...

Chunks whose gradients land first have most of backward for their updates, and they are due last in the next forward: so
second homes go to chunks in the order in which their gradients land. SuperOffload (Lian et al., 2025) begins updates in
place instead, and rolls back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from chunkc.ir.actions import Action, Op, Stream
from chunkc.ir.layout import Chunk, ChunkList, Layout
from chunkc.ir.tiers import Tier
from chunkc.passes.communication import home_name, states_name
from chunkc.passes.support.draft import ActionAccess, Liveness, Target
from chunkc.passes.support.resident_states import streamed_chunks


def second_home_name(chunk: int) -> str:
    """The resource name of the second home of a chunk's payload and states."""
    return f"s{chunk}"


def candidates(layout: Layout, liveness: Liveness, share: float) -> tuple[Chunk, ...]:
    """This rank's chunks that the host updates, in the order in which gradients land.

    ``share`` of the states is streamed through the device. All ranks list the same groups; a chunk of padding stands
    for its group.
    """
    landing: dict[int, int] = {}
    for placement in layout.placements:
        for chunk in placement.chunks:
            group = layout.group_of(chunk).index
            landing[group] = max(landing.get(group, -1), liveness.landing_op[placement.param])
    streamed = set(streamed_chunks(layout, liveness, share))
    of_host = [
        c
        for c in layout.owned()
        if c.list is ChunkList.TRAINED and not c.is_resident and c.has_os_below and c.index not in streamed
    ]
    landed = [(landing.get(layout.group_of(c.index).index, -1), c) for c in of_host]
    return tuple(c for op, c in sorted(landed, key=lambda pair: (pair[0], pair[1].index)) if op >= 0)


def with_second_homes(layout: Layout, liveness: Liveness, target: Target, share: float, num: int) -> Layout:
    """``layout`` with ``num`` second homes of this rank, or as many as host memory has room for."""
    left_nbytes = target.budget_nbytes(Tier.HOST) - layout.nbytes_in(Tier.HOST)
    groups = set()
    for chunk in candidates(layout, liveness, share)[:num]:
        left_nbytes -= layout.second_home_nbytes_of(chunk)
        if left_nbytes < 0:
            break
        groups.add(layout.group_of(chunk.index).index)
    chunks = (replace(c, has_second_home=layout.group_of(c.index).index in groups) for c in layout.chunks)
    return replace(layout, chunks=tuple(chunks))


def with_begins(layout: Layout, backward: Sequence[ActionAccess]) -> tuple[ActionAccess, ...]:
    """``backward`` with the updates of chunks with second homes begun as their gradients come home."""
    grad_chunks = layout.grad_chunks()
    at_home = {x.action.target: position for position, x in enumerate(backward) if x.action.op is Op.EVICT}
    begun: dict[int, Chunk] = {}
    for chunk in layout.owned():
        position = at_home.get(f"c{grad_chunks.get(chunk.index, chunk.index)}")
        if chunk.has_second_home and chunk.used_numel and position is not None:
            begun[position] = chunk
    accesses: list[ActionAccess] = []
    for position, access in enumerate(backward):
        accesses.append(access)
        if position in begun:
            chunk = begun[position]
            holder = grad_chunks.get(chunk.index, chunk.index)
            begin = Action(Op.BEGIN, f"c{chunk.index}", Stream.CPU)
            reads = (home_name(holder), states_name(chunk.index))
            accesses.append(ActionAccess(begin, reads, (second_home_name(chunk.index),)))
    return tuple(accesses)
