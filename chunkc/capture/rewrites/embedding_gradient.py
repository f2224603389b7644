"""The gradient of a 16-bit embedding without a copy of the whole table in fp32.

Inductor's decomposition adds up the rows of equal tokens in an fp32 tensor as large as the table. Columns of the
gradient are independent: each piece takes some columns of all tokens, so that every number is read once and added in
the same order as in the whole, and only a piece of the table is in fp32 at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from chunkc.capture.rewrites.pieces import PieceSize

_OPERATOR = torch.ops.aten.embedding_dense_backward.default
_COLUMN_MULTIPLE = 64


def embedding_gradient_in_pieces(
    table: Mapping[Any, Callable[..., Any]], size: PieceSize
) -> dict[Any, Callable[..., Any]]:
    """Return decompositions by operator: those of ``table``, an embedding's gradient in pieces."""
    if _OPERATOR not in table:
        return dict(table)
    return {**table, _OPERATOR: partial(_by_columns, table[_OPERATOR], size)}


def _by_columns(
    whole: Callable[..., torch.Tensor],
    size: PieceSize,
    grad_output: torch.Tensor,
    indices: torch.Tensor,
    num_weights: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> torch.Tensor:
    """The gradient [num_weights, width], in the dtype of ``grad_output`` [..., width]."""
    rest = (indices, num_weights, padding_idx, scale_grad_by_freq)
    width = grad_output.shape[-1]
    if grad_output.dtype.itemsize >= torch.float32.itemsize or not isinstance(width, int):
        return whole(grad_output, *rest)
    cuts = size.cuts(width, num_weights * torch.float32.itemsize, _COLUMN_MULTIPLE)
    if len(cuts) == 2:
        return whole(grad_output, *rest)
    return torch.cat([whole(grad_output[..., begin:end], *rest) for begin, end in pairwise(cuts)], dim=-1)
