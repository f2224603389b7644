"""Rewrites of captured graphs: temporaries as wide as a vocabulary are computed in pieces, exactly.

A rewrite changes a graph only where a temporary has several pieces; graphs of small models stay as they are.
"""

from chunkc.capture.rewrites.pieces import PieceSize
from chunkc.capture.rewrites.pipeline import rewrite, rewritten_decompositions

__all__ = ["PieceSize", "rewrite", "rewritten_decompositions"]
