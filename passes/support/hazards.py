"""Waits: which earlier actions must be complete before an action starts, on streams that are queues.

Every action reads and writes resources (slots, homes, states). It must wait for the last writer of what it reads, and
for the last writer and the readers since of what it writes. Slots may share bytes: what touches one of them touches the
others, but does not replace their last users, since bytes are left that only they used. A vector clock per action
(Fidge 1988, Mattern 1988: per stream, how many actions are known complete) tells which of these the queue or another
wait already implies; only the rest become waits.

Programs repeat without joining, so the analysis runs over several iterations in a row and keeps the waits of the
second, in which hazards against the iteration before show. In the first iteration labels of programs that never ran are
void. Where a step takes several micro-batches, a program follows different ones, and waits for what any of them asks.

Updates may begin before their step, or not: what begins orders its queue behind the gradients that it reads. So both
kinds of iterations are analysed, and an action waits for what either asks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from chunkc.errors import PlanError
from chunkc.ir.actions import Action, Op, Stream
from chunkc.ir.plan import ROLE_LETTER, Role
from chunkc.passes.support.draft import ActionAccess

STREAMS = tuple(Stream)
_WARM_UP: tuple[Role, ...] = ("forward", "backward", "step")
"""The first iteration, in which labels of programs that never ran are void."""
_NUMBER = {stream: index for index, stream in enumerate(STREAMS)}


@dataclass(frozen=True, slots=True)
class Done:
    """An action already analysed: ``number``-th of its stream, complete when ``clock`` is reached."""

    stream: int
    number: int
    clock: tuple[int, ...]
    instance: int
    role: Role
    position: int


@dataclass(slots=True)
class Analysis:
    """Actions analysed so far, and who touched each resource last."""

    overlaps: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    done: list[Done] = field(default_factory=list)
    tails: list[tuple[int, ...]] = field(default_factory=lambda: [(0,) * len(STREAMS)] * len(STREAMS))
    writers: dict[str, int] = field(default_factory=dict)
    readers: dict[str, dict[int, int]] = field(default_factory=dict)
    latest: dict[Role, int] = field(default_factory=dict)
    num_instances: int = 0

    def run(self, role: Role, accesses: Sequence[ActionAccess], *, begins: bool = True) -> tuple[Action, ...]:
        """Analyse one run of a program; its actions with their waits.

        Without ``begins``, updates do not begin before their step, and these actions come back as they are.
        """
        instance, self.num_instances = self.num_instances, self.num_instances + 1
        self.latest[role] = instance
        return tuple(
            self._action(role, instance, position, access)
            if begins or access.action.op is not Op.BEGIN
            else access.action
            for position, access in enumerate(accesses)
        )

    def _action(self, role: Role, instance: int, position: int, access: ActionAccess) -> Action:
        stream = _NUMBER[access.action.stream]
        clock = self.tails[stream]
        waits: list[int] = []
        for index in sorted(self._hazards(access), reverse=True):
            before = self.done[index]
            if clock[before.stream] < before.number:
                wait = self._expressible(index, instance)
                waits.append(wait)
                clock = tuple(map(max, clock, self.done[wait].clock))
        number = self.tails[stream][stream] + 1
        clock = (*clock[:stream], number, *clock[stream + 1 :])
        self.tails[stream] = clock
        self._touch(access, stream, len(self.done))
        self.done.append(Done(stream, number, clock, instance, role, position))
        labels = tuple(f"{ROLE_LETTER[self.done[w].role]}{self.done[w].position}" for w in sorted(waits))
        return access.action.after(labels)

    def _hazards(self, access: ActionAccess) -> set[int]:
        hazards, writers, readers, overlaps = set[int](), self.writers, self.readers, self.overlaps
        for resource in access.reads:
            hazards.update(writers[r] for r in overlaps.get(resource, (resource,)) if r in writers)
        for resource in access.writes:
            for same in overlaps.get(resource, (resource,)):
                if same in writers:
                    hazards.add(writers[same])
                if same in readers:
                    hazards.update(readers[same].values())
        return hazards

    def _touch(self, access: ActionAccess, stream: int, index: int) -> None:
        for resource in access.reads:
            self.readers.setdefault(resource, {})[stream] = index
        for resource in access.writes:
            self.writers[resource] = index
            self.readers[resource] = {}

    def _expressible(self, index: int, instance: int) -> int:
        """``index``, or the first action behind it that a label can name and whose completion implies it."""
        wanted = self.done[index]
        for position in range(index, len(self.done)):
            later = self.done[position]
            named = later.instance == (instance if later.role == self._role(instance) else self.latest[later.role])
            if named and later.clock[wanted.stream] >= wanted.number:
                return position
        raise PlanError(f"no label can order an action after {wanted.role} {wanted.position} of an earlier run")

    def _role(self, instance: int) -> Role:
        return next(role for role, latest in self.latest.items() if latest == instance)


def synchronise(
    forward: Sequence[ActionAccess],
    backward: Sequence[ActionAccess],
    step: Sequence[ActionAccess],
    abandon: Sequence[ActionAccess],
    overlaps: Mapping[str, tuple[str, ...]],
    *,
    accumulates: bool = False,
) -> tuple[tuple[Action, ...], ...]:
    """The actions of the four programs with the waits of a repeated iteration."""
    accesses: dict[Role, Sequence[ActionAccess]] = {"forward": forward, "backward": backward, "step": step}
    graphs: tuple[Role, ...] = ("forward", "backward")
    order: tuple[Role, ...] = (*graphs, "step")
    if accumulates:
        order = (*order, *graphs, *graphs, *graphs, *order, *order)
    else:
        order = (*order, *order)
    may_begin = any(x.action.op is Op.BEGIN for x in backward)
    waiting: dict[Role, tuple[Action, ...]] = {}
    for begins in (True, False) if may_begin else (True,):
        analysis = Analysis(overlaps)
        for position, role in enumerate(order):
            is_last = order[position + 1 : position + 2] == ("step",)  # a micro-batch before the last begins nothing
            actions = analysis.run(role, accesses[role], begins=begins and is_last)
            if position >= len(_WARM_UP):
                waiting[role] = tuple(_both(*pair) for pair in zip(actions, waiting.get(role, actions), strict=True))
        analysis.run("forward", forward)
        ends = analysis.run("abandon", abandon)
        waiting["abandon"] = tuple(_both(*pair) for pair in zip(ends, waiting.get("abandon", ends), strict=True))
    return (*(waiting[role] for role in accesses), waiting["abandon"])


def _both(action: Action, same: Action) -> Action:
    if action.waits == same.waits:
        return action
    waits = dict.fromkeys((*same.waits, *action.waits))
    return action.after(tuple(sorted(waits, key=lambda label: (label[0], int(label[1:])))))


def joined(accesses: Sequence[ActionAccess]) -> tuple[Action, ...]:
    """The actions of a transition that begins when all streams are idle, with their waits for each other."""
    return Analysis().run("resume", accesses)
