"""Effects of the actions that move chunks and states, from fetch and evict to gather and reduce.

A gathered group stands in ``world_size`` adjacent slots, the own chunk at position ``rank``. All ranks carry out the
same collectives on the same chunks, so that a remote chunk is as new as the own chunk of its group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from chunkc.ir.actions import Op
from chunkc.ir.layout import ChunkList
from chunkc.ir.verify.happens_before import Event
from chunkc.ir.verify.replay import NOTHING, Machine, Payload


def _fetch(machine: Machine, event: Event) -> None:
    chunk = machine.chunk(event)
    if chunk.list is ChunkList.UNUSED:
        machine.refuse(event, f"c{chunk.index} holds parameters that no graph uses")
    payload = machine.at_home(event, chunk.index)
    machine.read(event, machine.home_of(f"c{chunk.index}"))
    machine.occupy(event, f"c{chunk.index}", event.action.slot or 0, chunk.nbytes)
    machine.device[chunk.index] = payload


def _open(machine: Machine, event: Event) -> None:
    """The slot is the chunk's, and holds nothing: gradients that land, or an update, fill it.

    A chunk of another rank may be opened for gradients alone: nothing can read it before it is gathered.
    """
    chunk = machine.layout.chunks[event.action.index]
    is_remote = not machine.facts.owned[chunk.index]
    overlays = chunk.list is ChunkList.TRAINED and chunk.index not in machine.facts.grad_chunk
    takes_gradients = machine.facts.accumulates if machine.is_grad(chunk.index) else overlays
    if is_remote and not takes_gradients:
        machine.chunk(event)
    if is_remote:
        machine.truth[chunk.index] = Payload() if machine.is_grad(chunk.index) else Payload(NOTHING)
    elif machine.is_grad(chunk.index):
        held = machine.truth[chunk.index]
        if held.grads:
            machine.refuse(event, f"c{chunk.index} holds {held}, which would be lost")
        machine.truth[chunk.index] = Payload()
    elif chunk.index not in machine.facts.grad_chunk:
        machine.refuse(event, f"c{chunk.index} holds what nothing else does: its gradients, or frozen parameters")
    machine.occupy(event, f"c{chunk.index}", event.action.slot or 0, chunk.nbytes)
    machine.device[chunk.index] = Payload() if machine.is_grad(chunk.index) else Payload(NOTHING)


def _evict(machine: Machine, event: Event) -> None:
    chunk = machine.chunk(event)
    if chunk.is_resident:
        machine.refuse(event, f"c{chunk.index} has no host home to be evicted to")
    payload = machine.resident(event, chunk.index)
    _refuse_unreduced(machine, event, chunk.index, payload)
    updated = chunk.index if chunk.partner is None else chunk.partner
    if updated in machine.iteration.begun:
        machine.refuse(event, f"the update of c{updated} has begun, with the gradients that this replaces")
    machine.vacate(event, f"c{chunk.index}", event.action.slot)
    machine.write(event, machine.home_of(f"c{chunk.index}"))
    machine.home[chunk.index] = payload
    _forget(machine, chunk.index)


def _drop(machine: Machine, event: Event) -> None:
    chunk = machine.chunk(event)
    machine.slot(event, f"c{chunk.index}")
    truth = machine.truth[chunk.index]
    if machine.home.get(chunk.index) != truth:
        machine.refuse(event, f"the slot holds the only newest copy of c{chunk.index} ({truth}); it must be evicted")
    machine.vacate(event, f"c{chunk.index}", event.action.slot)
    _forget(machine, chunk.index)


def _forget(machine: Machine, chunk: int) -> None:
    del machine.device[chunk]
    machine.gathered.discard(chunk)


def _refuse_unreduced(machine: Machine, event: Event, chunk: int, payload: Payload) -> None:
    if machine.layout.world_size > 1 and payload.is_partial:
        machine.refuse(event, f"c{chunk} holds gradients of {len(payload.grads)} parameters that are not reduced")


def _load(machine: Machine, event: Event) -> None:
    chunk = machine.chunk(event)
    if not chunk.has_os_below:
        machine.refuse(event, f"os{chunk.index} has no host home to be loaded from")
    if machine.home_os[chunk.index] != machine.os_truth[chunk.index]:
        machine.refuse(event, f"the host copy of os{chunk.index} is stale")
    machine.read(event, machine.home_of(f"os{chunk.index}"))
    machine.occupy(event, f"os{chunk.index}", event.action.slot or 0, machine.layout.os_nbytes_of(chunk))
    machine.device_os[chunk.index] = machine.home_os[chunk.index]


def _store(machine: Machine, event: Event) -> None:
    chunk = machine.chunk(event)
    if not chunk.has_os_below:
        machine.refuse(event, f"os{chunk.index} has no host home to be stored to")
    machine.slot(event, f"os{chunk.index}")
    if machine.device_os[chunk.index] != machine.os_truth[chunk.index]:
        machine.refuse(event, f"the device copy of os{chunk.index} is stale")
    machine.vacate(event, f"os{chunk.index}", event.action.slot)
    machine.write(event, machine.home_of(f"os{chunk.index}"))
    machine.home_os[chunk.index] = machine.device_os.pop(chunk.index)


def _targets(machine: Machine, event: Event) -> tuple[int, ...]:
    """Chunks of a collective's group."""
    if machine.layout.world_size == 1:
        machine.refuse(event, "a single rank has nothing to exchange")
    return tuple(machine.layout.groups[event.action.index].chunks)


