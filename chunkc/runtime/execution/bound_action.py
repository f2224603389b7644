"""Parts of bound programs: compiled graphs, values that change per run, actions ready to be launched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

from chunkc.ir.actions import Stream
from chunkc.runtime.devices.protocol import Update
from chunkc.runtime.storage.chunk_store import ChunkStore
from chunkc.runtime.update.update_inputs import StepInputs

SegmentCallable = Callable[[list[Any]], Sequence[Any]]
Work = Callable[[], None]


def in_sequence(*works: Work) -> Work:
    """Make one piece of work of several."""

    def work() -> None:
        for part in works:
            part()

    return work


class GraphSegment(Protocol):
    """Attributes of a lowered segment that execution needs (see ``chunkc.passes.lower``)."""

    @property
    def inputs(self) -> tuple[str, ...]: ...
    @property
    def params(self) -> tuple[tuple[int, int], ...]: ...
    @property
    def outputs(self) -> tuple[str, ...]: ...
    @property
    def dies(self) -> tuple[int, ...]: ...


class Graph(Protocol):
    """Attributes of a lowered graph that execution needs."""

    @property
    def inputs(self) -> tuple[str, ...]: ...
    @property
    def segments(self) -> Sequence[GraphSegment]: ...
    @property
    def result(self) -> tuple[str | tuple[Any], ...]: ...
    @property
    def last_use(self) -> Mapping[str, int]: ...


@dataclass(frozen=True, slots=True)
class CompiledGraph:
    """A lowered graph, a callable per segment, and by value name the parameters whose gradients it makes."""

    graph: Graph
    segments: Sequence[SegmentCallable]
    gradients: Mapping[str, int]

    def outputs(self, values: Mapping[str, Any]) -> list[Any]:
        """Results of the graph, with None for gradients of parameters."""
        return [self._output(entry, values) for entry in self.graph.result]

    def _output(self, entry: str | tuple[Any, ...], values: Mapping[str, Any]) -> Any:
        if not isinstance(entry, str):
            return entry[0]
        return None if entry in self.gradients else values[entry]


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

    ``update`` stands in for ``work`` where hyperparameters are needed. After ``is_sum`` norms can be read.
    """

    label: str
    text: str
    stream: Stream
    waits: tuple[str, ...]
    work: Callable[[], None]
    update: Update | None = None
    is_sum: bool = False


@dataclass(frozen=True, slots=True)
class AnnouncedUpdate:
    """An update of optimizer states where they live, which a snapshot may still need as it was."""

    inner: Update
    store: ChunkStore
    chunk: int

    def update(self, inputs: StepInputs) -> None:
        self.store.before_write(self.chunk)
        self.inner.update(inputs)

    def restore(self) -> None:
        """Optimizer states stay as they are."""
        self.inner.restore()
