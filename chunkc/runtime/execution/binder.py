"""Binding: what an action of a plan does, as a function over the memory it works on.

Binding replays a program once from its entry state, because which slot a parameter stands in at a ``run`` follows from
the actions before it. What changes from step to step (values of the graphs, byte counters) stands in
`RunEnvironment`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from chunkc.distributed.process_group import Ranks
from chunkc.errors import PlanError
from chunkc.ir.actions import Action, Op, Stream
from chunkc.ir.layout import Chunk
from chunkc.ir.occupancy import Occupancy
from chunkc.ir.plan import Plan, Program
from chunkc.ir.schedule import GraphKind
from chunkc.ir.state_spec import MASTER
from chunkc.runtime.devices.protocol import Device, PlannedLaunch, Update, Work
from chunkc.runtime.execution.bound_action import (
    AnnouncedUpdate,
    BoundAction,
    CompiledGraph,
    Landing,
    RunEnvironment,
    announcing,
    copying,
    in_sequence,
    moving,
    running,
    stashing,
)
from chunkc.runtime.execution.collectives import Exchanges
from chunkc.runtime.execution.grad_norm import GradNormTable
from chunkc.runtime.storage.chunk_store import ChunkStates, ChunkStore
from chunkc.runtime.storage.saved_copies import SavedCopies
from chunkc.runtime.update.cpu_update import Piece
from chunkc.runtime.update.rules import rule_of
from chunkc.runtime.update.update_inputs import StepInputs


@dataclass(slots=True)
class Binder:
    """Binds programs of one plan.

    Attributes:
        updates: by chunk and slots of the chunk, its states and its gradient chunk (-1 for none); no slots on the host.
        recoveries: per updated chunk, what casts its payload again where it lives when the model is cold.
        side: which homes of chunks with two are their homes (`ChunkStore.side`) when the programs run.
    """

    plan: Plan
    store: ChunkStore
    device: Device
    graphs: Mapping[GraphKind, CompiledGraph]
    env: RunEnvironment
    norm_table: GradNormTable | None = None
    ranks: Ranks = field(default_factory=Ranks)
    side: int = 0
    updates: dict[tuple[int, tuple[int, int, int] | None], Update] = field(default_factory=dict)
    recoveries: dict[int, Work] = field(default_factory=dict)
    _program: str = ""
    _occupancy: Occupancy = field(init=False)
    _slots: Mapping[GraphKind, Mapping[str, int]] = field(init=False)
    _views: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._occupancy = Occupancy(self.plan.layout)
        self._slots = {kind: compiled.graph.slots() for kind, compiled in self.graphs.items()}

    def bind(self, program: Program) -> tuple[BoundAction, ...]:
        """The program's actions in order, ready to be launched."""
        self._program, self._occupancy = program.name, Occupancy.of(self.plan.layout, program.entry.resident)
        return tuple(self._bind(label, action) for label, action in program.labelled())

    def _bind(self, label: str, action: Action) -> BoundAction:
        update: Callable[[Any], None] | None = None
        move: Callable[[SavedCopies], None] | None = None
        match action.op:
            case Op.OFFLOAD | Op.DISCARD | Op.ALLOCATE | Op.RELOAD:
                work, move = _nothing, moving(action.op, action.index, self.env, self._program)
            case Op.UPDATE:
                of_chunk = self._update_of(action)
                work, update = of_chunk.restore, of_chunk.update
            case Op.RESTORE:
                work = self._update_of(action).restore
            case Op.BEGIN:
                work, update = _nothing, self._home_update_of(action).begin
            case Op.DECIDE:
                table = self._norm_table(action)
                work, update = table.restore, partial(_decide, table)
            case _:
                work = self._work(action)
        self._occupancy.apply(action)
        launch = PlannedLaunch(label, str(action), action.stream, action.waits, action.op is Op.RUN)
        return BoundAction(launch, work, update, action.op is Op.SUM, move)

    def _work(self, action: Action) -> Work:
        makers: dict[Op, Callable[[Action], Work]] = {
            Op.FETCH: self._fetch,
            Op.OPEN: self._open,
            Op.EVICT: self._evict,
            Op.DROP: self._drop,
            Op.LOAD: self._load,
            Op.STORE: self._store,
            Op.RUN: self._run,
            Op.STASH: self._stash,
            Op.ADD: self._stash,
            Op.NORM: self._norm,
            Op.GATHER: self._gather,
            Op.REDUCE: self._reduce,
            Op.RELEASE: self._release,
            Op.SUM: self._sum,
        }
        return makers[action.op](action)

    def _chunk(self, action: Action) -> Chunk:
        return self.plan.layout.chunks[action.index]

    def _slot_of(self, chunk: int) -> int:
        """The slot where the payload of ``chunk`` stands before the action that is bound."""
        return self._occupancy.slot_of[f"c{chunk}"]

    def _slot(self, action: Action) -> int:
        if action.slot is None:
            raise PlanError(f"`{action}` names no slot")
        return action.slot

    def _fetch(self, action: Action) -> Work:
        chunk, slot = self._chunk(action), self._slot(action)
        return self._copy(self.store.payload_slot(chunk, slot), self._payload_home(chunk), Stream.H2D)

    def _open(self, action: Action) -> Work:
        """Open a slot: gradients that ranks add up begin at 0, and so do chunks of other ranks."""
        layout, chunk = self.plan.layout, self._chunk(action)
        if layout.world_size > 1 and (chunk.partner is not None or layout.owner(chunk.index) != layout.rank):
            memory = self.store.slot_bytes(self._slot(action))
            return lambda: _zero(memory)
        return _nothing

    def _evict(self, action: Action) -> Work:
        chunk, slot = self._chunk(action), self._slot(action)
        copy = self._copy(self._payload_home(chunk), self.store.payload_slot(chunk, slot), Stream.D2H)
        return in_sequence(copy, self._freeing(slot))

    def _load(self, action: Action) -> Work:
        chunk, slot = self._chunk(action), self._slot(action)
        return self._copy_states(self.store.states_slot(chunk, slot), self._states_home(chunk), Stream.H2D)

    def _store(self, action: Action) -> Work:
        chunk, slot = self._chunk(action), self._slot(action)
        copy = self._copy_states(self._states_home(chunk), self.store.states_slot(chunk, slot), Stream.D2H)
        return in_sequence(announcing(self.store, chunk.index), copy, self._freeing(slot))

    def _payload_home(self, chunk: Chunk) -> torch.Tensor:
        return self.store.payload_home(chunk, self.side)

    def _states_home(self, chunk: Chunk) -> ChunkStates:
        return self.store.states_home(chunk, self.side)

    def _copy_states(self, target: ChunkStates, source: ChunkStates, stream: Stream) -> Work:
        return in_sequence(*(self._copy(target[name], source[name], stream) for name in target))

    def _copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> Work:
        return copying(target, source, self.env, self._program, stream)

    def _drop(self, action: Action) -> Work:
        return self._freeing(self._slot(action))

    def _freeing(self, slot: int) -> Work:
        return partial(self.device.freed, self.store.slot_bytes(slot))

    def _exchanges(self) -> Exchanges:
        return Exchanges(self.plan, self.store, self.ranks, self.env, self._program)

    def _gather(self, action: Action) -> Work:
        group, first = self._group(action)
        return self._exchanges().gather(group, first, str(action))

    def _reduce(self, action: Action) -> Work:
        group, first = self._group(action)
        return self._exchanges().reduce(group, first, str(action))

    def _release(self, action: Action) -> Work:
        self._group(action)
        remote_chunks = self.plan.layout.remote_of(action.index)
        return in_sequence(*(self._freeing(self._slot_of(chunk)) for chunk in remote_chunks))

    def _sum(self, action: Action) -> Work:
        return self._exchanges().sum(self._norm_table(action), str(action))

    def _group(self, action: Action) -> tuple[int, int]:
        """A group, and the slot of its first chunk: they stand one behind the other."""
        layout = self.plan.layout
        if not 1 < layout.num_ranks == self.ranks.size:
            raise PlanError(
                f"`{action}` is for a job of {layout.num_ranks} ranks, this one has {self.ranks.size}: launch the "
                "script with as many ranks as it was planned for"
            )
        own_chunk = layout.groups[action.index].chunks[layout.rank]
        return action.index, self._slot_of(own_chunk) - layout.rank

    def _payload(self, param: int) -> torch.Tensor:
        """The parameter in the slot where its first chunk now stands."""
        first_chunk = self.plan.layout.placements[param].chunk
        slot = self._occupancy.slot_of.get(f"c{first_chunk}", -1)
        if self.plan.layout.params[param].numel and slot < 0:
            name = self.plan.layout.params[param].name
            raise PlanError(f"chunk c{first_chunk} of parameter {name} is not resident where it is needed")
        if (param, slot) not in self._views:
            self._views[param, slot] = self.store.param_in_slot(param, slot)
        return self._views[param, slot]

    def _run(self, action: Action) -> Work:
        planned = self.plan.segment(action.target)
        compiled = self.graphs[planned.graph]
        segment, run = compiled.graph.segments[planned.index], compiled.segments[planned.index]
        payloads = [(i, self._payload(param)) for i, param in segment.params]
        made = [value.index for value in self.plan.moves if value.is_made_in(planned)]
        names = {index: compiled.saved.get(index, frozenset()) for index in made}
        saved = {i: {p for p, name in enumerate(segment.outputs) if name in own} for i, own in names.items()}
        slots, sample = self._slots[planned.graph], self.device.sample_nonmodel
        return running(segment, run, payloads, self.env, slots, sample, saved)

    def _stash(self, action: Action) -> Work:
        """Land the elements in this chunk of gradients of the segment, and no others.

        Only this chunk's fetch has been waited for, and only its slot is kept until the stash has run.
        """
        segment = self.plan.segment(action.source or "")
        compiled, chunk = self.graphs["backward"], self._chunk(action)
        names = {param: name for name, param in compiled.gradients.items()}
        placements, last_use = self.plan.layout.placements, compiled.graph.last_use
        mapped, adds = chunk.index if chunk.partner is None else chunk.partner, action.op is Op.ADD
        landings = []
        for param in segment.lands:
            if mapped in placements[param].chunks:
                name = names[param]
                is_last = last_use.get(name, -1) <= segment.index and mapped == placements[param].chunks[-1]
                slot = self._slots["backward"][name]
                landings.append(Landing(param, slot, is_last, *self._landing(param, chunk, mapped)))
        return stashing(landings, self.env, self._share(chunk), adds=adds)

    def _share(self, chunk: Chunk) -> float:
        """Factor of landing gradients: ranks that share chunks add up those of micro-batches, average others."""
        adds_up = chunk.partner is not None and self.plan.accumulate > 1
        return 1.0 / self.plan.layout.world_size if adds_up else 1.0

    def _landing(
        self, param: int, chunk: Chunk, mapped: int
    ) -> tuple[torch.Tensor] | tuple[torch.Tensor, list[int], slice]:
        """Return where the elements of a gradient in ``chunk`` go, and which they are if not all.

        ``mapped`` is the chunk in which the parameter's own elements are.
        """
        slot = self._slot_of(chunk.index)
        if self.plan.layout.placements[param].num_chunks == 1:
            return (self.store.param_in_slot(param, slot),)
        info = self.plan.layout.params[param]
        memory_order = sorted(range(len(info.shape)), key=lambda d: -info.stride[d])
        part = next(p for p in self.store.parts(param) if p.chunk == mapped)
        return self.store.payload_slot(chunk, slot)[part.in_chunk], memory_order, part.in_param

    def _norm_table(self, action: Action) -> GradNormTable:
        if self.norm_table is None:
            raise PlanError(f"`{action}` has no place in a plan that does not measure gradients")
        return self.norm_table

    def _norm(self, action: Action) -> Work:
        """Of the gradients that land by this plan; what else the chunk holds are parameters."""
        chunk = self._chunk(action)
        holder = self.plan.layout.grad_chunks().get(chunk.index, chunk.index)
        norm_table = self._norm_table(action)
        graded_params = {param for segment in self.plan.segments for param in segment.lands}
        counted = graded_params - self.ranks.uncounted
        pieces = [piece for piece in self.store.pieces(chunk.index) if piece.param in counted]
        if not pieces:
            return _nothing  # another rank counts them all
        gradient = self.store.payload_slot(self.plan.layout.chunks[holder], self._slot_of(holder))
        return self.device.make_norm(gradient, pieces, norm_table.table[chunk.index])

    def _update_of(self, action: Action) -> Update:
        chunk, slots = self._chunk(action), None
        grad_index = self.plan.layout.grad_chunks().get(chunk.index)
        grad_chunk = None if grad_index is None else self.plan.layout.chunks[grad_index]
        if action.stream is Stream.COMPUTE:
            gradient_slot = -1 if grad_index is None else self._slot_of(grad_index)
            states_slot = self._occupancy.slot_of[f"os{chunk.index}"]
            slots = self._slot_of(chunk.index), states_slot, gradient_slot
        key = (chunk.index, slots)
        if key not in self.updates:
            store = self.store
            target = None
            if slots is None:
                payload, states = self._payload_home(chunk), self._states_home(chunk)
                gradient = None if grad_chunk is None else self._payload_home(grad_chunk)
                if chunk.has_second_home:
                    other = self.side ^ 1
                    target = store.payload_home(chunk, other), tuple(store.states_home(chunk, other).values())
            else:
                payload, states = store.payload_slot(chunk, slots[0]), store.states_slot(chunk, slots[1])
                gradient = None if grad_chunk is None else store.payload_slot(grad_chunk, slots[2])
            pieces = store.pieces(chunk.index)
            rule, lists = rule_of(self.plan.layout.state_spec), tuple(states.values())
            update = self.device.make_update(action.stream, rule, payload, lists, pieces, gradient, target)
            writes_home = slots is None or chunk.has_resident_os
            self.updates[key] = AnnouncedUpdate(update, store, chunk.index) if writes_home else update
            self.recoveries[chunk.index] = self._recovery(chunk, pieces)
        return self.updates[key]

    def _home_update_of(self, action: Action) -> AnnouncedUpdate:
        update = self._update_of(action)
        if not isinstance(update, AnnouncedUpdate):
            raise PlanError(f"`{action}` is for a chunk that is updated at home")
        return update

    def _recovery(self, chunk: Chunk, pieces: Sequence[Piece]) -> Work:
        """Casts param32 into the payload, each where it is in the cold state."""
        cold, store = dict(self.plan.cold.resident), self.store
        slot, os_slot = cold.get(f"c{chunk.index}"), cold.get(f"os{chunk.index}")
        payload = self._payload_home(chunk) if slot is None else store.payload_slot(chunk, slot)
        states = self._states_home(chunk) if os_slot is None else store.states_slot(chunk, os_slot)
        param32 = states[MASTER]

        def recover() -> None:
            for piece in pieces:
                payload[piece.start : piece.end].copy_(param32[piece.start : piece.end])

        return recover


def _decide(table: GradNormTable, inputs: StepInputs) -> None:
    table.update(inputs)


def _nothing() -> None:
    pass


def _zero(memory: torch.Tensor) -> None:
    memory.zero_()
