"""Attention in graphs of Dynamo's where ranks have slices of the same sequences (context parallelism).

All else in a model works position by position, so a slice is a batch to it. Attention of a slice's queries needs the
keys and values of whole sequences:

    query of a slice ───────────────────────────────────────────┐
    keys, values of a slice ─ all-gather along the sequence ─ attention, causal by positions in the whole ─ slice

This is context parallelism by all-gather, as Llama 3 was trained with ("The Llama 3 Herd of Models", 2024, section
3.3.2), with slices that follow each other. Backward adds up what all ranks give back to a slice (reduce-scatter). The
shapes are the same on all ranks, and so are the plans; queries of the first slices meet keys that count as nothing.

Causal attention runs slice by slice, by kernels without masks (`chunkc.capture.attention.slice_by_slice`). Where none
serves, as with dropout, a mask is made for some queries at a time, so that it takes `MASK_NBYTES` at most. A bias comes
from a model that knows of slices (`chunkc.capture.attention.whole`), and has a row for each query of the slice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node
from torch.overrides import TorchFunctionMode

from chunkc._torch_compat.collectives import ContextLine, gathered
from chunkc._torch_compat.core import dynamo_value, pytree
from chunkc._torch_compat.symbolic import size_hint
from chunkc.capture.attention.kernels import Capability
from chunkc.capture.attention.slice_by_slice import attend_slice_by_slice, slice_kernel
from chunkc.capture.attention.tracing import attend as attend_on_gpu
from chunkc.capture.attention.whole import attend_to_whole, relative_positions, relative_positions_of
from chunkc.errors import CaptureError

MASK_NBYTES: Final = 64 << 20
"""Of the mask of one call of attention, a byte for each query and key."""
_SEQUENCE: Final = -2
"""Dimension of queries, keys and values."""
_NAMES: Final = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_NAMES_OF_WHOLE: Final = ("query", "key", "value", "attn_mask", "dropout_p", "scale")
_OTHERS: Final = ("multi_head_attention_forward", "scaled_dot_product", "flex_attention")
"""Parts of the names of functions that are attention, too."""


def attend_across(
    module: GraphModule, line: ContextLine, handed_in: Collection[Node], gpu: Capability | None = None
) -> None:
    """Let every attention of a graph of Dynamo's, in place, see the slices of all ranks of ``line``.

    ``handed_in``: placeholders of the caller's tensors, which are slices; others are parameters and buffers. ``gpu``:
    by whose kernels, where the graph is planned for one.

    Raises:
        CaptureError: where a mask is handed in, where scores are computed one operator at a time, where values as long
            as a slice are made of no slice (positions), and where there is no attention.
    """
    graphs = [part.graph for part in module.modules() if isinstance(part, GraphModule)]
    nodes = [node for graph in graphs for node in graph.nodes]
    calls = [node for node in nodes if node.target in (F.scaled_dot_product_attention, attend_to_whole)]
    if not calls:
        raise CaptureError(
            f"cp={line.size} divides sequences, and this forward calls no scaled_dot_product_attention, the one "
            "operator through which slices may see each other: use attn_implementation='sdpa', or leave cp out"
        )
    lengths = {length for call in calls for length in _lengths(call)}
    for node in nodes:
        _refuse_other_attention(node, lengths)
    slices = {node for node in handed_in if isinstance(dynamo_value(node), torch.Tensor)}
    _refuse_own_positions(module, slices, lengths)
    for call in calls:
        _replace_attention(call, line, gpu)
    for node in nodes:
        if node.target is relative_positions:
            _replace(node, relative_positions_of, node.args, {**node.kwargs, "place": line.place})
    for part in module.modules():
        if isinstance(part, GraphModule):
            part.graph.lint()
            part.recompile()


def _lengths(call: Node) -> set[int]:
    """The lengths of queries and keys; CaptureError where they differ and keys may be of no slice."""
    named: dict[str, Any] = dict(zip(_NAMES, call.args, strict=False)) | call.kwargs
    found = {size_hint(dynamo_value(named[name]).shape[_SEQUENCE]) for name in ("query", "key")}
    may_differ = call.target is attend_to_whole
    if (len(found) > 1 and not may_differ) or 1 in found:
        raise CaptureError(
            f"cp divides sequences, and attention has queries and keys of lengths {sorted(found)}: both must be as "
            "long as a slice, of two positions or more"
        )
    return found


def _refuse_other_attention(node: Node, lengths: set[int]) -> None:
    """Refuse attention that sees one slice, whatever calls it."""
    target, value = node.target, dynamo_value(node)
    name = str(getattr(target, "__name__", target))
    is_other = any(part in name for part in _OTHERS) and target is not F.scaled_dot_product_attention
    is_softmax = name.endswith("softmax") and "log" not in name
    is_score = is_softmax and isinstance(value, torch.Tensor) and _num_along(value, lengths) > 1
    if is_other or is_score:
        raise CaptureError(
            f"cp divides sequences, and forward computes attention by {name}, which sees one slice: use "
            "torch.nn.functional.scaled_dot_product_attention (attn_implementation='sdpa')"
        )


def _num_along(value: torch.Tensor, lengths: set[int]) -> int:
    """Dimensions of ``value`` that are as long as a slice."""
    return sum(size_hint(size) in lengths for size in value.shape)


def _refuse_own_positions(module: GraphModule, given: set[Node], lengths: set[int]) -> None:
    """Refuse values cut or made as long as a slice of no slice: they would be of the first positions.

    ``given``: values that follow from slices, of which those behind them are.
    """
    for node in module.graph.nodes:
        part = next((arg for arg in node.args if isinstance(arg, Node) and arg.op == "get_attr"), None)
        body = None if part is None else getattr(module, str(part.target), None)
        if isinstance(body, GraphModule):
            inner = body.graph.find_nodes(op="placeholder")
            pairs = zip(inner, node.args[-len(inner) :], strict=False) if inner else ()
            _refuse_own_positions(body, {place for place, arg in pairs if arg in given}, lengths)
        value = dynamo_value(node)
        if node in given or isinstance(value, torch.SymInt):
            continue
        if node.target is relative_positions or any(source in given for source in node.all_input_nodes):
            given.add(node)
        elif node.op != "placeholder" and node.users and isinstance(value, torch.Tensor):
            if _num_along(value, lengths) and lengths.intersection(_numbers(node)):
                raise CaptureError(
                    f"cp divides sequences, and forward makes {node.name}, of {list(map(size_hint, value.shape))}, of "
                    "no tensor that is handed in: it would be that of the first positions in every slice. Hand in what "
                    "depends on positions, for example position_ids="
                )


def _numbers(node: Node) -> Iterator[int]:
    """All sizes among the arguments of ``node``, ends of slices too."""
    for leaf in pytree.tree_leaves((node.args, dict(node.kwargs))):
        for part in (leaf.start, leaf.stop) if isinstance(leaf, slice) else (leaf,):
            value = dynamo_value(part) if isinstance(part, Node) else part
            if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
                yield size_hint(value)


class AttentionOfSlices(TorchFunctionMode):
    """Within the block attention that runs operator by operator sees the slices of all ranks of ``line``."""

    def __init__(self, line: ContextLine) -> None:
        super().__init__()
        self._line = line

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Raises CaptureError for attention with a mask, and for other attention."""
        if function is relative_positions:
            return relative_positions_of(*args, **(kwargs or {}), place=self._line.place)
        if function not in (F.scaled_dot_product_attention, attend_to_whole):
            if any(part in str(getattr(function, "__name__", "")) for part in _OTHERS):
                raise CaptureError(f"cp divides sequences, and {function.__name__} sees one slice")
            return function(*args, **(kwargs or {}))
        operands, options = _operands(function, args, kwargs or {}, self._line)
        return attention_of_slice(*operands, **options)


