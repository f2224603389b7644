"""Parts of bound programs: compiled graphs, values that change per run, actions ready to be launched.

The functions here make the work of one action from the memory that `binder` has found for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from chunkc.errors import PlanError
from chunkc.ir.actions import Op, Stream
from chunkc.ir.plan import Program
from chunkc.ir.values import GraphValues, SegmentValues
from chunkc.runtime.devices.protocol import Event, PlannedLaunch, Update, Work
from chunkc.runtime.storage.chunk_store import ChunkStore
from chunkc.runtime.storage.saved_copies import SavedCopies
from chunkc.runtime.update.begun import BegunStep
from chunkc.runtime.update.second_home import SecondHomeUpdate
from chunkc.runtime.update.update_inputs import StepInputs

SegmentCallable = Callable[[list[Any]], Sequence[Any]]


def in_sequence(*works: Work) -> Work:
    """Make one piece of work of several."""

    def work() -> None:
        for part in works:
            part()

    return work


@dataclass(frozen=True, slots=True)
class CompiledGraph:
    """A lowered graph, a callable per segment, and by value name the parameters whose gradients it makes.

    ``saved``: of a forward graph, by moved value (position in `Plan.saved`), the names of all values in its storages.
    ``draws``: whether its iteration draws random numbers.
    """

    graph: GraphValues
    segments: Sequence[SegmentCallable]
    gradients: Mapping[str, int]
    saved: Mapping[int, Set[str]] = field(default_factory=dict)
    draws: bool = False

    def outputs(self, values: Mapping[str, Any]) -> list[Any]:
        """Results of the graph, with None for gradients of parameters."""
        gradients = self.gradients
        return [
            entry[0] if not isinstance(entry, str) else None if entry in gradients else values[entry]
            for entry in self.graph.result
        ]


@dataclass(frozen=True, slots=True)
class ValueTable:
    """Values of one compiled graph by slot: which inputs enter, and what the graph returns.

    Attributes:
        used_inputs: slots, which are also positions, of the inputs that segments or the result take.
        constants: the result with None for values; ``results``: positions and slots of these.
    """

    num_values: int
    used_inputs: tuple[int, ...]
    constants: tuple[Any, ...]
    results: tuple[tuple[int, int], ...]

    @staticmethod
    def of(compiled: CompiledGraph) -> ValueTable:
        graph, slots = compiled.graph, compiled.graph.slots()
        results = {i: entry for i, entry in enumerate(graph.result) if isinstance(entry, str)}
        taken = {name for name in results.values()}
        for segment in graph.segments:
            payloads = {i for i, _ in segment.params}
            taken.update(name for i, name in enumerate(segment.inputs) if i not in payloads)
        return ValueTable(
            len(slots),
            tuple(slot for slot, name in enumerate(graph.inputs) if name in taken),
            tuple(None if isinstance(entry, str) else entry[0] for entry in graph.result),
            tuple((i, slots[name]) for i, name in results.items() if name not in compiled.gradients),
        )

    def begin(self, args: list[Any]) -> list[Any]:
        """Values before the graph runs on ``args``, which this empties."""
        values: list[Any] = [None] * self.num_values
        for slot in self.used_inputs:
            values[slot] = args[slot]
        args.clear()
        return values

    def end(self, values: Sequence[Any]) -> list[Any]:
        """Results of the graph, with None for gradients of parameters."""
        outputs = list(self.constants)
        for i, slot in self.results:
            outputs[i] = values[slot]
        return outputs


@dataclass(slots=True)
class RunEnvironment:
    """State that changes while programs run: values by slot, and bytes moved by each program's latest run.

    ``accumulated``: parameters whose gradient chunks hold a gradient, to which ``add`` adds. ``withheld``: parameters
    whose gradient nobody asked for: zeros land in its place. ``copies``: of the forward that runs, or whose backward.
    """

    values: list[Any] = field(default_factory=list)
    accumulated: Set[int] = frozenset()
    withheld: Set[int] = frozenset()
    copies: SavedCopies | None = None
    moved_nbytes: dict[tuple[str, Stream], int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BoundAction:
    """An action with the function that does it.

    ``update`` stands in for ``work`` where the program is given inputs: those of a step, or of the step that a backward
    expects. After ``is_sum`` norms can be read. ``move`` stands in for ``work`` where saved values have copies.
    """

    launch: PlannedLaunch
    work: Work
    update: Callable[[Any], None] | None = None
    is_sum: bool = False
    move: Callable[[SavedCopies], None] | None = None


@dataclass(frozen=True, slots=True)
class BoundProgram:
    """A program of the plan, its name, and its actions in order, ready to be launched.

    Attributes:
        launches, works: of its actions; works without inputs.
        sums: labels of the actions after which norms can be read.
        moves: positions of the actions that move saved values; ``moved``: positions of these in `Plan.saved`.
        without_begins: the same where no update begins before its step; None where none ever does.
    """

    planned: Program
    name: str
    actions: tuple[BoundAction, ...]
    launches: tuple[PlannedLaunch, ...]
    works: tuple[Work, ...]
    sums: tuple[str, ...]
    moves: tuple[tuple[int, Callable[[SavedCopies], None]], ...] = ()
    moved: frozenset[int] = frozenset()
    without_begins: BoundProgram | None = None

    def works_with(self, inputs: object, copies: SavedCopies | None = None) -> Sequence[Work]:
        """Works of the actions in order; updates take ``inputs``, and moves ``copies``, unless these are None."""
        works: Sequence[Work] = self.works
        if inputs is not None:
            works = [a.work if a.update is None else partial(a.update, inputs) for a in self.actions]
        if copies is not None and self.moves:
            works = list(works)
            for position, move in self.moves:
                works[position] = partial(move, copies)
        return works

    def num_launched(self, events: Mapping[str, Event]) -> int:
        """How many of its actions have been launched, by the events that `Device.launch_all` has kept."""
        labels = (launch.label for launch in self.launches)
        return next((i for i, label in enumerate(labels) if label not in events), len(self.launches))

    @staticmethod
    def of(planned: Program, actions: tuple[BoundAction, ...]) -> BoundProgram:
        shorter, without = planned.without_begins(), None
        if shorter is not planned:
            kept = {label for label, _ in shorter.labelled()}
            without = BoundProgram.of(shorter, tuple(a for a in actions if a.launch.label in kept))
        launches, works = tuple(a.launch for a in actions), tuple(a.work for a in actions)
        sums = tuple(a.launch.label for a in actions if a.is_sum)
        moves = tuple((i, a.move) for i, a in enumerate(actions) if a.move is not None)
        moved = frozenset(a.index for a in planned.actions if a.op is Op.RELOAD)
        return BoundProgram(planned, planned.name, actions, launches, works, sums, moves, moved, without)


@dataclass(frozen=True, slots=True)
class AnnouncedUpdate:
    """An update of optimizer states where they live, which a snapshot may still need as it was."""

    inner: Update
    store: ChunkStore
    chunk: int

    def update(self, inputs: StepInputs) -> None:
        if self.store.snapshot is not None:
            self.store.before_write(self.chunk)
        self.inner.update(inputs)

    def begin(self, begun: BegunStep) -> None:
        """Begin the update of a chunk with a second home."""
        if not isinstance(self.inner, SecondHomeUpdate):
            raise PlanError(f"the update of c{self.chunk} cannot begin before its step: it has no second home")
        if self.store.snapshot is not None:
            self.store.before_write(self.chunk)
        self.inner.begin(begun)

    def restore(self) -> None:
        """Optimizer states stay as they are."""
        self.inner.restore()


def announcing(store: ChunkStore, chunk: int) -> Work:
    """Wait until no snapshot needs what stands in a chunk."""

    def announce() -> None:
        if store.snapshot is not None:
            store.before_write(chunk)

    return announce


def copying(target: torch.Tensor, source: torch.Tensor, env: RunEnvironment, program: str, stream: Stream) -> Work:
    """Copy ``source`` to ``target``, and count its bytes for ``program``."""
    nbytes, moved, key = source.numel() * source.element_size(), env.moved_nbytes, (program, stream)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        moved[key] = moved.get(key, 0) + nbytes

    return copy


def running(
    segment: SegmentValues,
    run: SegmentCallable,
    payloads: Sequence[tuple[int, torch.Tensor]],
    env: RunEnvironment,
    slots: Mapping[str, int],
    sample: Work,
    saved: Mapping[int, Set[int]],
) -> Work:
    """Run a segment on values of ``env``, by ``slots``, and ``payloads``, by position; then ``sample``.

    ``saved``: by moved value, the positions of the results in its storages.
    """
    is_payload = {i for i, _ in payloads}
    taken = [(i, slots[name]) for i, name in enumerate(segment.inputs) if i not in is_payload]
    dying = [slot for i, slot in taken if i in segment.dies]
    first = slots[segment.outputs[0]] if segment.outputs else 0
    num_outputs, end = len(segment.outputs), first + len(segment.outputs)
    template: list[Any] = [None] * len(segment.inputs)
    for i, payload in payloads:
        template[i] = payload

    def work() -> None:
        values, args = env.values, template.copy()
        for i, slot in taken:
            args[i] = values[slot]
        for slot in dying:
            values[slot] = None
        made = run(args)
        del args  # what dies here is no longer in memory when it is sampled
        if len(made) != num_outputs:
            raise PlanError(f"a segment made {len(made)} values instead of {num_outputs}")
        values[first:end] = made
        if saved and env.copies is not None:
            env.copies.hold(made, saved)
        sample()

    return work


def moving(op: Op, index: int, env: RunEnvironment, program: str) -> Callable[[SavedCopies], None]:
    """Carry out ``op`` on the copies of a saved value, and count bytes copied for ``program``."""
    moved = env.moved_nbytes
    match op:
        case Op.DISCARD:
            return lambda copies: copies.discard(index)
        case Op.ALLOCATE:
            return lambda copies: copies.allocate(index)
    key = (program, Stream.D2H if op is Op.OFFLOAD else Stream.H2D)

    def copy(copies: SavedCopies) -> None:
        nbytes = copies.offload(index) if op is Op.OFFLOAD else copies.reload(index)
        moved[key] = moved.get(key, 0) + nbytes

    return copy


class Landing(NamedTuple):
    """The part of a gradient that lands in one chunk.

    Attributes:
        slot: of the whole gradient among the values; nothing reads it afterwards if ``is_last``.
        target: where the part goes, as the parameter is strided or, with an ``order``, 1-D.
        order: dimensions in the order of memory, of a gradient of which the chunk holds elements ``part`` alone.
    """

    param: int
    slot: int
    is_last: bool
    target: torch.Tensor
    order: Sequence[int] | None = None
    part: slice = slice(None)


def stashing(landings: Sequence[Landing], env: RunEnvironment, share: float, *, adds: bool) -> Work:
    """Put gradients, times ``share``, where they land, or add them there to those that were accumulated."""

    def stash() -> None:
        values = env.values
        for param, slot, is_last, target, order, part in landings:
            gradient = values[slot]
            if is_last:
                values[slot] = None
            is_added = adds and param in env.accumulated
            if param in env.withheld:
                if not is_added:
                    target.zero_()
                continue
            if order is not None:
                gradient = gradient.permute(order).reshape(-1)[part]
            if is_added:
                target.add_(gradient, alpha=share)
            elif share == 1.0:
                target.copy_(gradient)
            else:
                torch.mul(gradient, share, out=target)

    return stash
