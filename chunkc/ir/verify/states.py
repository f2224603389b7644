"""States of tensors: who holds the memory of a parameter's payload, and which changes are legal.

FREE            no payload (a chunk of another rank that is not gathered, a gradient chunk without gradients)
COMPUTE         in use on the computing device
HOLD            payload kept, on the device or at home
HOLD_AFTER_FWD  payload kept, already used in this forward
HOLD_AFTER_BWD  the payload is grad16

The states are those of PatrickStar (Fang et al. 2021, Table 1). ``payload_states`` derives them from the actions alone,
so that nothing has to track them at run time. Leaving HOLD_AFTER_FWD when the forward ends tells a read in backward
apart from a repeated one in forward.

A payload is one parameter in one chunk: a spanning parameter has one in each of its chunks, and one more in the
gradient chunk where its gradient does not overlay it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from chunkc.errors import PlanError
from chunkc.ir.actions import Action, Op
from chunkc.ir.layout import ChunkList
from chunkc.ir.plan import TRANSITIONS, Plan, Program


class TensorState(StrEnum):
    """Who holds the memory of a payload; see the module's glossary."""

    FREE = "free"
    COMPUTE = "compute"
    HOLD = "hold"
    HOLD_AFTER_FWD = "hold_after_fwd"
    HOLD_AFTER_BWD = "hold_after_bwd"


_S = TensorState
LEGAL_TRANSITIONS: frozenset[tuple[TensorState, TensorState]] = frozenset(
    {
        (_S.FREE, _S.HOLD),
        (_S.HOLD, _S.COMPUTE),
        (_S.COMPUTE, _S.HOLD_AFTER_FWD),
        (_S.HOLD_AFTER_FWD, _S.COMPUTE),
        (_S.HOLD_AFTER_FWD, _S.HOLD),
        (_S.COMPUTE, _S.HOLD),
        (_S.COMPUTE, _S.HOLD_AFTER_BWD),
        (_S.HOLD_AFTER_BWD, _S.HOLD),
        (_S.HOLD, _S.FREE),
        (_S.HOLD_AFTER_FWD, _S.FREE),
        (_S.HOLD_AFTER_BWD, _S.FREE),
    }
)

Payload = tuple[int, int]
"""(parameter, chunk)."""


@dataclass(frozen=True, slots=True)
class StateChange:
    """A payload enters ``state`` at the action ``label`` (or at the ``end``) of ``program``."""

    program: str
    label: str
    state: TensorState


def payload_states(plan: Plan, programs: Iterable[Program] | None = None) -> dict[Payload, tuple[StateChange, ...]]:
    """The states of every payload, from the start on, while ``programs`` (an iteration) run from cold.

    Raises:
        PlanError: on an illegal change; the message names action, chunk, program and both states.
    """
    walk = _Walk(plan)
    for program in plan.iteration() if programs is None else programs:
        walk.run(program)
    return {payload: tuple(changes) for payload, changes in walk.changes.items()}


