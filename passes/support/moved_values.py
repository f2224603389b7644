"""Saved values that go to host memory between forward and backward, and when each goes and comes.

Forward is cut into *pieces*, its layers. A value belongs to the piece that uses it last. Pieces whose values move are
spread evenly, so that a copy has the time until the next such piece to hide in (vDNN, Rhu et al. 2016, moves whole
layers too, and waits for each): values of a piece leave the device when those of the next one begin to be copied, and
have device memory again when backward begins to read those of the next one.

    forward    piece 0 | offload 0     piece 1 | offload 1, discard 0     piece 2 | discard 1     piece 3
    backward   piece 3 | allocate 1, reload 1     piece 2 | allocate 0, reload 0     piece 1     piece 0
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate

from chunkc.ir.actions import Action, Op, Stream
from chunkc.ir.plan import MovedValue, Segment
from chunkc.ir.schedule import SavedValue, Schedule
from chunkc.passes.support.draft import ActionAccess, GraphCosts, PlanOptions, TimedMove
from chunkc.passes.support.resident_states import spread

MAX_PIECES = 256
"""Pieces beyond which neighbours are one: where a layer is called in a loop."""
NUM_PARTS = 8
"""Pieces of equal bytes, about, where modules have no numbers."""
SMALL_SHARE = 1 / 64
"""Of a piece's saved bytes on average: what is smaller takes longer to launch than to keep."""
_LAYER = re.compile(r"(?:.*?\.)?\d+(?=\.|$)")


