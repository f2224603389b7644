"""Moved values as their segments are compiled: names, and which cannot leave the device.

A value leaves the device by giving up its storages. A compiler that fuses may make it within a larger buffer, or give
the same memory out twice; what else is in there would leave with it. So such a value stays, and the iteration is
planned again without its move.

    plan -> compile -> values stay ─ some: counted as kept, plan again
                                   └ none: what moves is what is planned
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import replace

from torch.fx import Node

from chunkc.capture.graphs import Captured
from chunkc.capture.saved_values import names_of_saved
from chunkc.compiler.memory.footprint import Footprint
from chunkc.errors import PlanError
from chunkc.ir.plan import Plan
from chunkc.ir.schedule import Schedule
from chunkc.ir.values import GraphValues


def names_of_moved(captured: Captured, plan: Plan) -> dict[int, frozenset[str]]:
    """By moved value, the names of all values of the forward graph in its storages.

    Raises:
        PlanError: when a value has other bytes, makers or readers in the graphs than the plan says.
    """
    if not plan.moves:
        return {}
    given_out = [n for n in captured.forward.outputs() if isinstance(n, Node) and n.name in captured.user_outputs]
    saved = names_of_saved(captured.forward, captured.backward, given_out)
    for value in plan.moves:
        found, _ = saved.get(value.made_by, (None, None))
        if found is None or (found.nbytes, found.used_until, found.read_by) != (
            value.nbytes,
            value.used_until,
            value.read_by,
        ):
            raise PlanError(f"the plan moves {value}, and the graph has {found}")
    return {value.index: frozenset(saved[value.made_by][1].made) for value in plan.moves}


def makers_of_staying(
    plan: Plan, names: Mapping[int, Set[str]], forward: GraphValues, footprints: Sequence[Footprint]
) -> set[int]:
    """Operators of forward whose values are to move but have no storages of their own as compiled.

    ``names`` as of `names_of_moved`; ``footprints`` of the forward segments, of which those that are no exact account
    of the compiled code tell nothing.
    """
    found = set()
    for segment, values, footprint in zip(plan.graph_segments("forward"), forward.segments, footprints, strict=True):
        for value in (v for v in plan.moves if v.is_made_in(segment)):
            positions = {p for p, name in enumerate(values.outputs) if name in names[value.index]}
            if footprint.is_exact and not footprint.has_apart(positions, value.nbytes):
                found.add(value.made_by)
    return found


def with_staying(schedule: Schedule, makers: Collection[int]) -> Schedule:
    """``schedule`` in which the saved values of ``makers``, operators of forward, stay on the device."""
    if not makers:
        return schedule
    operators = [replace(op, used_until=None) if i in makers else op for i, op in enumerate(schedule.forward.operators)]
    return replace(schedule, forward=replace(schedule.forward, operators=tuple(operators)))