class _Walk:
    """The states of all payloads while programs are walked through in program order."""

    def __init__(self, plan: Plan) -> None:
        self._layout = plan.layout
        self._segments = {s.name: s for s in plan.segments}
        self._grad_chunk = plan.layout.grad_chunks()
        self._params: list[list[int]] = [[] for _ in plan.layout.chunks]
        for placement in plan.layout.placements:
            for chunk in placement.chunks:
                self._params[chunk].append(placement.param)
        self._landed = {p for s in plan.segments for p in s.lands}
        self._reduced: set[int] = set()
        self._program = ""
        self._label = "start"
        self._action: Action | None = None
        self.changes: dict[Payload, list[StateChange]] = {}
        for item in plan.layout.chunks:
            absent = item.list is ChunkList.GRAD or plan.layout.owner(item.index) != plan.layout.rank
            for param in self._params_of(item.index):
                state = TensorState.FREE if absent else TensorState.HOLD
                self.changes[param, item.index] = [StateChange("start", "start", state)]

    def run(self, program: Program) -> None:
        self._program = program.name
        if program.begins_step:
            self._discard_gradients()
        for label, action in program.labelled():
            self._label, self._action = label, action
            handler = _HANDLERS.get(action.op)
            if handler is not None:
                handler(self, action)
        self._label, self._action = "end", None
        if program.role in TRANSITIONS | {"forward", "evaluate"}:
            for payload in self.changes:
                if self._state(payload) is TensorState.HOLD_AFTER_FWD:
                    self._move(payload, TensorState.HOLD)

    def _discard_gradients(self) -> None:
        """The first backward of a step begins without what gradient chunks hold."""
        for (param, chunk), changes in self.changes.items():
            if self._layout.chunks[chunk].partner is not None and changes[-1].state is TensorState.HOLD_AFTER_BWD:
                self._move((param, chunk), TensorState.FREE)

    def _params_of(self, chunk: int) -> list[int]:
        partner = self._layout.chunks[chunk].partner
        return self._params[chunk if partner is None else partner]

    def _state(self, payload: Payload) -> TensorState:
        return self.changes[payload][-1].state

    def _move(self, payload: Payload, state: TensorState) -> None:
        before = self._state(payload)
        if (before, state) not in LEGAL_TRANSITIONS:
            param, chunk = payload
            raise PlanError(
                f"{self._program} {self._label} `{self._action or 'end of program'}`: parameter "
                f"{self._layout.params[param].name!r} in chunk c{chunk} cannot go from {before} to {state}"
            )
        self.changes[payload].append(StateChange(self._program, self._label, state))

    def _on_run(self, action: Action) -> None:
        segment = self._segments.get(action.target)
        if segment is None:
            raise PlanError(f"{self._program} {self._label} `{action}`: the plan has no segment {action.target}")
        after = TensorState.HOLD_AFTER_FWD if segment.graph == "forward" else TensorState.HOLD
        for param in segment.reads:
            for chunk in self._layout.placements[param].chunks:
                self._move((param, chunk), TensorState.COMPUTE)
                self._move((param, chunk), after)

    def _on_stash(self, action: Action) -> None:
        segment = self._segments.get(action.source or "")
        if segment is None:
            raise PlanError(f"{self._program} {self._label} `{action}`: the plan has no segment {action.source}")
        for param in set(segment.lands) & set(self._params_of(action.index)):
            payload = (param, action.index)
            if action.op is Op.ADD and self._state(payload) is TensorState.HOLD_AFTER_BWD:
                continue  # it was a gradient and is one, with one contribution more
            if self._state(payload) is TensorState.FREE and self._layout.chunks[action.index].partner is not None:
                self._move(payload, TensorState.HOLD)
            self._move(payload, TensorState.COMPUTE)
            self._move(payload, TensorState.HOLD_AFTER_BWD)

    def _on_update(self, action: Action) -> None:
        grad_chunk = self._grad_chunk.get(action.index)
        for param in self._params[action.index]:
            grad_payload = None if grad_chunk is None else (param, grad_chunk)
            if grad_payload is not None and self._state(grad_payload) is TensorState.HOLD_AFTER_BWD:
                self._move(grad_payload, TensorState.FREE)
            elif param in self._landed:
                self._move((param, action.index), TensorState.HOLD)

    def _remote(self, action: Action) -> Iterable[Payload]:
        for chunk in self._layout.groups[action.index].chunks if action.target[0] == "g" else (action.index,):
            if self._layout.owner(chunk) != self._layout.rank:
                yield from ((param, chunk) for param in self._params_of(chunk))

    def _on_gather(self, action: Action) -> None:
        for payload in self._remote(action):
            self._move(payload, TensorState.HOLD)

    def _on_open(self, action: Action) -> None:
        """A chunk of another rank is made of zeros, where gradients are to land."""
        for payload in self._remote(action):
            self._move(payload, TensorState.HOLD)

    def _on_release(self, action: Action) -> None:
        for payload in self._remote(action):
            if self._state(payload) is TensorState.HOLD_AFTER_BWD and payload[1] not in self._reduced:
                raise PlanError(
                    f"{self._program} {self._label} `{action}`: chunk c{payload[1]} holds gradients that were not "
                    f"reduced ({TensorState.HOLD_AFTER_BWD})"
                )
            self._move(payload, TensorState.FREE)
        self._reduced.difference_update(self._layout.groups[action.index].chunks)

    def _on_reduce(self, action: Action) -> None:
        self._reduced.update(self._layout.groups[action.index].chunks)


_HANDLERS = {
    Op.RUN: _Walk._on_run,
    Op.STASH: _Walk._on_stash,
    Op.ADD: _Walk._on_stash,
    Op.UPDATE: _Walk._on_update,
    Op.RESTORE: _Walk._on_update,
    Op.OPEN: _Walk._on_open,
    Op.GATHER: _Walk._on_gather,
    Op.RELEASE: _Walk._on_release,
    Op.REDUCE: _Walk._on_reduce,
}
