"""Base segments: runs of operators that need the same chunk blocks, with their non-model bytes.

A new segment starts whenever an operator needs a block outside the current segment's set, which the first operator with
needs fixes; so a segment never needs more than one operator does, and the smallest arena follows from single operators.
"""

from __future__ import annotations

from collections.abc import Sequence

from chunkc.ir.schedule import GraphKind
from chunkc.passes.support.draft import BaseSegment, ChunkBlocks, GraphCosts, Liveness

GRAPHS: tuple[GraphKind, GraphKind] = ("forward", "backward")


def base_segments(
    liveness: Liveness, blocks: ChunkBlocks, cuts: tuple[tuple[int, ...], tuple[int, ...]] | None, keep_open: bool
) -> tuple[BaseSegment, ...]:
    """Base segments of both graphs; per graph, one must start at each operator of ``cuts``.

    ``keep_open``: whether a block in which gradients have begun to land must stay until all have (several ranks, where
    gradients overlay parameters: a chunk is reduced once and whole).
    """
    segments: list[BaseSegment] = []
    for which, graph in enumerate(GRAPHS):
        needs = block_needs(liveness, blocks, which, keep_open)
        starts = _starts(needs, () if cuts is None else cuts[which])
        segments.extend(_segments(graph, which, starts, needs, liveness))
    return tuple(segments)


def block_needs(liveness: Liveness, blocks: ChunkBlocks, which: int, keep_open: bool) -> list[tuple[int, ...]]:
    """The blocks that each operator of graph ``which`` needs, ascending."""
    of_param = blocks.of_param
    wanted = [{of_param[p] for p in op if of_param[p] >= 0} for op in liveness.needs[which]]
    if which == 1:
        for param in liveness.trained:
            wanted[liveness.landing_op[param]].update(blocks.of_grad[param])
    needs = [tuple(sorted(need)) for need in wanted]
    return _with_open(liveness, blocks, needs) if keep_open and which == 1 else needs


def _with_open(liveness: Liveness, blocks: ChunkBlocks, needs: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Add to each operator of backward with needs the blocks whose gradients have begun to land."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for param in liveness.trained:
        block, landing = blocks.of_param[param], liveness.landing_op[param]
        if block >= 0:
            first[block] = min(first.get(block, landing), landing)
            last[block] = max(last.get(block, landing), landing)
    opened: list[list[int]] = [[] for _ in needs]
    for block in sorted(first):
        opened[first[block]].append(block)
    current: set[int] = set()
    result = []
    for index, need in enumerate(needs):
        current = {block for block in current if last[block] >= index}.union(opened[index])
        result.append(tuple(sorted(current.union(need))) if need else need)
    return result


def _starts(needs: list[tuple[int, ...]], cuts: Sequence[int]) -> list[int]:
    if not needs:
        return []
    starts, forced = [0], set(cuts)
    current: set[int] | None = None
    for index, need in enumerate(needs):
        if index in forced and index > 0:
            starts.append(index)
            current = None
        if not need:
            continue
        if current is None:
            current = set(need)
        elif not current.issuperset(need):
            starts.append(index)
            current = set(need)
    return starts


def _segments(
    graph: GraphKind, which: int, starts: list[int], needs: list[tuple[int, ...]], liveness: Liveness
) -> list[BaseSegment]:
    lands: list[list[int]] = [[] for _ in needs]
    if graph == "backward":
        for param in liveness.trained:
            lands[liveness.landing_op[param]].append(param)
    result = []
    costs = segment_costs(liveness.costs[which], starts)
    for (first, end), (live, workspace) in zip(ranges(starts, len(needs)), costs, strict=True):
        wanted = tuple(sorted({block for need in needs[first:end] for block in need}))
        landing = tuple(p for op in lands[first:end] for p in op)
        landed_nbytes = sum(liveness.costs[which].landed[first:end])
        result.append(BaseSegment(graph, first, end, wanted, landing, landed_nbytes, live, workspace))
    return result


def ranges(starts: Sequence[int], num_ops: int) -> list[tuple[int, int]]:
    """``(first_op, end_op)`` of the segments that start at ``starts``."""
    return list(zip(starts, (*starts[1:], num_ops), strict=True)) if starts else []


def segment_costs(costs: GraphCosts, starts: Sequence[int]) -> list[tuple[int, int]]:
    """Return ``(live_nbytes, workspace_nbytes)`` of each segment.

    Live are operators' non-model bytes and final gradients that have not landed: those of the segment itself until its
    end. What crosses a segment's beginning, and would not have been made without the cut, is alive until its last read,
    and what crosses its end from then on. The workspace is what kernels take the segment's peak above that.
    """
    result = []
    pending = 0
    crossing = (*(costs.crossing or [0] * len(costs.live)), 0)
    for first, end in ranges(starts, len(costs.live)):
        live = peak = 0
        carried = crossing[first]
        for index in range(first, end):
            carried = min(carried, crossing[index])
            nbytes = costs.live[index] + pending + carried
            live = max(live, nbytes)
            peak = max(peak, nbytes + costs.workspace[index])
            pending += costs.made[index]
        live = max(live, costs.live_after[end - 1] + pending + crossing[end])
        pending -= sum(costs.landed[first:end])
        result.append((live, max(peak - live, 0)))
    return result
