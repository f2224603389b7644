"""Compiling segments: one callable per distinct piece of code, whatever layer it comes from.

``eager`` runs the segment's operators one by one; values die at their last use inside it. ``inductor`` compiles it.
Both take one flat list, which they empty, and return a flat sequence. What compiled segments take in memory is read
from them.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Literal

import torch

from chunkc._torch_compat.compile_helpers import CompileHelpers
from chunkc._torch_compat.core import boxed_code
from chunkc._torch_compat.inductor import (
    await_kernel_workers,
    inductor_code,
    inductor_compile,
    inductor_decompositions,
    inductor_joint_passes,
    named_vectors,
    num_cache_misses,
    start_kernel_workers,
)
from chunkc.capture.tracing import TracingOptions
from chunkc.compiler.memory.footprint import Footprint, graph_footprint
from chunkc.compiler.memory.inductor import NotUnderstoodError, source_footprint
from chunkc.errors import ChunkcError
from chunkc.passes.lower import LoweredGraph, LoweredSegment
from chunkc.progress import Counted
from chunkc.runtime.execution.bound_action import SegmentCallable

logger = logging.getLogger("chunkc")

Backend = Literal["inductor", "eager"]


def compile_eager(segment: LoweredSegment) -> SegmentCallable:
    """Run the segment's operators one by one."""
    return boxed_code(segment.module)


def compile_inductor(segment: LoweredSegment) -> SegmentCallable:
    """Compile the segment's graph with Inductor."""
    return inductor_compile(segment.module, segment.examples)


def footprint_of(segment: LoweredSegment, compiled: SegmentCallable) -> Footprint:
    """Return the footprint of a segment as Inductor compiled it, or of its operators where none is told."""
    generated = inductor_code(compiled)
    reason = "it has no generated code"
    if generated is not None:
        try:
            return source_footprint(*generated, segment.examples)
        except NotUnderstoodError as error:
            reason = str(error)
    logger.info("the memory of segment %s is planned as if its operators ran one by one: %s", segment.name, reason)
    return graph_footprint(segment.module)


class SegmentCompiler:
    """Compiles the segments of one model, equal segments once, of graphs traced by ``tracing``.

    ``fuses``: whether compiled segments take other bytes than their operators one by one (``footprints``).
    """

    def __init__(
        self,
        compile_one: Callable[[LoweredSegment], SegmentCallable],
        read_footprint: Callable[[LoweredSegment, SegmentCallable], Footprint] | None = None,
        tracing: TracingOptions = TracingOptions(),  # noqa: B008 - frozen
    ) -> None:
        self.tracing = tracing
        self.fuses = read_footprint is not None
        self._compile_one = compile_one
        self._read_footprint = read_footprint
        self._has_workers = False
        self._compiled: dict[str, SegmentCallable] = {}
        self._footprints: dict[str, Footprint] = {}

    @staticmethod
    def of(backend: str) -> SegmentCompiler:
        """The compiler of ``backend``; ChunkcError for an unknown one."""
        if backend not in ("inductor", "eager"):
            raise ChunkcError(f"backend={backend!r} is unknown; choose inductor or eager")
        if backend == "eager":
            return SegmentCompiler(compile_eager)
        tracing = TracingOptions(inductor_decompositions(), inductor_joint_passes, fuses=True)
        return SegmentCompiler(compile_inductor, footprint_of, tracing)

    def interpreter(self) -> SegmentCompiler:
        """Return a compiler that lets segments of the same graphs run operator by operator."""
        return SegmentCompiler(compile_eager, tracing=self.tracing)

    def begin(self, device: torch.device) -> None:
        """Get ready to compile for ``device``: workers for a GPU's kernels start while the model is captured."""
        if self.fuses and device.type == "cuda" and not self._has_workers:
            self._has_workers = True
            start_kernel_workers()

    @property
    def num_compiles(self) -> int:
        return len(self._compiled)

    def compile(self, graph: LoweredGraph) -> list[SegmentCallable]:
        """A callable for every segment of ``graph``, in order."""
        self.compile_all([graph])
        return [self._compiled[segment.key] for segment in graph.segments]

    def compile_all(self, graphs: Iterable[LoweredGraph]) -> None:
        """Compile the segments of all of ``graphs``, and count them together."""
        missing = {s.key: s for graph in graphs for s in graph.segments if s.key not in self._compiled}
        note = "cached for next time" if self.fuses else ""
        progress = Counted("compiling", len(missing), "different segments", note)
        waiting = deque(missing.values())
        if self._has_workers and missing and not await_kernel_workers():
            logger.info("Inductor's workers take no kernels: this process compiles them itself, one by one")
        with named_vectors() if self.fuses else nullcontext(), CompileHelpers[LoweredSegment]() as helpers:
            while waiting:
                elapsed_s = self._compile_segment(waiting.popleft(), progress)
                if self.fuses:
                    helpers.note(elapsed_s, waiting)
            for segment in helpers.taken():
                self._compile_segment(segment, progress)

    def _compile_segment(self, segment: LoweredSegment, progress: Counted) -> float:
        """Compile one segment, and return how many seconds that took; 0 where it came from Inductor's cache."""
        began_s, misses_before = time.perf_counter(), num_cache_misses() if self.fuses else 0
        self._compiled[segment.key] = self._compile_one(segment)
        progress.advance()
        is_new = self.fuses and num_cache_misses() > misses_before
        return time.perf_counter() - began_s if is_new else 0.0

    def footprints(self, graph: LoweredGraph) -> list[Footprint]:
        """Return when every segment of ``graph``, as compiled, takes and lets go of memory, in order."""
        for segment, compiled in zip(graph.segments, self.compile(graph), strict=True):
            if segment.key not in self._footprints:
                read = self._read_footprint or (lambda s, _: graph_footprint(s.module))
                self._footprints[segment.key] = read(segment, compiled)
        return [self._footprints[segment.key] for segment in graph.segments]
