"""Parts of bound programs: compiled graphs, values that change per run, actions ready to be launched.

The functions here make the work of one action from the memory that `binder` has found for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from chunkc.errors import PlanError
from chunkc.ir.actions import Stream
from chunkc.ir.plan import Program
from chunkc.ir.values import GraphValues, SegmentValues
from chunkc.runtime.devices.protocol import Update
from chunkc.runtime.storage.chunk_store import ChunkStore
from chunkc.runtime.update.begun import BegunStep
from chunkc.runtime.update.second_home import SecondHomeUpdate
from chunkc.runtime.update.update_inputs import StepInputs

SegmentCallable = Callable[[list[Any]], Sequence[Any]]
Work = Callable[[], None]


def in_sequence(*works: Work) -> Work:
    """Make one piece of work of several."""

    def work() -> None:
        for part in works:
            part()

    return work


@dataclass(frozen=True, slots=True)
class CompiledGraph:
    """A lowered graph, a callable per segment, and by value name the parameters whose gradients it makes."""

    graph: GraphValues
    segments: Sequence[SegmentCallable]
    gradients: Mapping[str, int]

    def outputs(self, values: Mapping[str, Any]) -> list[Any]:
        """Results of the graph, with None for gradients of parameters."""
        gradients = self.gradients
        return [
            entry[0] if not isinstance(entry, str) else None if entry in gradients else values[entry]
            for entry in self.graph.result
        ]


@dataclass(slots=True)
class RunEnvironment:
    """State that changes while programs run: values by name, and bytes moved by each program's latest run.

    ``accumulated``: parameters whose gradient chunks hold a gradient, to which ``add`` adds. ``withheld``: parameters
    whose gradient nobody asked for: zeros land in its place.
    """

    values: dict[str, Any] = field(default_factory=dict)
    accumulated: Set[int] = frozenset()
    withheld: Set[int] = frozenset()
    moved_nbytes: dict[tuple[str, Stream], int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BoundAction:
    """An action with the function that does it.

    ``update`` stands in for ``work`` where the program is given inputs: those of a step, or of the step that a backward
    expects. After ``is_sum`` norms can be read.
    """

    label: str
    text: str
    stream: Stream
    waits: tuple[str, ...]
    work: Callable[[], None]
    update: Callable[[Any], None] | None = None
    is_sum: bool = False


@dataclass(frozen=True, slots=True)
class BoundProgram:
    """A program of the plan, its name, and its actions in order, ready to be launched.

    ``without_begins``: the same where no update begins before its step; None where none ever does.
    """

    planned: Program
    name: str
    actions: tuple[BoundAction, ...]
    without_begins: BoundProgram | None = None

    @staticmethod
    def of(planned: Program, actions: tuple[BoundAction, ...]) -> BoundProgram:
        shorter = planned.without_begins()
        if shorter is planned:
            return BoundProgram(planned, planned.name, actions)
        kept = {label for label, _ in shorter.labelled()}
        without = BoundProgram(shorter, shorter.name, tuple(a for a in actions if a.label in kept))
        return BoundProgram(planned, planned.name, actions, without)


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
    sample: Work,
) -> Work:
    """Run a segment on values of ``env`` and ``payloads`` by position; then ``sample`` memory."""
    names, outputs = [(n, i in segment.dies) for i, n in enumerate(segment.inputs)], segment.outputs

    def work() -> None:
        values = env.values
        args = [values.pop(name) if dies else values.get(name) for name, dies in names]
        for i, payload in payloads:
            args[i] = payload
        values.update(zip(outputs, run(args), strict=True))
        sample()

    return work


class Landing(NamedTuple):
    """The part of a gradient that lands in one chunk.

    Attributes:
        name: of the whole gradient among the values; nothing reads it afterwards if ``is_last``.
        target: where the part goes, as the parameter is strided or, with an ``order``, 1-D.
        order: dimensions in the order of memory, of a gradient of which the chunk holds elements ``part`` alone.
    """

    param: int
    name: str
    is_last: bool
    target: torch.Tensor
    order: Sequence[int] | None = None
    part: slice = slice(None)


def stashing(landings: Sequence[Landing], env: RunEnvironment, share: float, *, adds: bool) -> Work:
    """Put gradients, times ``share``, where they land, or add them there to those that were accumulated."""

    def stash() -> None:
        for param, name, is_last, target, order, part in landings:
            gradient = env.values.pop(name) if is_last else env.values[name]
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
