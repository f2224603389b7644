"""Compiling segments: one callable per distinct piece of code, whatever layer it comes from.

``eager`` interprets the segment's graph; values die at their last use inside it. ``inductor`` compiles it. Both take
one flat list, which they empty, and return a flat sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch.fx

from chunkc._torch_compat import inductor_compile, inductor_decompositions, inductor_joint_passes
from chunkc.errors import ChunkcError
from chunkc.passes.lower import LoweredGraph, LoweredSegment
from chunkc.runtime.bind import SegmentCallable

Backend = Literal["inductor", "eager"]


def compile_eager(segment: LoweredSegment) -> SegmentCallable:
    """Interpret the segment's graph node by node."""
    interpreter = torch.fx.Interpreter(segment.module)

    def run(args: list[Any]) -> Sequence[Any]:
        outputs: Sequence[Any] = interpreter.boxed_run(args)
        interpreter.env.clear()
        return outputs

    return run


def compile_inductor(segment: LoweredSegment) -> SegmentCallable:
    """Compile the segment's graph with Inductor."""
    return inductor_compile(segment.module, segment.examples)


def segment_compiler(backend: str) -> Callable[[LoweredSegment], SegmentCallable]:
    """The function that compiles one segment with ``backend``.

    Raises:
        ChunkcError: for an unknown backend.
    """
    compilers = {"inductor": compile_inductor, "eager": compile_eager}
    if backend not in compilers:
        raise ChunkcError(f"backend={backend!r} is unknown; choose {' or '.join(compilers)}")
    return compilers[backend]


def backend_options(backend: str) -> dict[str, Any]:
    """Options of the capture backend that segments of ``backend`` need."""
    if backend == "inductor":
        return {"decompositions": inductor_decompositions(), "prepare_joint": inductor_joint_passes}
    return {}


class SegmentCompiler:
    """Compiles the segments of one model; equal segments once."""

    def __init__(self, compile_one: Callable[[LoweredSegment], SegmentCallable]) -> None:
        self._compile_one = compile_one
        self._compiled: dict[str, SegmentCallable] = {}

    @property
    def num_compiles(self) -> int:
        """Distinct segments compiled so far."""
        return len(self._compiled)

    def compile(self, graph: LoweredGraph) -> list[SegmentCallable]:
        """A callable for every segment of ``graph``, in order."""
        for segment in graph.segments:
            if segment.key not in self._compiled:
                self._compiled[segment.key] = self._compile_one(segment)
        return [self._compiled[segment.key] for segment in graph.segments]
