"""Pass ``states``: derive the state of every tensor over one iteration, and prove the overlays.

The states are those of PatrickStar (Table 1; glossary: ``chunkc.ir.verify.states``). The order of operators is static,
so an illegal transition is an error of the planner. The verifier derives the states once more, from finished actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from chunkc.errors import PlanError
from chunkc.ir.schedule import Schedule
from chunkc.ir.verify.states import LEGAL_TRANSITIONS, TensorState
from chunkc.passes.support.draft import Draft, Liveness, Overlay, decided


@dataclass(frozen=True, slots=True)
class Change:
    """A change into ``state`` at ``start``, ``fwd 12``, ``bwd 3``, ``forward ends`` or ``step``."""

    moment: str
    state: TensorState


def history(schedule: Schedule, liveness: Liveness, param: int) -> tuple[Change, ...]:
    """The states of ``param`` over one iteration, from HOLD to HOLD.

    Raises:
        PlanError: when a transition is not legal.
    """
    forward, backward = ([i for i, op in enumerate(g.operators) if param in op.reads] for g in schedule.graphs)
    landing = -1 if liveness.has_grad_chunks else liveness.landing_op[param]
    return _history(schedule.params[param].name, forward, backward, landing)


def _history(name: str, forward: Sequence[int], backward: Sequence[int], landing: int) -> tuple[Change, ...]:
    changes = [Change("start", TensorState.HOLD)]
    for op in forward:
        changes += [Change(f"fwd {op}", TensorState.COMPUTE), Change(f"fwd {op}", TensorState.HOLD_AFTER_FWD)]
    if forward:
        changes.append(Change("forward ends", TensorState.HOLD))
    for op in (*(r for r in backward if r != landing), *([landing] if landing >= 0 else [])):
        after = TensorState.HOLD_AFTER_BWD if op == landing else TensorState.HOLD
        changes += [Change(f"bwd {op}", TensorState.COMPUTE), Change(f"bwd {op}", after)]
    if landing >= 0:
        changes.append(Change("step", TensorState.HOLD))
    for before, following in pairwise(changes):
        if (before.state, following.state) not in LEGAL_TRANSITIONS:
            raise PlanError(
                f"{name!r} cannot go from {before.state} ({before.moment}) to {following.state} ({following.moment})"
            )
    return tuple(changes)


def prove_overlays(schedule: Schedule, liveness: Liveness) -> tuple[Overlay, ...]:
    """The proof, per trained parameter, that its gradient may take the bytes of its payload.

    Three facts: one operator makes the gradient final (``liveness`` refused more), no operator of backward reads the
    parameter after the landing, and there is no later micro-batch (one backward per step).

    Raises:
        PlanError: naming the operator that still reads an overlaid parameter, or an illegal transition.
    """
    readers: list[tuple[list[int], list[int]]] = [([], []) for _ in schedule.params]
    for which, graph in enumerate(schedule.graphs):
        for index, op in enumerate(graph.operators):
            for param in dict.fromkeys(op.reads):
                readers[param][which].append(index)
    proofs = []
    for param in liveness.use_order:
        forward, backward = readers[param]
        landing, name = liveness.landing_op[param], schedule.params[param].name
        late = [r for r in backward if landing >= 0 and r > landing]
        if late:
            reader = schedule.backward.operators[late[0]].name
            raise PlanError(
                f"the gradient of {name!r} cannot overlay it: {reader!r} reads the parameter after it landed"
            )
        _history(name, forward, backward, landing)
        if landing >= 0:
            proofs.append(Overlay(param, liveness.final_op[param], liveness.last_read_op[param], landing))
    return tuple(proofs)


@dataclass(frozen=True, slots=True)
class StatesPass:
    """Decides ``states``: overlays proved, every transition legal."""

    name: str = "states"
    requires: frozenset[str] = frozenset({"liveness", "mapping"})
    provides: frozenset[str] = frozenset({"states"})
    conflicts: frozenset[str] = frozenset()

    def __call__(self, draft: Draft) -> Draft:
        liveness = decided(draft.liveness, "liveness")
        if liveness.has_grad_chunks:
            note = (
                f"{len(liveness.trained)} gradients in chunks of their own: the next micro-batch reads the parameters"
            )
            return replace(draft, overlays=(), note=note)
        overlays = prove_overlays(draft.schedule, liveness)
        return replace(draft, overlays=overlays, note=f"{len(overlays)} gradients overlay their parameters")
