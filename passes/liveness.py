"""Pass ``liveness``: find when each parameter is read and when its gradient is final and can land.

A gradient lands (is copied over the parameter's payload, PatrickStar figure 5) at the end of the segment that holds
operator ``max(final, last read)`` of backward; until then it is non-model data. With several micro-batches a step it
lands in a gradient chunk, as soon as it is final.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from chunkc.errors import PlanError
from chunkc.ir.schedule import GraphSchedule, Operator, Schedule
from chunkc.passes.support.draft import Draft, GraphCosts, Liveness
from chunkc.passes.support.moved_values import away_nbytes, without_away


def analyse(schedule: Schedule, *, has_grad_chunks: bool = False) -> Liveness:
    """Liveness of all parameters of ``schedule``.

    Raises:
        PlanError: when a gradient has two producers.
    """
    operators = schedule.backward.operators
    final_op = _final_ops(schedule)
    last_read_op = [-1] * len(schedule.params)
    for index, op in enumerate(operators):
        for param in op.reads:
            last_read_op[param] = index
    overlaid = tuple(-1 if f < 0 else max(f, r) for f, r in zip(final_op, last_read_op, strict=True))
    landing_op = tuple(final_op) if has_grad_chunks else overlaid
    lands: list[list[int]] = [[] for _ in operators]
    for param, landing in enumerate(landing_op):
        if landing >= 0:
            lands[landing].append(param)
    forward_needs = tuple(_unique(op.reads) for op in schedule.forward.operators)
    over: Sequence[Sequence[int]] = [()] * len(operators) if has_grad_chunks else lands
    backward_needs = tuple(_unique((*op.reads, *land)) for op, land in zip(operators, over, strict=True))
    return Liveness(
        use_order=_use_order(schedule),
        trained=tuple(p for p, f in enumerate(final_op) if f >= 0),
        last_read_op=tuple(last_read_op),
        final_op=tuple(final_op),
        landing_op=landing_op,
        needs=(forward_needs, backward_needs),
        costs=(
            _costs(schedule, schedule.forward, [()] * len(schedule.forward.operators)),
            _costs(schedule, schedule.backward, lands),
        ),
        has_grad_chunks=has_grad_chunks,
    )


def peak_nbytes(liveness: Liveness) -> int:
    """The most non-model bytes of a single operator, which no segment has less than."""
    return max((sum(pair) for c in liveness.costs for pair in zip(c.live, c.workspace, strict=True)), default=0)


def _final_ops(schedule: Schedule) -> list[int]:
    final_op = [-1] * len(schedule.params)
    for index, op in enumerate(schedule.backward.operators):
        for param in op.grads:
            if final_op[param] >= 0:
                name, first = schedule.params[param].name, schedule.backward.operators[final_op[param]].name
                raise PlanError(
                    f"a gradient must be final after exactly one operator: that of {name!r} after {first!r} and "
                    f"{op.name!r}; sum the contributions before they leave backward"
                )
            final_op[param] = index
    return final_op


def _use_order(schedule: Schedule) -> tuple[int, ...]:
    order: dict[int, None] = dict.fromkeys(schedule.forward.read_params())
    for op in schedule.backward.operators:
        order.update(dict.fromkeys((*op.reads, *op.grads)))
    return tuple(order)


def _unique(params: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(params))


def _costs(schedule: Schedule, graph: GraphSchedule, lands: Sequence[Sequence[int]]) -> GraphCosts:
    def nbytes(params: Sequence[int]) -> int:
        return sum(schedule.params[p].nbytes for p in params)

    def made(op: Operator) -> int:
        return nbytes(op.grads) if graph.kind == "backward" else 0

    operators = graph.operators
    return GraphCosts(
        live=tuple(op.live_nbytes for op in operators),
        live_after=tuple(op.live_after_nbytes for op in operators),
        workspace=tuple(op.workspace_nbytes for op in operators),
        made=tuple(made(op) for op in operators),
        landed=tuple(nbytes(land) for land in lands),
        crossing=tuple(op.crossing_nbytes for op in operators),
    )


@dataclass(frozen=True, slots=True)
class LivenessPass:
    """Decides ``liveness``."""

    name: str = "liveness"
    requires: frozenset[str] = frozenset({"moves"})
    provides: frozenset[str] = frozenset({"liveness"})
    conflicts: frozenset[str] = frozenset()

    def __call__(self, draft: Draft) -> Draft:
        liveness = analyse(draft.schedule, has_grad_chunks=draft.options.accumulate > 1)
        if draft.moves:
            away = away_nbytes(draft.moves, draft.schedule)
            less = [without_away(*pair) for pair in zip(liveness.costs, away, strict=True)]
            liveness = replace(liveness, costs=(less[0], less[1]))
        waiting_nbytes = _waiting_nbytes(draft)
        if waiting_nbytes:
            more_nbytes = (draft.options.in_flight - 1) * waiting_nbytes
            forward, backward = (_with_waiting(costs, more_nbytes) for costs in liveness.costs)
            liveness = replace(liveness, costs=(forward, backward))
        note = f"{len(liveness.trained)} gradients, peak of single operators {peak_nbytes(liveness) / 2**20:.2f} MiB"
        return replace(draft, liveness=liveness, waiting_nbytes=waiting_nbytes, note=note)


def _waiting_nbytes(draft: Draft) -> int:
    """Bytes that each other micro-batch in flight holds: all but what is away behind its forward."""
    operators = draft.schedule.forward.operators
    if draft.options.in_flight == 1 or draft.schedule.is_evaluation:
        return 0
    return max(0, operators[-1].live_after_nbytes - sum(move.value.nbytes for move in draft.moves))


def _with_waiting(costs: GraphCosts, nbytes: int) -> GraphCosts:
    return replace(
        costs,
        live=tuple(live + nbytes for live in costs.live),
        live_after=tuple(live + nbytes for live in costs.live_after),
    )
