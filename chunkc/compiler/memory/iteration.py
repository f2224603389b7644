"""The non-model bytes of one iteration as its compiled segments will run.

The bytes come from a replay of what the executor does. The executor keeps values by name, hands a segment those that it
takes, drops its own name for those that die there, and drops a gradient when it has landed. The replay does the same
with storages and counts who holds each. The user holds inputs, buffers and outputs all the while, and during a forward
the outputs of the forward before it; autograd holds what backward will read until backward lets go of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from chunkc.capture.bundles import CapturedGraph
from chunkc.capture.graphs import Captured
from chunkc.compiler.memory.footprint import NO_STORAGE, Footprint, tensors_in
from chunkc.ir.plan import Segment
from chunkc.ir.schedule import GraphKind
from chunkc.ir.values import GraphValues


@dataclass(frozen=True, slots=True)
class SegmentBytes:
    """Non-model bytes alive while a segment runs, the peak with its kernels, and those alive at exit."""

    live_nbytes: int
    peak_nbytes: int
    exit_nbytes: int

    @property
    def workspace_nbytes(self) -> int:
        """Bytes by which kernels raise the peak above what is alive."""
        return self.peak_nbytes - self.live_nbytes


@dataclass(slots=True)
class _Heap:
    """Storages by how many hold them, and the bytes alive."""

    nbytes: int = 0
    _sizes: list[int] = field(default_factory=list)
    _holders: list[int] = field(default_factory=list)

    def new(self, nbytes: int) -> int:
        """A storage that one holds."""
        self._sizes.append(nbytes)
        self._holders.append(1)
        self.nbytes += nbytes
        return len(self._sizes) - 1

    def hold(self, storage: int | None) -> None:
        if storage is not None:
            self._holders[storage] += 1

    def drop(self, storage: int | None) -> None:
        if storage is not None:
            self._holders[storage] -= 1
            self.nbytes -= 0 if self._holders[storage] else self._sizes[storage]

    def total(self, storages: Iterable[int | None]) -> int:
        """Bytes of these storages, each counted once."""
        return sum(self._sizes[s] for s in set(storages) if s is not None)


@dataclass(slots=True)
class _Run:
    """One graph under way: ``names`` are the executor's values, None for what is no storage or model data."""

    heap: _Heap
    graph: GraphValues
    names: dict[str, int | None]

    def segment(self, position: int, footprint: Footprint) -> SegmentBytes:
        """Run one segment; afterwards ``names`` has its outputs and not the inputs that died in it."""
        lowered, heap = self.graph.segments[position], self.heap
        held = {number: self.names[name] for number, name in enumerate(lowered.inputs)}
        for number, name in enumerate(lowered.inputs):
            if number in lowered.dies:
                del self.names[name]
            else:
                heap.hold(held[number])
        live = peak = heap.nbytes
        for step in footprint.steps:
            for number in step.allocates:
                held[number] = heap.new(footprint.nbytes[number - footprint.num_inputs])
            live, peak = max(live, heap.nbytes), max(peak, heap.nbytes + step.workspace_nbytes)
            for number in step.releases:
                heap.drop(held.pop(number))
        outputs = [None if number == NO_STORAGE else held[number] for number in footprint.outputs]
        for name, storage in zip(lowered.outputs, outputs, strict=True):
            heap.hold(storage)
            self.names[name] = storage
        for storage in held.values():
            heap.drop(storage)
        return SegmentBytes(live, peak, heap.nbytes)

    def keep_only(self, wanted: Collection[str]) -> None:
        for name in [n for n in self.names if n not in wanted]:
            self.heap.drop(self.names.pop(name))


