"""Device bytes that a plan which measures gradients takes beside its arena and its graphs' values.

Norms are taken tile by tile: on the device each chunk has a table of its tiles, all chunks share working memory for the
tiles of one, and each chunk has a row of results. How parameters are packed into chunks is decided later, and by the
budget that is left; so what is stated here is a bound for every packing into up to a thousand chunks, known from the
parameters alone: all of them on one rank and in one chunk, and as many cuts as a thousand chunks make. What the
device's allocator adds to a tensor is no part of it.

A loss scale multiplies the tangents of a backward, which takes copies of them: while a tangent is alive, it counts
twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from chunkc.capture.graphs import Captured
from chunkc.capture.joined import with_concurrent
from chunkc.ir.plan import Plan
from chunkc.ir.schedule import ParamInfo, Schedule

NORM_TILE_NUMEL = 8192
"""Elements that a program of the norm kernel measures at a time."""

_TILE_NBYTES = 12 + 8  # a row of three int32; and two float32 of working memory
_MAX_CUTS = 1024  # twice the chunks that a search makes of a model (`MAX_CHUNKS` of ``chunkc.passes.chunk_size``)
_SMALL_TILE_NUMEL = 1024  # of small models: tables of smaller tiles take more than those of any cuts
_CUT_NBYTES = _TILE_NBYTES + 16  # one more tile, and a chunk's row of two float64
_FIXED_NBYTES = 2048  # the decision, the loss scale, its inverse, and single numbers on the way to them


def norms_nbytes(params: Sequence[ParamInfo]) -> int:
    """Device bytes that the norms of all trainable parameters take, however they are packed."""
    numels = [info.numel for info in params if info.trainable and info.numel]
    large, small = (sum(-(-n // tile) + 1 for n in numels) for tile in (NORM_TILE_NUMEL, _SMALL_TILE_NUMEL))
    return min(_TILE_NBYTES * large + _CUT_NBYTES * _MAX_CUTS, _TILE_NBYTES * small) + _FIXED_NBYTES


def with_norms(schedule: Schedule) -> Schedule:
    """``schedule`` with what norms take, alive all the while."""
    return with_concurrent(schedule, norms_nbytes(schedule.params), schedule.also_trained)


def with_scaled_tangents(schedule: Schedule) -> Schedule:
    """``schedule`` with the products of tangents and a loss scale, each alive as long as the tangent."""
    operators = schedule.backward.operators
    after = (*(op.tangents_nbytes for op in operators[1:]), 0)
    scaled = tuple(
        replace(op, live_nbytes=op.live_nbytes + op.tangents_nbytes, live_after_nbytes=op.live_after_nbytes + left)
        for op, left in zip(operators, after, strict=False)
    )
    return replace(schedule, backward=replace(schedule.backward, operators=scaled))


def with_decision_bytes(schedule: Schedule, *, tracks_grad_norm: bool, scales: bool) -> Schedule:
    """``schedule`` with what measuring and a loss scale of its own take."""
    schedule = with_scaled_tangents(schedule) if scales else schedule
    return with_norms(schedule) if tracks_grad_norm else schedule


def with_decisions(captured: Captured, *, tracks_grad_norm: bool, scales: bool) -> Captured:
    """``captured`` with what measuring and a loss scale of its own take, alive all the while."""
    if scales:
        captured = replace(captured, schedule=with_scaled_tangents(captured.schedule), scales=True)
    if not tracks_grad_norm:
        return captured
    nbytes = norms_nbytes(captured.schedule.params)
    return replace(
        captured, schedule=with_norms(captured.schedule), concurrent_nbytes=captured.concurrent_nbytes + nbytes
    )


def plan_beside(plan: Plan, nbytes: int) -> Plan:
    """``plan`` with ``nbytes`` more alive in every segment; it may pass its budget then."""
    segments = tuple(replace(segment, live_nbytes=segment.live_nbytes + nbytes) for segment in plan.segments)
    memory = replace(plan.memory, nonmodel_nbytes=plan.memory.nonmodel_nbytes + nbytes)
    return replace(plan, segments=segments, memory=memory)


def plan_with_norms(plan: Plan) -> Plan:
    """``plan``, made without them, with what norms take."""
    return plan_beside(plan, norms_nbytes(plan.layout.params))
