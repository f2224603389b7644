"""Attention where ranks have slices of the same sequences (context parallelism), in graphs of Dynamo's.

All else in a model works position by position, so a slice is a batch to it. Attention of a slice's queries needs the
keys and values of whole sequences:

    query of a slice ───────────────────────────────────────────┐
    keys, values of a slice ─ all-gather along the sequence ─ attention, causal by positions in the whole ─ slice

This is context parallelism by all-gather, as Llama 3 was trained with ("The Llama 3 Herd of Models", 2024, section
3.3.2), with slices that follow each other. Backward adds up what all ranks give back to a slice (reduce-scatter). The
shapes are the same on all ranks, and so are the plans; queries of the first slices meet keys that their mask hides.
A causal mask is made for some queries at a time, so that it takes `MASK_NBYTES` at most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node
from torch.overrides import TorchFunctionMode

from chunkc._torch_compat.collectives import ContextLine, gathered
from chunkc._torch_compat.core import dynamo_value
from chunkc.errors import CaptureError

MASK_NBYTES: Final = 64 << 20
"""Of the mask of one call of attention, a byte for each query and key."""
_SEQUENCE: Final = -2
"""Dimension of queries, keys and values."""
_NAMES: Final = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_SCORES: Final = (F.softmax, torch.softmax, "softmax")


def attend_across(module: GraphModule, line: ContextLine) -> None:
    """Let every attention of a graph of Dynamo's, in place, see the slices of all ranks of ``line``.

    Raises:
        CaptureError: where a mask is handed in, where scores are computed one operator at a time, where positions are
            counted inside of forward, and where there is no attention.
    """
    graphs = [part.graph for part in module.modules() if isinstance(part, GraphModule)]
    nodes = [node for graph in graphs for node in graph.nodes]
    calls = [node for node in nodes if node.target is F.scaled_dot_product_attention]
    if not calls:
        raise CaptureError(
            f"cp={line.size} divides sequences, and this forward calls no scaled_dot_product_attention, the one "
            "operator through which slices may see each other: use attn_implementation='sdpa', or leave cp out"
        )
    lengths = {_length(call) for call in calls}
    for node in nodes:
        _refuse_local(node, lengths)
    for call in calls:
        _replace(call, line)
    for part in module.modules():
        if isinstance(part, GraphModule):
            part.graph.lint()
            part.recompile()


def _length(call: Node) -> int:
    query = call.args[0] if call.args else call.kwargs["query"]
    if not isinstance(query, Node):
        raise CaptureError("attention whose query is no tensor of the graph")
    return int(dynamo_value(query).shape[_SEQUENCE])


def _refuse_local(node: Node, lengths: set[int]) -> None:
    """Refuse what would take the positions in a slice for those in the sequence."""
    value = dynamo_value(node)
    if not isinstance(value, torch.Tensor) or not node.users:
        return
    if node.target is torch.arange and value.dim() == 1 and value.shape[0] in lengths:
        raise CaptureError(
            f"cp divides sequences, and forward counts {value.shape[0]} positions by itself (torch.arange), which are "
            "those of a slice: hand in the positions that the slice has in the sequence, for example position_ids="
        )
    is_square = value.dim() >= 2 and {value.shape[-1], value.shape[-2]} <= lengths
    if node.target in _SCORES and is_square:
        raise CaptureError(
            "cp divides sequences, and forward computes scores of attention by softmax, which see one slice: use "
            "scaled_dot_product_attention (attn_implementation='sdpa')"
        )


class AttentionOfSlices(TorchFunctionMode):
    """Within the block every attention that runs operator by operator sees the slices of all ranks of ``line``."""

    def __init__(self, line: ContextLine) -> None:
        super().__init__()
        self._line = line

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Raises CaptureError for attention with a mask."""
        if function is not F.scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        operands, options = _operands(args, kwargs or {}, self._line)
        return attention_of_slice(*operands, **options)


def _operands(
    args: tuple[Any, ...], kwargs: dict[str, Any], line: ContextLine
) -> tuple[tuple[Any, Any, Any], dict[str, Any]]:
    """Arguments of `attention_of_slice` for those of attention; CaptureError where they have a mask."""
    given = dict(zip(_NAMES, args, strict=False)) | kwargs
    if given.pop("attn_mask", None) is not None:
        raise CaptureError(
            "cp divides sequences, and attention is handed a mask, which is of one slice: sequences must be of one "
            "length, without padding, and attention causal by is_causal=True or of all positions"
        )
    operands = (given.pop("query"), given.pop("key"), given.pop("value"))
    return operands, {**given, "group_name": line.group_name, "size": line.size, "place": line.place}


def _replace(call: Node, line: ContextLine) -> None:
    operands, options = _operands(call.args, call.kwargs, line)
    with call.graph.inserting_before(call):
        found = call.graph.call_function(attention_of_slice, operands, options)
    found.meta = call.meta.copy()
    call.replace_all_uses_with(found)
    call.graph.erase_node(call)


def attention_of_slice(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    group_name: str,
    size: int,
    place: int,
    is_causal: bool = False,
    **options: Any,
) -> torch.Tensor:
    """Attention of this rank's queries and the keys of all ``size`` ranks; this slice is number ``place``.

    Args:
        query: [..., heads, length, width]; key, value: the same with their own heads, and length where not causal.
        group_name: of the ranks, in the order of their slices.
        options: those of `torch.nn.functional.scaled_dot_product_attention`.

    Returns:
        [..., heads, length, width of values].
    """
    length = query.shape[_SEQUENCE]
    line = ContextLine(group_name, size, place)
    whole_key, whole_value = (_gathered(part, line) for part in (key, value))
    attend: Callable[..., torch.Tensor] = F.scaled_dot_product_attention
    if not is_causal:
        return attend(query, whole_key, whole_value, **options)
    positions = torch.arange(length * size, device=query.device)
    step = max(1, MASK_NBYTES // (length * size))
    pieces = []
    for start in range(0, length, step):
        rows = query.narrow(_SEQUENCE, start, min(step, length - start))
        seen = positions.narrow(0, place * length + start, rows.shape[_SEQUENCE]).unsqueeze(1) >= positions
        pieces.append(attend(rows, whole_key, whole_value, attn_mask=seen, **options))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, _SEQUENCE)


def _gathered(part: torch.Tensor, line: ContextLine) -> torch.Tensor:
    return gathered(part.movedim(_SEQUENCE, 0).contiguous(), line).movedim(0, _SEQUENCE)
