"""How the graphs of a model are traced: what is decomposed, rewritten, and for which GPU's kernels."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from chunkc._torch_compat.collectives import ContextLine, is_dtensor
from chunkc._torch_compat.core import dynamo_value
from chunkc.capture.attention.in_slices import attend_across
from chunkc.capture.attention.kernels import Capability
from chunkc.capture.attention.tracing import trace_for_gpu
from chunkc.capture.rewrites import PieceSize, rewrite, rewritten_decompositions


@dataclass(frozen=True, slots=True)
class TracingOptions:
    """How graphs are traced; ``prepare_joint`` works in place, ``fuses``: neighbours will be one kernel.

    ``pieces`` says which temporaries are computed in pieces, by `chunkc.capture.rewrites`. ``gpu``: compute capability
    of the one whose kernels will run what is traced; None for those of the device it is traced on. ``context``: the
    ranks that have slices of the same sequences, if any.
    """

    decompositions: Mapping[Any, Any] | None = None
    prepare_joint: Callable[[GraphModule], None] | None = None
    fuses: bool = False
    pieces: PieceSize = PieceSize()  # noqa: RUF009 - frozen
    gpu: Capability | None = None
    context: ContextLine | None = None

    def rewrites(self, module: GraphModule, handed_in: Collection[Node] = ()) -> dict[str, Any]:
        """Rewrite a graph of Dynamo's in place; return AOTAutograd's option for the operators to decompose.

        ``handed_in``: placeholders of the caller's tensors. A graph that computes on DTensors stays as it is: pieces
        would be of parts.

        Raises:
            CaptureError: where ranks have slices of sequences, as of `attend_across`.
        """
        if self.context is not None:
            attend_across(module, self.context, handed_in, self.gpu)
        if self.gpu is not None:
            trace_for_gpu(module, self.gpu)
        if not any(is_dtensor(dynamo_value(node)) for node in module.graph.nodes):
            rewrite(module, self.pieces)
        if self.decompositions is None:
            return {}
        return {"decompositions": rewritten_decompositions(self.decompositions, self.pieces)}
