"""Effects of the actions that compute, from run and stash to update and restore.

Gradients land right after the segment that finishes them, each once (in every micro-batch), and from then on the
payload that they overlay is no parameter. An update runs where gradients and states stand: on ``cpu`` at their homes,
on ``compute`` in their slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from chunkc.ir.actions import Op, Stream
from chunkc.ir.plan import ROLE_GRAPH, Program
from chunkc.ir.verify.happens_before import Event
from chunkc.ir.verify.moves import MOVES
from chunkc.ir.verify.replay import Machine, Payload
from chunkc.ir.verify.value_moves import VALUE_EFFECTS, run_segment


def _run(machine: Machine, event: Event) -> None:
    refuse_unlanded(machine)
    facts, iteration = machine.facts, machine.iteration
    segment = facts.segments[event.action.target]
    if segment.index != iteration.next_segment:
        machine.refuse(event, f"segment {iteration.next_segment} of {segment.graph} must run first")
    iteration.next_segment += 1
    _refuse_over_budget(machine, event, segment.nonmodel_nbytes)
    run_segment(machine, event, segment)
    for chunk, params in facts.reads[segment.name].items():
        _refuse_unreadable(machine, event, chunk, params)
        machine.read(event, f"slot d{machine.slot_of[f'c{chunk}']}")
    for param in segment.reads:
        _refuse_torn(machine, event, param)
    iteration.landing = {(p, c) for c, params in facts.lands[segment.name].items() for p in params}
    iteration.last_run = event


def _refuse_unreadable(machine: Machine, event: Event, chunk: int, params: frozenset[int]) -> None:
    held = machine.resident(event, chunk)
    overlaid = params & held.grads
    if overlaid:
        names = ", ".join(machine.facts.name(p) for p in sorted(overlaid))
        machine.refuse(event, f"it reads {names} in c{chunk}, overlaid by its gradient")
    if machine.layout.world_size > 1 and chunk not in machine.gathered:
        machine.refuse(event, f"c{chunk} is read but its group g{machine.layout.group_of(chunk).index} is not gathered")


def _refuse_torn(machine: Machine, event: Event, param: int) -> None:
    """Refuse a spanning parameter whose chunks do not follow each other without a gap."""
    chunks = machine.layout.placements[param].chunks
    for left, right in pairwise(chunks):
        first, second = (machine.layout.slots[machine.slot_of[f"c{c}"]] for c in (left, right))
        if first.offset + machine.layout.chunks[left].nbytes != second.offset:
            machine.refuse(
                event,
                f"{machine.facts.name(param)} spans c{left} at byte {first.offset} and c{right} at byte "
                f"{second.offset}, which do not follow each other without a gap",
            )


def _refuse_over_budget(machine: Machine, event: Event, nonmodel_nbytes: int) -> None:
    budget, arena = machine.facts.memory.device_budget_nbytes, machine.layout.arena_nbytes
    total = arena + nonmodel_nbytes
    if total > budget:
        machine.refuse(
            event,
            f"the device needs {total} bytes ({arena} arena, {nonmodel_nbytes} non-model), {total - budget} more than "
            f"the budget of {budget}",
        )


def refuse_unlanded(machine: Machine) -> None:
    """Refuse the last segment when gradients that it finishes were not stashed before the next one."""
    iteration = machine.iteration
    if iteration.landing and iteration.last_run is not None:
        param, chunk = min(iteration.landing)
        machine.refuse(
            iteration.last_run,
            f"the gradient of {machine.facts.name(param)} in c{chunk} is lost: no stash before the next segment",
        )


def _stash(machine: Machine, event: Event) -> None:
    facts, iteration = machine.facts, machine.iteration
    chunk, source = event.action.index, event.action.source or ""
    partner = machine.layout.chunks[chunk].partner
    mapped = chunk if partner is None else partner
    landing = facts.lands[source].get(mapped, frozenset())
    if not landing:
        machine.refuse(event, f"no gradient of {source} lands in c{chunk}")
    last = "" if iteration.last_run is None else iteration.last_run.action.target
    twice = {p for p in landing if (p, mapped) in iteration.stashed}
    if twice:
        machine.refuse(event, f"the gradient of {facts.name(min(twice))} in c{mapped} is stashed twice")
    if last != source:
        machine.refuse(event, f"gradients of {source} land right after it, but {last or 'nothing'} has run since")
    held = machine.resident(event, chunk)
    if held.reduced:
        machine.refuse(event, f"the gradients in c{chunk} are already reduced")
    machine.write(event, f"slot d{machine.slot_of[f'c{chunk}']}")
    machine.device[chunk] = machine.truth[chunk] = _landed(machine, event, held, landing)
    done = {(p, mapped) for p in landing}
    iteration.landing -= done
    iteration.stashed |= done


def _landed(machine: Machine, event: Event, held: Payload, landing: frozenset[int]) -> Payload:
    """``held`` with one more contribution to each gradient of ``landing``."""
    chunk = event.action.index
    if not (machine.facts.accumulates and machine.is_grad(chunk)):
        if event.action.op is Op.ADD:
            machine.refuse(event, f"c{chunk} is no gradient chunk to which micro-batches add")
        return Payload(held.version, held.grads | landing)
    lost = landing & held.grads
    if lost and event.action.op is Op.STASH:
        machine.refuse(event, f"it overwrites the gradient of {machine.facts.name(min(lost))}: that is lost")
    number = machine.iteration.num_micro_batches
    return replace(held, grads=held.grads | landing, added=held.added | {(p, number) for p in landing})


def _refuse_lost(machine: Machine, event: Event, chunk: int, held: Payload) -> None:
    """Refuse unless each gradient in gradient chunk ``chunk`` has the contributions of all micro-batches."""
    num = machine.iteration.num_micro_batches
    due = {(p, number) for p in machine.facts.due_in(chunk) for number in range(1, num + 1)}
    if machine.facts.accumulates and held.added != due:
        param, number = min(due.symmetric_difference(held.added))
        name = machine.facts.name(param)
        machine.refuse(event, f"the contribution of micro-batch {number} of {num} to the gradient of {name} is lost")


def _gradients(machine: Machine, event: Event, chunk: int) -> None:
    """Check that all gradients of ``chunk`` have landed before ``event``, and record its reads."""
    missing = machine.facts.due[chunk]
    grad_chunk = machine.facts.grad_chunk.get(chunk)
    for source in (chunk,) if grad_chunk is None else (chunk, grad_chunk):
        if not machine.truth[source].grads and not (machine.facts.accumulates and source == grad_chunk):
            continue
        held = _here(machine, event, source)
        if machine.layout.world_size > 1 and held.is_partial:
            machine.refuse(event, f"the gradients in c{source} are not reduced")
        if source == grad_chunk:
            _refuse_lost(machine, event, source, held)
        missing -= held.grads
    if missing:
        names = ", ".join(machine.facts.name(p) for p in sorted(missing))
        machine.refuse(event, f"no gradient of {names} has landed in c{chunk}")


def _here(machine: Machine, event: Event, chunk: int) -> Payload:
    """The true copy of ``chunk`` where ``event`` runs; recorded as read."""
    if event.action.stream is Stream.CPU:
        held = machine.at_home(event, chunk)
        machine.read(event, machine.home_of(f"c{chunk}"))
    else:
        held = machine.resident(event, chunk)
        machine.read(event, f"slot d{machine.slot_of[f'c{chunk}']}")
    return held


def _norm(machine: Machine, event: Event) -> None:
    chunk = machine.chunk(event).index
    if machine.iteration.summed:
        machine.refuse(event, "the norms of all ranks have been added up already")
    if chunk in machine.iteration.normed:
        machine.refuse(event, f"c{chunk} enters the norm twice")
    if machine.iteration.decided:
        machine.refuse(event, "the decision has been taken already")
    if chunk not in machine.facts.to_update:
        machine.refuse(event, f"c{chunk} has no gradients")
    _gradients(machine, event, chunk)
    machine.write(event, f"norm of c{chunk}")
    machine.iteration.normed.add(chunk)


def _read_norms(machine: Machine, event: Event) -> None:
    """``event`` reads the norms of all chunks whose gradients land, which must have been taken."""
    due = {chunk for chunk in machine.facts.to_update if machine.facts.due[chunk]}
    missing = due - machine.iteration.normed
    if missing:
        machine.refuse(event, f"no norm of {', '.join(f'c{c}' for c in sorted(missing))} precedes it")
    for chunk in sorted(machine.iteration.normed):
        machine.read(event, f"norm of c{chunk}")


def _sum(machine: Machine, event: Event) -> None:
    """Every rank takes part once, also one that has taken no norm."""
    if machine.layout.world_size == 1:
        machine.refuse(event, "a single rank has nothing to add up")
    if machine.iteration.summed:
        machine.refuse(event, "the norms of all ranks are added up twice")
    _read_norms(machine, event)
    machine.write(event, "sums")
    machine.iteration.summed = True


def _decide(machine: Machine, event: Event) -> None:
    if machine.iteration.decided:
        machine.refuse(event, "the decision is taken twice")
    if machine.layout.world_size == 1:
        _read_norms(machine, event)
    elif not machine.iteration.summed:
        machine.refuse(event, "no sum of the norms of all ranks precedes it")
    else:
        machine.read(event, "sums")
    machine.write(event, "decision")
    machine.iteration.decided = True


def _begin(machine: Machine, event: Event) -> None:
    """The update of a chunk into its second home, which nobody reads before the step."""
    facts, iteration = machine.facts, machine.iteration
    chunk = machine.chunk(event).index
    if chunk not in facts.to_update or not facts.due[chunk]:
        machine.refuse(event, f"c{chunk} has no gradients")
    if chunk not in machine.side:
        machine.refuse(event, f"c{chunk} has no second home")
    if chunk in iteration.begun:
        machine.refuse(event, f"the update of c{chunk} begins twice")
    _gradients(machine, event, chunk)
    _read_states(machine, event, chunk)
    machine.write(event, machine.home_of(f"os{chunk}", is_second=True))
    machine.write(event, machine.home_of(f"c{chunk}", is_second=True))
    iteration.begun.add(chunk)


def _update(machine: Machine, event: Event) -> None:
    facts, iteration = machine.facts, machine.iteration
    chunk = machine.chunk(event).index
    if chunk not in facts.to_update:
        machine.refuse(event, f"c{chunk} has no gradients")
    if chunk in iteration.updated:
        machine.refuse(event, f"c{chunk} is updated or restored twice")
    if facts.needs_norm:
        if not iteration.decided:
            machine.refuse(event, "it must follow decide")
        machine.read(event, "decision")
    _gradients(machine, event, chunk)
    if chunk not in facts.grad_chunk:
        _here(machine, event, chunk)
    elif event.action.stream is Stream.COMPUTE:
        machine.slot(event, f"c{chunk}")  # written whole, so that it may be open
    elif chunk not in machine.home:
        machine.refuse(event, f"c{chunk} has no host home")
    _step(machine, event, chunk)
    iteration.updated.add(chunk)
    iteration.begun.discard(chunk)


def _read_states(machine: Machine, event: Event, chunk: int) -> None:
    """``event`` reads the states of ``chunk`` where it runs; they must be the newest."""
    on_cpu = event.action.stream is Stream.CPU
    copies = machine.home_os if on_cpu else machine.device_os
    place = "at home" if on_cpu else "on the device"
    if copies.get(chunk) != machine.os_truth.get(chunk) or chunk not in copies:
        machine.refuse(event, f"os{chunk} is not {place}, or its copy there is stale")
    machine.read(event, machine.home_of(f"os{chunk}") if on_cpu else f"slot d{machine.slot_of[f'os{chunk}']}")


def _step(machine: Machine, event: Event, chunk: int) -> None:
    """Advance the states (update only) and write param16 where the action runs.

    The update of a chunk with a second home writes there, and the two change places.
    """
    on_cpu, advance = event.action.stream is Stream.CPU, event.action.op is Op.UPDATE
    _read_states(machine, event, chunk)
    if chunk in machine.side and not on_cpu:
        machine.refuse(event, f"c{chunk} has a second home, so that the host updates it")
    if chunk in machine.side and advance:
        machine.side[chunk] ^= 1
    if advance:
        copies = machine.home_os if on_cpu else machine.device_os
        machine.write(event, machine.home_of(f"os{chunk}") if on_cpu else f"slot d{machine.slot_of[f'os{chunk}']}")
        copies[chunk] = machine.os_truth[chunk] = copies[chunk] + 1
    machine.write(event, machine.home_of(f"c{chunk}") if on_cpu else f"slot d{machine.slot_of[f'c{chunk}']}")
    written = Payload(version=machine.os_truth[chunk])
    (machine.home if on_cpu else machine.device)[chunk] = written
    for other in machine.layout.group_of(chunk).chunks:
        machine.truth[other] = written
    grad_chunk = machine.facts.grad_chunk.get(chunk)
    if grad_chunk is not None:
        _discard(machine, grad_chunk)


def _discard(machine: Machine, grad_chunk: int) -> None:
    """The gradients in ``grad_chunk`` are used up: whatever its bytes hold is as good as nothing."""
    for copies in (machine.truth, machine.device, machine.home):
        if grad_chunk in copies:
            copies[grad_chunk] = Payload()


def finish(machine: Machine, program: Program) -> str | None:
    """Start the bookkeeping of the next program; return what ``program`` has left undone, if anything."""
    iteration, facts = machine.iteration, machine.facts
    refuse_unlanded(machine)
    if program.role == "forward":
        machine.saved.end_forward()
    elif program.role == "backward":
        machine.saved.end_backward()
    graph = ROLE_GRAPH.get(program.role)
    if graph is not None:
        due = sum(s.graph == graph for s in facts.segments.values())
        if iteration.next_segment != due:
            return f"{iteration.next_segment} of {due} segments ran"
    is_step = program.role in ("step", "restore")
    if is_step:
        missing = facts.to_update - iteration.updated
        if missing:
            return f"no update or restore of {', '.join(f'c{c}' for c in sorted(missing))}"
        _renew_remote(machine)
    iteration.next_segment, iteration.last_run = 0, None
    if is_step:
        iteration.normed, iteration.updated, iteration.num_micro_batches = set(), set(), 0
        iteration.summed = iteration.decided = False
        iteration.begun = set()
    if is_step or facts.accumulates:
        iteration.stashed = set()
    return None


def begin(machine: Machine, program: Program) -> None:
    """Begin ``program``: a backward drops what was begun, a forward makes its values anew."""
    if program.role == "forward":
        machine.saved.begin_forward()
    if program.role != "backward":
        return
    machine.iteration.begun = set()
    if not machine.facts.accumulates:
        return
    if program.begins_step:
        machine.iteration.num_micro_batches = 0
        for chunk in machine.facts.grad_chunk.values():
            _discard(machine, chunk)
    machine.iteration.normed, machine.iteration.summed = set(), False  # of gradients to which this one adds
    machine.iteration.num_micro_batches += 1


def _renew_remote(machine: Machine) -> None:
    """Remote chunks beside an own chunk without parameters are updated by their owners all the same."""
    for chunk, due in enumerate(machine.facts.due):
        own_chunk = machine.layout.group_of(chunk).first_chunk + machine.layout.rank
        if due and own_chunk not in machine.facts.to_update:
            machine.truth[chunk] = Payload(machine.truth[chunk].version + 1)


EFFECTS: dict[Op, Callable[[Machine, Event], None]] = {
    **MOVES,
    **VALUE_EFFECTS,
    Op.RUN: _run,
    Op.STASH: _stash,
    Op.ADD: _stash,
    Op.NORM: _norm,
    Op.SUM: _sum,
    Op.DECIDE: _decide,
    Op.BEGIN: _begin,
    Op.UPDATE: _update,
    Op.RESTORE: _update,
}