def piece_starts(schedule: Schedule) -> list[int]:
    """Operators at which pieces start: where another numbered module begins, or bytes are enough."""
    operators = schedule.forward.operators
    starts, current = [0], ""
    for position, operator in enumerate(operators):
        layer = _LAYER.match(operator.layer)
        if layer is not None and layer[0] != current:
            if current:
                starts.append(position)
            current = layer[0]
    if len(starts) < 3:
        return _equal_parts(schedule.saved_values())
    return starts[:: -(-len(starts) // MAX_PIECES)]


def _equal_parts(values: Sequence[SavedValue]) -> list[int]:
    """Starts of pieces that save equally many bytes, about."""
    part_nbytes = sum(v.nbytes for v in values) / NUM_PARTS
    starts, taken = [0], 0
    for value in values:
        if taken >= part_nbytes and value.made_by > starts[-1]:
            starts.append(value.made_by)
            taken = 0
        taken += value.nbytes
    return starts


def movable(schedule: Schedule) -> dict[int, list[MovedValue]]:
    """By piece, ascending, the values that may move, and are not small."""
    values, starts = schedule.saved_values(), piece_starts(schedule)
    least_nbytes = max(1.0, sum(v.nbytes for v in values) / len(starts) * SMALL_SHARE)
    pieces: dict[int, list[MovedValue]] = {}
    piece_of = _positions(starts, len(schedule.forward.operators))
    for index, value in enumerate(values):
        if value.used_until is not None and value.nbytes >= least_nbytes:
            reach = (min(value.read_by), max(value.read_by))
            moved = MovedValue(index, value.nbytes, value.made_by, value.used_until, reach)
            pieces.setdefault(piece_of[value.used_until], []).append(moved)
    return dict(sorted(pieces.items()))


def movable_layers(schedule: Schedule) -> dict[int, list[MovedValue]]:
    """Of `movable`, the pieces that move as a whole: not the last ones, which are read again at once."""
    num_pieces = len(piece_starts(schedule))
    return {piece: values for piece, values in movable(schedule).items() if piece + 2 < num_pieces}


def _positions(starts: Sequence[int], num_ops: int) -> list[int]:
    """The piece of every operator."""
    marks = [0] * num_ops
    for start in starts[1:]:
        marks[start] += 1
    return list(accumulate(marks))


def choose_moves(schedule: Schedule, options: PlanOptions) -> tuple[TimedMove, ...]:
    """The moves that ``options`` ask for: ``fixed_moves``, or the share of pieces that move."""
    if schedule.is_evaluation or not (options.moved_share or options.fixed_moves):
        return ()
    if options.fixed_moves:
        wanted = frozenset(options.fixed_moves)
        pieces = {p: [v for v in values if v.index in wanted] for p, values in movable(schedule).items()}
        groups = [(piece, values) for piece, values in pieces.items() if values]
    else:
        layers = list(movable_layers(schedule).items())
        groups = [layers[i] for i in spread(len(layers), round(options.moved_share * len(layers)))]
    return _timed(schedule, piece_starts(schedule), groups)


def _timed(
    schedule: Schedule, starts: Sequence[int], groups: Sequence[tuple[int, Sequence[MovedValue]]]
) -> tuple[TimedMove, ...]:
    ends = [*starts[1:], len(schedule.forward.operators)]
    first_reads = [min(v.read_by[0] for v in values) for _, values in groups]
    reads = [(v.used_until, min(v.read_by)) for v in schedule.saved_values()]
    moves = []
    for position, (piece, values) in enumerate(groups):
        is_last = position + 1 == len(groups)
        discard_at = ends[min(piece + 1, len(ends) - 1)] if is_last else ends[groups[position + 1][0]]
        if is_last:
            following = range(ends[piece], discard_at)
            ahead = min((read for used, read in reads if used in following), default=0)
        else:
            ahead = first_reads[position + 1]
        allocate_at = min(ahead, first_reads[position])
        moves += [TimedMove(value, ends[piece], discard_at, allocate_at) for value in values]
    return tuple(moves)


def cuts_of(moves: Sequence[TimedMove], schedule: Schedule) -> tuple[set[int], set[int]]:
    """Operators at which segments must start, so that a value is away during a whole one or none."""
    forward = {at for move in moves for at in (move.offload_at, move.discard_at)}
    num_forward, num_backward = (len(graph.operators) for graph in schedule.graphs)
    firsts: dict[int, int] = {}
    for move in moves:
        firsts[move.allocate_at] = min(firsts.get(move.allocate_at, num_backward), move.value.read_by[0])
    backward = {*firsts, *firsts.values()}
    return {c for c in forward if 0 < c < num_forward}, {c for c in backward if 0 < c < num_backward}


def away_nbytes(moves: Iterable[TimedMove], schedule: Schedule) -> tuple[list[int], list[int]]:
    """Of both graphs, the bytes of moved values that are away while each operator runs."""
    num_forward, num_backward = (len(graph.operators) for graph in schedule.graphs)
    forward, backward = [0] * (num_forward + 1), [0] * (num_backward + 1)
    for move in moves:
        forward[move.discard_at] += move.value.nbytes
        backward[0] += move.value.nbytes
        backward[move.allocate_at] -= move.value.nbytes
    return list(accumulate(forward))[:num_forward], list(accumulate(backward))[:num_backward]


def without_away(costs: GraphCosts, away: Sequence[int]) -> GraphCosts:
    """``costs`` without the bytes that are away."""
    return replace(
        costs,
        live=tuple(max(0, live - less) for live, less in zip(costs.live, away, strict=True)),
        live_after=tuple(max(0, live - less) for live, less in zip(costs.live_after, away, strict=True)),
        away=tuple(away),
    )


def copy_name(value: MovedValue) -> str:
    """The resource name of the host copy of a value."""
    return f"copy of {value.target}"


def with_moves(
    accesses: Sequence[ActionAccess], segments: Sequence[Segment], moves: Sequence[TimedMove]
) -> tuple[ActionAccess, ...]:
    """The accesses of one graph with those of its moves, each at the boundary of a segment."""
    if not moves:
        return tuple(accesses)
    by_name = {segment.name: segment for segment in segments}
    is_forward = segments[0].graph == "forward"
    at = _by_position(moves, is_forward=is_forward)
    written: list[ActionAccess] = []
    last_end = segments[-1].end_op
    for access in accesses:
        if access.action.op is not Op.RUN:
            written.append(access)
            continue
        segment = by_name[access.action.target]
        written += at.pop(segment.first_op, ())
        made = [m.value.target for m in moves if m.value.is_made_in(segment)]
        used = [m.value.target for m in moves if m.value.is_used_in(segment) and not m.value.is_made_in(segment)]
        written.append(replace(access, reads=(*access.reads, *used), writes=(*access.writes, *made)))
    written += at.pop(last_end, ())
    if at:
        raise ValueError(f"no segment starts at operator {min(at)}, where saved values move")
    return tuple(written)


def _by_position(moves: Sequence[TimedMove], *, is_forward: bool) -> dict[int, list[ActionAccess]]:
    """The accesses of moves by the operator before which they stand."""
    at: dict[int, list[ActionAccess]] = {}
    steps = (Op.OFFLOAD, Op.DISCARD) if is_forward else (Op.ALLOCATE, Op.RELOAD)
    for op in steps:
        for move in moves:
            position = {Op.OFFLOAD: move.offload_at, Op.DISCARD: move.discard_at}.get(op, move.allocate_at)
            at.setdefault(position, []).append(_access(op, move.value))
    return at


def _access(op: Op, value: MovedValue) -> ActionAccess:
    target, copy = value.target, copy_name(value)
    match op:
        case Op.OFFLOAD:
            return ActionAccess(Action(op, target, Stream.D2H), (target,), (copy,))
        case Op.RELOAD:
            return ActionAccess(Action(op, target, Stream.H2D), (copy,), (target,))
    return ActionAccess(Action(op, target, Stream.COMPUTE), (), (target,))
