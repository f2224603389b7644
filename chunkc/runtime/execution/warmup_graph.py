"""A graph without a plan: operators run one after another, each with just the parameters it reads.

So the first iteration runs when a forward breaks into several graphs: the layout is made once all are known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from chunkc.runtime.execution.bound_action import CompiledGraph

ReadParam = Callable[[int], torch.Tensor]


class UnplannedGraph:
    """Runs a captured forward and its backward.

    ``graded_params``: those whose gradients its backward makes; ``used_params``: those and the ones that it reads;
    ``family`` as of its `Executor`.
    """

    def __init__(self, graphs: Mapping[Literal["forward", "backward"], CompiledGraph], family: object) -> None:
        self.family = family
        self._graphs = graphs
        gradients = graphs["backward"].gradients if "backward" in graphs else {}
        segments = graphs["backward"].graph.segments if "backward" in graphs else ()
        self.graded_params = tuple(sorted(gradients.values()))
        self.used_params = frozenset((*self.graded_params, *(p for s in segments for _, p in s.params)))

    def forward(self, args: list[Any], read_param: ReadParam) -> list[Any]:
        """Outputs of the forward graph; empties ``args``. ``read_param`` gives a copy of a parameter."""
        compiled = self._graphs["forward"]
        return compiled.outputs(self._run(compiled, args, read_param))

    def backward(self, args: list[Any], read_param: ReadParam) -> tuple[list[Any], dict[int, torch.Tensor]]:
        """Outputs of the backward graph with None for gradients of parameters, and these by parameter."""
        compiled = self._graphs["backward"]
        values = self._run(compiled, args, read_param)
        return compiled.outputs(values), {param: values[name] for name, param in compiled.gradients.items()}

    def _run(self, compiled: CompiledGraph, args: list[Any], read_param: ReadParam) -> dict[str, Any]:
        graph = compiled.graph
        values = dict(zip(graph.inputs, args, strict=True))
        args.clear()
        for segment, run in zip(graph.segments, compiled.segments, strict=True):
            params = dict(segment.params)
            inputs = [
                read_param(params[i]) if i in params else values.pop(name) if i in segment.dies else values[name]
                for i, name in enumerate(segment.inputs)
            ]
            values.update(zip(segment.outputs, run(inputs), strict=True))
        return values