def _gather(machine: Machine, event: Event) -> None:
    layout = machine.layout
    targets = _targets(machine, event)
    group = layout.group_of(targets[0])
    own_chunk = group.first_chunk + layout.rank
    own_slot = machine.slot(event, f"c{own_chunk}")
    for chunk in targets:
        if chunk == own_chunk:
            if machine.resident(event, own_chunk).grads:
                machine.refuse(event, f"c{own_chunk} holds gradients, not parameters")
            machine.read(event, f"slot d{own_slot}")
        else:
            slot = own_slot - layout.rank + layout.owner(chunk)
            if slot < 0:
                machine.refuse(event, f"the group needs {layout.world_size} slots around slot d{own_slot}")
            machine.occupy(event, f"c{chunk}", slot, layout.chunks[chunk].nbytes)
            machine.device[chunk] = machine.truth[chunk] = Payload(version=machine.truth[own_chunk].version)
        machine.gathered.add(chunk)
    _refuse_gaps(machine, event, targets)


def _refuse_gaps(machine: Machine, event: Event, chunks: tuple[int, ...]) -> None:
    """Refuse unless ``chunks`` stand one after the other in the arena."""
    for left, right in pairwise(chunks):
        first, second = (machine.layout.slots[machine.slot(event, f"c{c}")] for c in (left, right))
        end = first.offset + machine.layout.chunks[left].nbytes
        if second.offset != end:
            machine.refuse(
                event, f"c{right} stands at byte {second.offset}, not at byte {end} where c{left} ends: there is a gap"
            )


def _release(machine: Machine, event: Event) -> None:
    for chunk in _targets(machine, event):
        machine.gathered.discard(chunk)
        if not machine.facts.owned[chunk]:
            machine.slot(event, f"c{chunk}")
            _refuse_unreduced(machine, event, chunk, machine.device.pop(chunk))
            machine.vacate(event, f"c{chunk}")


def _reduce(machine: Machine, event: Event) -> None:
    due_in = {chunk: machine.facts.due_in(chunk) for chunk in _targets(machine, event)}
    if not any(due_in.values()):
        machine.refuse(event, "no gradient lands in its chunks")
    if machine.facts.accumulates and any(map(machine.is_grad, due_in)):
        _refuse_nothing_new(machine, event, tuple(due_in))
    for chunk, due in due_in.items():
        held = machine.resident(event, chunk)
        access = machine.write if machine.facts.owned[chunk] else machine.read
        access(event, f"slot d{machine.slot_of[f'c{chunk}']}")  # padding takes part: a collective has whole groups
        if held.reduced:
            machine.refuse(event, f"the gradients of c{chunk} are reduced twice")
        if machine.facts.accumulates and machine.is_grad(chunk):
            reduced = replace(held, summed=held.added) if machine.facts.owned[chunk] else replace(held, reduced=True)
        elif due and held.grads != due:
            machine.refuse(event, f"{len(due - held.grads)} of {len(due)} gradients have not landed in c{chunk}")
        elif held.version == NOTHING and not held.grads.issuperset(machine.facts.params[chunk]):
            lost = machine.facts.name(min(set(machine.facts.params[chunk]) - held.grads))
            machine.refuse(event, f"c{chunk} was opened: its zeros would be averaged with {lost}, which has not landed")
        elif not due:
            continue
        else:
            reduced = Payload(held.version, held.grads, reduced=True)
        machine.device[chunk] = machine.truth[chunk] = reduced


def _refuse_nothing_new(machine: Machine, event: Event, chunks: tuple[int, ...]) -> None:
    """Refuse a reduction of gradient chunks in which nothing has landed since the last one or opening."""
    if not any(machine.resident(event, chunk).is_partial for chunk in chunks):
        machine.refuse(event, "nothing has landed in its chunks since they were opened or reduced")


MOVES: dict[Op, Callable[[Machine, Event], None]] = {
    Op.FETCH: _fetch,
    Op.OPEN: _open,
    Op.EVICT: _evict,
    Op.DROP: _drop,
    Op.LOAD: _load,
    Op.STORE: _store,
    Op.GATHER: _gather,
    Op.RELEASE: _release,
    Op.REDUCE: _reduce,
}