def _operands(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], line: ContextLine
) -> tuple[tuple[Any, Any, Any], dict[str, Any]]:
    """Arguments of `attention_of_slice`; CaptureError where a mask may be of one slice."""
    is_whole = function is attend_to_whole
    given = dict(zip(_NAMES_OF_WHOLE if is_whole else _NAMES, args, strict=False)) | kwargs
    if not is_whole and given.pop("attn_mask", None) is not None:
        raise CaptureError(
            "cp divides sequences, and attention is handed a mask, which is of one slice: sequences must be of one "
            "length, without padding, and attention causal by is_causal=True or of all positions"
        )
    operands = (given.pop("query"), given.pop("key"), given.pop("value"))
    return operands, {**given, "group_name": line.group_name, "size": line.size, "place": line.place}


def _replace_attention(call: Node, line: ContextLine, gpu: Capability | None) -> None:
    operands, options = _operands(call.target, call.args, call.kwargs, line)
    if gpu is not None:
        options["gpu"] = gpu
    _replace(call, attention_of_slice, operands, options)


def _replace(call: Node, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with call.graph.inserting_before(call):
        found = call.graph.call_function(target, args, kwargs)
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
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    gpu: Capability | None = None,
    **options: Any,
) -> torch.Tensor:
    """Attention of this rank's queries and the keys of all ``size`` ranks; this slice is number ``place``.

    Args:
        query: [..., heads, length, width]; key, value: the same with their own heads, and length where not causal.
        group_name: of the ranks, in the order of their slices.
        attn_mask: [..., heads, length, size x length of keys], added to scores; not where ``is_causal``.
        gpu: by whose kernel, on fake tensors.
        options: those of `torch.nn.functional.scaled_dot_product_attention`.

    Returns:
        [..., heads, length, width of values].
    """
    if gpu is None and query.is_cuda:
        gpu = torch.cuda.get_device_capability(query.device)
    query, key, value = map(_autocast, (query, key, value))
    line = ContextLine(group_name, size, place)
    whole_key, whole_value = (_gathered(part, line) for part in (key, value))
    kernel = slice_kernel((query, key, value), place, size, gpu, **options) if is_causal else None
    if kernel is not None:
        return attend_slice_by_slice(query, whole_key, whole_value, kernel)
    attend: Callable[..., torch.Tensor] = F.scaled_dot_product_attention
    if gpu is not None and not query.is_cuda:
        attend = partial(attend_on_gpu, gpu=gpu)
    if not is_causal:
        mask = None if attn_mask is None else _autocast(attn_mask)
        return attend(query, whole_key, whole_value, attn_mask=mask, **options)
    return _masked(partial(attend, **options), query, whole_key, whole_value, line)


