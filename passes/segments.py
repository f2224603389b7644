"""Base segments: runs of operators that need the same chunk blocks, with their non-model bytes.

A new segment starts whenever an operator needs a block outside the current segment's set, which the first operator with
needs fixes; so a segment never needs more than one operator does, and the smallest arena follows from single operators.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from operator import add

from chunkc.ir.schedule import GraphKind
from chunkc.passes.support.draft import BaseSegment, BlockNeeds, ChunkBlocks, GraphCosts, Liveness

GRAPHS: tuple[GraphKind, GraphKind] = ("forward", "backward")
Cuts = tuple[tuple[int, ...], tuple[int, ...]] | None


def base_segments(liveness: Liveness, needs: BlockNeeds, cuts: Cuts) -> tuple[BaseSegment, ...]:
    """Base segments of both graphs by the blocks that operators need.

    Per graph, one begins at each operator of ``cuts``.
    """
    segments: list[BaseSegment] = []
    for which, graph in enumerate(GRAPHS):
        starts = _starts(needs[which], () if cuts is None else cuts[which])
        segments.extend(_segments(graph, which, starts, needs[which], liveness))
    return tuple(segments)


def block_needs(liveness: Liveness, blocks: ChunkBlocks, keep_open: bool) -> BlockNeeds:
    """Per graph, per operator: the blocks that it needs, ascending.

    ``keep_open``: whether a block in which gradients have begun to land must stay until all have (several ranks, where
    gradients overlay parameters: a chunk is reduced once and whole).
    """
    of_param = blocks.of_param
    wanted: tuple[dict[int, set[int]], dict[int, set[int]]] = ({}, {})
    for operators, needs in zip(wanted, liveness.needs, strict=True):
        for index, params in enumerate(needs):
            if params:
                operators[index] = {of_param[p] for p in params if of_param[p] >= 0}
    for param in liveness.trained:
        wanted[1].setdefault(liveness.landing_op[param], set()).update(blocks.of_grad[param])
    forward, backward = (_of_operators(w, len(n)) for w, n in zip(wanted, liveness.needs, strict=True))
    return forward, _with_open(liveness, blocks, backward) if keep_open else backward


def _of_operators(wanted: dict[int, set[int]], num_operators: int) -> list[tuple[int, ...]]:
    needs: list[tuple[int, ...]] = [()] * num_operators
    for index, blocks in wanted.items():
        needs[index] = tuple(sorted(blocks))
    return needs


def _with_open(liveness: Liveness, blocks: ChunkBlocks, needs: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Add to each operator of backward with needs the blocks whose gradients have begun to land."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for param in liveness.trained:
        block, landing = blocks.of_param[param], liveness.landing_op[param]
        if block >= 0:
            first[block] = min(first.get(block, landing), landing)
            last[block] = max(last.get(block, landing), landing)
    opened, closed = _by_operator(first), _by_operator(last)
    current: set[int] = set()
    result = list(needs)
    for index, need in enumerate(needs):
        current.update(opened.get(index, ()))
        if need:
            result[index] = tuple(sorted(current.union(need)))
        current.difference_update(closed.get(index, ()))
    return result


def _by_operator(of_block: dict[int, int]) -> dict[int, list[int]]:
    blocks: dict[int, list[int]] = {}
    for block, operator in of_block.items():
        blocks.setdefault(operator, []).append(block)
    return blocks


def _starts(needs: Sequence[tuple[int, ...]], cuts: Sequence[int]) -> list[int]:
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
    graph: GraphKind, which: int, starts: list[int], needs: Sequence[tuple[int, ...]], liveness: Liveness
) -> list[BaseSegment]:
    lands: dict[int, list[int]] = {}
    if graph == "backward":
        for param in liveness.trained:
            lands.setdefault(liveness.landing_op[param], []).append(param)
    landing_ops, landed_nbytes = sorted(lands), liveness.costs[which].landed
    costs = segment_costs(liveness.costs[which], starts)
    result = []
    for (first, end), (live, workspace) in zip(ranges(starts, len(needs)), costs, strict=True):
        wanted = tuple(sorted({block for need in needs[first:end] if need for block in need}))
        within = landing_ops[bisect_left(landing_ops, first) : bisect_left(landing_ops, end)]
        landing = tuple(p for op in within for p in lands[op])
        result.append(BaseSegment(graph, first, end, wanted, landing, sum(landed_nbytes[first:end]), live, workspace))
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
    made = [0, *accumulate(costs.made)]  # gradients before each operator, those that have landed too
    held = list(map(add, costs.live, made))
    crossing, landed = (*costs.crossing, 0), 0
    for first, end in ranges(starts, len(costs.live)):
        own = held[first:end]
        if costs.crossing and crossing[first]:
            own = list(map(add, own, accumulate(crossing[first:end], min)))
        peak = max(map(add, own, costs.workspace[first:end])) - landed
        after = costs.live_after[end - 1] + made[end] + (crossing[end] if costs.crossing else 0)
        live = max(*own, after) - landed
        landed += sum(costs.landed[first:end])
        result.append((live, max(peak - live, 0)))
    return result
