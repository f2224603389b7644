"""Functions by which a forward says what a slice needs of whole sequences (context parallelism).

A model's own code sees its slice alone: it cannot make a bias for keys that other ranks have, nor know where its slice
begins. So chunkc's attention of such a model calls these. In a graph they are replaced by operators of the rank's slice
(`chunkc.capture.attention.in_slices`). Called operator by operator they are answered by a mode, which is why the first
argument is a tensor. Both stay one node of Dynamo's graph (`see_whole`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import handle_torch_function, has_torch_function_unary

from chunkc._torch_compat.symbolic import is_fake
from chunkc.errors import CaptureError


def see_whole() -> None:
    """Let Dynamo, which is imported, keep calls of the functions here as they are."""
    for function in (attend_to_whole, relative_positions):
        torch.compiler.allow_in_graph(function)  # type: ignore[no-untyped-call]


def attend_to_whole(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention of a slice's queries to keys of whole sequences.

    Args:
        query: [batch, heads, queries, width].
        key, value: [batch, heads, keys, width]. Slices of keys may be of another length than those of queries.
        attn_mask: what is added to scores, [batch or 1, heads, queries, keys of all slices].
        dropout_p, scale: those of `torch.nn.functional.scaled_dot_product_attention`.

    Returns:
        [batch, heads, queries, width of values].

    Raises:
        CaptureError: outside of a forward that chunkc captures or evaluates.
    """
    if has_torch_function_unary(query):
        found: Any = handle_torch_function(attend_to_whole, (query,), query, key, value, attn_mask, dropout_p, scale)
        return found  # type: ignore[no-any-return]
    _check_traced(query)
    if attn_mask is not None:
        num_slices = attn_mask.shape[-1] // key.shape[-2]
        key, value = (part.repeat(1, 1, num_slices, 1) for part in (key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, scale=scale)


def relative_positions(like: torch.Tensor, length: int, num_slices: int) -> torch.Tensor:
    """Positions of all keys less those of the slice's queries, int64 [length, num_slices x length].

    Args:
        like: a tensor on the device.
        length: of a slice.
        num_slices: of a sequence.

    Raises:
        CaptureError: outside of a forward that chunkc captures or evaluates.
    """
    if has_torch_function_unary(like):
        found: Any = handle_torch_function(relative_positions, (like,), like, length, num_slices)
        return found  # type: ignore[no-any-return]
    _check_traced(like)
    return relative_positions_of(like, length, num_slices, place=0)


def relative_positions_of(like: torch.Tensor, length: int, num_slices: int, *, place: int) -> torch.Tensor:
    """`relative_positions` of slice number ``place``.

    The rows are cut from positions of the whole, so that the operators are the same on all ranks.
    """
    positions = torch.arange(num_slices * length, device=like.device)
    return positions - positions.narrow(0, place * length, length).unsqueeze(1)


def _check_traced(operand: torch.Tensor) -> None:
    if not is_fake(operand):
        raise CaptureError(
            "cp divides sequences, and attention of a model that was compiled for that runs outside of its compiled "
            "forward, where it would see one slice: call the compiled model, or load the model anew for a plain one"
        )