def _autocast(operand: torch.Tensor) -> torch.Tensor:
    """``operand`` in the dtype that ``torch.autocast`` gives those of attention, if it is on."""
    kind = operand.device.type
    if not torch.is_autocast_enabled(kind) or not operand.is_floating_point() or operand.dtype is torch.float64:
        return operand
    return operand.to(torch.get_autocast_dtype(kind))


def _masked(
    attend: Callable[..., torch.Tensor],
    query: torch.Tensor,
    whole_key: torch.Tensor,
    whole_value: torch.Tensor,
    line: ContextLine,
) -> torch.Tensor:
    """Causal attention with a mask, for some queries at a time."""
    length, size = query.shape[_SEQUENCE], line.size
    positions = torch.arange(length * size, device=query.device)
    step = max(1, MASK_NBYTES // (length * size))
    pieces = []
    for start in range(0, length, step):
        rows = query.narrow(_SEQUENCE, start, min(step, length - start))
        seen = positions.narrow(0, line.place * length + start, rows.shape[_SEQUENCE]).unsqueeze(1) >= positions
        pieces.append(attend(rows, whole_key, whole_value, attn_mask=seen))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, _SEQUENCE)


def _gathered(part: torch.Tensor, line: ContextLine) -> torch.Tensor:
    return gathered(part.movedim(_SEQUENCE, 0).contiguous(), line).movedim(0, _SEQUENCE)
