"""The rewrites, in the order in which they are applied.

    Dynamo's graph ─ REWRITES ─ AOTAutograd, whose decompositions are `rewritten_decompositions` ─ joint graph

Dynamo's graph still calls a loss by its name, with its options. AOTAutograd then differentiates and decomposes what a
rewrite put there as it does the model's own operators, so that every later stage sees ordinary operators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from torch.fx import GraphModule

from chunkc.capture.rewrites.embedding_gradient import embedding_gradient_in_pieces
from chunkc.capture.rewrites.linear_cross_entropy import compute_losses_in_pieces
from chunkc.capture.rewrites.pieces import PieceSize

REWRITES: Final[tuple[Callable[[GraphModule, PieceSize], bool], ...]] = (compute_losses_in_pieces,)
"""Each works in place on a graph of Dynamo's, and returns whether it changed it."""


def rewrite(module: GraphModule, size: PieceSize) -> None:
    """Apply all rewrites to a graph of Dynamo's, in place."""
    if any([apply(module, size) for apply in REWRITES]):
        module.graph.lint()
        module.recompile()


def rewritten_decompositions(table: Mapping[Any, Callable[..., Any]], size: PieceSize) -> dict[Any, Callable[..., Any]]:
    """Return ``table``, decompositions by operator, with those of large gradients of embeddings in pieces."""
    return embedding_gradient_in_pieces(table, size)