def iteration_bytes(
    captured: Captured,
    segments: Sequence[Segment],
    graphs: Mapping[GraphKind, GraphValues],
    footprints: Mapping[GraphKind, Sequence[Footprint]],
) -> tuple[SegmentBytes, ...]:
    """The non-model bytes of every segment, forward's first.

    Args:
        captured: the iteration; its backward graph may have no operators.
        segments: the plan's, which say where gradients land.
        graphs: both graphs in segments, by ``forward`` and ``backward``.
        footprints: of their segments.
    """
    heap = _Heap()
    heap.new(_constants_nbytes(captured) + captured.concurrent_nbytes)
    names = _placeholders(captured.forward, heap, {})
    for storage in names.values():
        heap.hold(storage)  # the user's own hold
    inputs = set(names.values())
    forward = _Run(heap, graphs["forward"], names)
    found = [forward.segment(i, footprint) for i, footprint in enumerate(footprints["forward"])]
    result = {e for e in graphs["forward"].result if isinstance(e, str)}
    forward.keep_only(result)
    outputs = {forward.names.get(name) for name in captured.user_outputs} - inputs
    previous_nbytes = heap.total(outputs)
    found = [SegmentBytes(*(n + previous_nbytes for n in (s.live_nbytes, s.peak_nbytes, s.exit_nbytes))) for s in found]
    for name in captured.user_outputs:
        heap.hold(forward.names.get(name))
    return (*found, *_backward_bytes(captured, segments, graphs, footprints, forward))


def _backward_bytes(
    captured: Captured,
    segments: Sequence[Segment],
    graphs: Mapping[GraphKind, GraphValues],
    footprints: Mapping[GraphKind, Sequence[Footprint]],
    forward: _Run,
) -> list[SegmentBytes]:
    heap, graph = forward.heap, graphs["backward"]
    names = _placeholders(captured.backward, heap, forward.names, scales=captured.scales)
    forward.keep_only(())
    run = _Run(heap, graph, names)
    run.keep_only({*graph.last_use, *(e for e in graph.result if isinstance(e, str))})
    gradients = {param: name for name, param in captured.backward.gradients.items()}
    lands = [s.lands for s in segments if s.graph == "backward"]
    found = []
    for position, footprint in enumerate(footprints["backward"]):
        found.append(run.segment(position, footprint))
        for param in lands[position]:
            name = gradients[param]
            if name in run.names and graph.last_use.get(name, -1) <= position:
                heap.drop(run.names.pop(name))
    return found


def _placeholders(
    graph: CapturedGraph, heap: _Heap, known: Mapping[str, int | None], *, scales: bool = False
) -> dict[str, int | None]:
    """Return each input's storage: one of ``known``, a new one, or None for model data and numbers; a
    scaled tangent's also stands for its product."""
    names: dict[str, int | None] = {}
    shared: dict[int, int | None] = {}
    for node in graph.module.graph.find_nodes(op="placeholder"):
        tensors = tensors_in(node.meta.get("val"))
        if node.name in graph.params or not tensors:
            names[node.name] = None
            continue
        if scales and node.name.startswith("tangents"):
            products_nbytes = sum(t.numel() * t.element_size() for t in tensors if t.is_floating_point())
            names[node.name] = heap.new(_nbytes(node.meta.get("val")) + products_nbytes)
            continue
        identity = tensors[0].untyped_storage()._cdata
        if node.name in known:
            shared[identity] = known[node.name]
        if identity in shared:
            heap.hold(shared[identity])
        else:
            shared[identity] = heap.new(_nbytes(node.meta.get("val")))
        names[node.name] = shared[identity]
    return names


def _constants_nbytes(captured: Captured) -> int:
    """Bytes of the constants that the graphs hold."""
    modules = (captured.forward.module, captured.backward.module)
    values = [n.meta.get("val") for m in modules for n in m.graph.find_nodes(op="get_attr")]
    return _nbytes(values)


def _nbytes(value: object) -> int:
    sizes = {t.untyped_storage()._cdata: int(t.untyped_storage().nbytes()) for t in tensors_in(value)}
    return sum(sizes.values())
