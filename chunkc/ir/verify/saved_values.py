"""Saved values that move: where each stands in a replay, and what must hold before.

    absent -- run --> here -- discard --> away -- allocate --> empty -- reload --> here -- backward ends --> away

A value is made anew by every forward; its copy says which forward made it. When a backward has ended, values are as
their forward has left them, since another backward of the same forward may follow. Who reads a value follows from its
first and last readers; that these are those of the graphs is checked where the graphs are cut into segments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from chunkc.errors import PlanError
from chunkc.ir.plan import MovedValue, Plan


class Place(StrEnum):
    """Where the elements of a moved value are; EMPTY: it has device memory, with nothing in it yet."""

    ABSENT = "absent"
    HERE = "here"
    AWAY = "away"
    EMPTY = "empty"


@dataclass(slots=True)
class SavedValues:
    """Places of the moved values, and of each the forward that its copy is of (0: none).

    ``users``: per segment, the moved values that it makes or may read.
    """

    moves: Mapping[int, MovedValue]
    users: Mapping[str, tuple[MovedValue, ...]]
    places: dict[int, Place] = field(init=False)
    copied: dict[int, int] = field(init=False)
    num_forwards: int = 0
    away_nbytes: int = 0
    _left: dict[int, Place] = field(init=False)
    _left_nbytes: int = 0

    def __post_init__(self) -> None:
        self.places = dict.fromkeys(self.moves, Place.ABSENT)
        self.copied = dict.fromkeys(self.moves, 0)
        self._left = self.places

    def put(self, index: int, place: Place) -> None:
        was_away, is_away = self.places[index] is Place.AWAY, place is Place.AWAY
        self.away_nbytes += (is_away - was_away) * self.moves[index].nbytes
        self.places[index] = place

    def begin_forward(self) -> None:
        self.places, self.away_nbytes = dict.fromkeys(self.moves, Place.ABSENT), 0
        self.num_forwards += 1

    def end_forward(self) -> None:
        self._left, self._left_nbytes = dict(self.places), self.away_nbytes

    def end_backward(self) -> None:
        self.places, self.away_nbytes = dict(self._left), self._left_nbytes


def users_by_segment(plan: Plan) -> dict[str, tuple[MovedValue, ...]]:
    return {segment.name: tuple(v for v in plan.moves if v.is_used_in(segment)) for segment in plan.segments}


def check_moves(plan: Plan) -> None:
    """Check what moved values say of themselves; PlanError names the value and the numbers."""
    ends = {graph: max((s.end_op for s in plan.graph_segments(graph)), default=0) for graph in ("forward", "backward")}
    seen = set[int]()
    for value in plan.moves:
        if value.index in seen:
            raise PlanError(f"saved value {value.target} is moved twice")
        seen.add(value.index)
        if value.nbytes <= 0:
            raise PlanError(f"saved value {value.target} of {value.nbytes} bytes has nothing to move")
        is_forward = 0 <= value.made_by <= value.used_until < ends["forward"]
        if not is_forward or not 0 <= value.read_by[0] <= value.read_by[1] < ends["backward"]:
            raise PlanError(
                f"saved value {value.target} is made by operator {value.made_by}, used until {value.used_until} and "
                f"read by {value.read_by[0]} to {value.read_by[1]}, of {ends['forward']} operators of forward and "
                f"{ends['backward']} of backward"
            )
    for segment in plan.segments:
        if not 0 <= segment.away_nbytes <= segment.live_nbytes:
            raise PlanError(f"{segment.name} has {segment.live_nbytes} live bytes, of which {segment.away_nbytes} away")
    _check_waiting(plan)


def _check_waiting(plan: Plan) -> None:
    """Check that every segment counts what the other micro-batches in flight hold of the device."""
    if not 1 <= plan.in_flight <= max(plan.accumulate, 1):
        raise PlanError(f"of {plan.accumulate} micro-batches, {plan.in_flight} cannot be in flight")
    if plan.in_flight == 1:
        if plan.waiting_nbytes:
            raise PlanError(f"one micro-batch is in flight, and others are to hold {plan.waiting_nbytes} bytes")
        return
    kept_nbytes = sum(value.nbytes for value in plan.saved) - plan.copies_nbytes
    if plan.waiting_nbytes < kept_nbytes:
        raise PlanError(
            f"a micro-batch in flight keeps {kept_nbytes} bytes for backward on the device, and {plan.waiting_nbytes} "
            "are counted"
        )
    others_nbytes = (plan.in_flight - 1) * plan.waiting_nbytes
    for segment in plan.segments:
        if segment.live_nbytes - segment.away_nbytes < others_nbytes:
            raise PlanError(
                f"{segment.name} has {segment.live_nbytes - segment.away_nbytes} live bytes, and the other "
                f"{plan.in_flight - 1} micro-batches in flight hold {others_nbytes}"
            )
