"""Find losses of a linear layer's results in a graph of Dynamo's, and have them computed in pieces.

    logits = linear(hidden, weight, bias)        the layer
    (float, to, contiguous, view, [:, :-1])*     casts, reshapes and slices that keep every row whole
    cross_entropy(logits, labels)                without class weights and label smoothing

Where a slice leaves rows out, these get the label that has no loss, so that one product serves all rows. Logits that
anything else reads (the user's output, say) are still made, in the layer's own dtype; what is saved is then all that
is computed of them in fp32. A graph stays as it is where its sizes are symbols, where the layer computes in another
dtype than its inputs (autocast), and where something between layer and loss may write to what both read.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.nn import functional

from chunkc._torch_compat.core import dynamo_value, storage_key
from chunkc._torch_compat.symbolic import symbols_of
from chunkc.capture.rewrites.cross_entropy_in_pieces import linear_cross_entropy, row_numbers, spread_labels
from chunkc.capture.rewrites.pieces import PieceSize

_CLASS_MULTIPLE = 64
"""Pieces of classes begin at multiples of it: rows of their products are then aligned as tensor cores want them."""
_CASTS = frozenset({"float", "to", "contiguous", "bfloat16", "half"})
_RESHAPES = frozenset({"view", "reshape", "flatten"})
_VIEWS = _CASTS | _RESHAPES | {"getitem", "detach", "transpose", "permute", "unsqueeze", "squeeze", "t", "select"}
_MODES = frozenset({"_set_grad_enabled", "_enter_autocast", "_exit_autocast", "_enter_inference_mode"})
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PRECISE = torch.float32


@dataclass(frozen=True, slots=True)
class _Loss:
    """One loss: the calls of layer and loss, and what stands between them, from the layer on."""

    layer: Node
    chain: tuple[Node, ...]
    loss: Node
    options: Mapping[str, Any]

    @property
    def operands(self) -> tuple[Node, Node, Node | None]:
        """Input, weight and bias of the layer."""
        named = zip(("input", "weight", "bias"), self.layer.args, strict=False)
        given: dict[str, Any] = {**dict(named), **self.layer.kwargs}
        return given["input"], given["weight"], given.get("bias")

    @property
    def returns_logits(self) -> bool:
        """Whether something beside the loss reads the logits."""
        own = {*self.chain, self.loss}
        return any(user not in own for node in (self.layer, *self.chain) for user in node.users)


def compute_losses_in_pieces(module: GraphModule, size: PieceSize) -> bool:
    """Have large losses computed by `linear_cross_entropy`, in place; return whether there was one."""
    losses = module.graph.find_nodes(op="call_function", target=functional.cross_entropy)
    return any([_replace(loss, size) for node in losses if (loss := _find(node)) is not None])


def _find(node: Node) -> _Loss | None:
    options = _options(node)
    if options is None:
        return None
    chain: list[Node] = []
    above = options["input"]
    while isinstance(above, Node) and above.target is not functional.linear:
        if not above.args or not _keeps_rows(above):
            return None
        chain.insert(0, above)
        above = above.args[0]
    if not isinstance(above, Node):
        return None
    loss = _Loss(above, tuple(chain), node, options)
    return loss if _is_plain(loss) and _is_undisturbed(loss) else None


def _options(node: Node) -> dict[str, Any] | None:
    """The arguments of a loss by name; None for a loss that is not computed in pieces."""
    bound = inspect.signature(functional.cross_entropy).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    given = bound.arguments
    is_unweighted = given["weight"] is None and given["label_smoothing"] == 0.0
    is_current = given["size_average"] is None and given["reduce"] is None
    logits, labels = (_tensor(given[name]) for name in ("input", "target"))
    if not is_unweighted or not is_current or logits is None or labels is None:
        return None
    is_by_row = logits.dim() == 2 and labels.dim() == 1 and labels.dtype is torch.int64
    return given if is_by_row and isinstance(given["ignore_index"], int) else None


def _tensor(value: Any) -> torch.Tensor | None:
    """The fake tensor of a node, with numbers for sizes; None for everything else."""
    tensor = dynamo_value(value) if isinstance(value, Node) else None
    return tensor if isinstance(tensor, torch.Tensor) and not symbols_of(tensor) else None


def _keeps_rows(node: Node) -> bool:
    """Whether ``node`` is a cast, reshape or slice of tensors whose last dimension stays whole."""
    source, made = _tensor(node.args[0]), _tensor(node)
    if source is None or made is None or source.shape[-1:] != made.shape[-1:] or source.device != made.device:
        return False
    name = _name(node)
    if name == "getitem":
        return all(item is Ellipsis or _is_slice(item) for item in _items(node))
    return name in _RESHAPES or (name in _CASTS and source.shape == made.shape)


def _name(node: Node) -> str:
    return node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", ""))


def _items(node: Node) -> tuple[Any, ...]:
    return node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)


def _is_slice(item: Any) -> bool:
    parts = (item.start, item.stop, item.step) if isinstance(item, slice) else (item,)
    return isinstance(item, slice) and all(part is None or isinstance(part, int) for part in parts)


def _is_plain(loss: _Loss) -> bool:
    """Whether the layer computes in the dtype of its operands, and the chain in that or in fp32."""
    operands = [_tensor(n) for n in loss.operands if n is not None]
    logits = _tensor(loss.layer)
    if logits is None or logits.dtype not in _DTYPES or logits.numel() == 0:
        return False
    if any(o is None or o.dtype is not logits.dtype or o.device != logits.device for o in operands):
        return False
    return all(dynamo_value(n).dtype in (logits.dtype, _PRECISE) for n in loss.chain)


def _is_undisturbed(loss: _Loss) -> bool:
    """Whether the layer may move to its loss: nothing between reads logits or may interfere."""
    nodes = list(loss.loss.graph.nodes)
    within = nodes[nodes.index(loss.layer) + 1 : nodes.index(loss.loss)]
    logits = {loss.layer, *loss.chain}
    operands = (n for n in loss.operands if n is not None)
    keys = {storage_key(dynamo_value(node)) for node in (*logits, *operands)}
    others = [node for node in within if node not in logits]
    return not any(_may_interfere(node, keys) or not logits.isdisjoint(node.all_input_nodes) for node in others)


def _may_interfere(node: Node, keys: set[Any]) -> bool:
    """Whether ``node`` changes a mode of torch's, or may write to memory of ``keys``.

    An operator in place returns the memory that it writes to, or no tensor.
    """
    if _name(node) in _MODES:
        return True
    if not any(storage_key(dynamo_value(source)) in keys for source in node.all_input_nodes):
        return False
    made = dynamo_value(node)
    return made is None or (storage_key(made) in keys and _name(node) not in _VIEWS)


def _replace(loss: _Loss, size: PieceSize) -> bool:
    """Replace layer, chain and loss where the logits are large; return whether they are."""
    logits = dynamo_value(loss.layer)
    num_classes = int(logits.shape[-1])
    num_rows = logits.numel() // num_classes
    row_cuts = size.cuts(num_rows, _PRECISE.itemsize * num_classes)
    class_cuts = size.cuts(num_classes, _PRECISE.itemsize * num_rows, _CLASS_MULTIPLE)
    if len(row_cuts) == 2 or len(class_cuts) == 2:
        return False
    returns_logits, options = loss.returns_logits, loss.options
    with loss.loss.graph.inserting_before(loss.loss):
        rows, labels = _rows_and_labels(loss, num_rows)
        reduced = (options["ignore_index"], options["reduction"], dynamo_value(loss.loss).dtype)
        both = _call(loss, linear_cross_entropy, *loss.operands, labels, *reduced, row_cuts, class_cuts, returns_logits)
        made = _call(loss, operator.getitem, both, 0)
        if rows is not None and options["reduction"] == "none":
            made = _call(loss, torch.index_select, made, 0, rows)
        made.meta["example_value"] = dynamo_value(loss.loss)
        again = _call(loss, operator.getitem, both, 1) if returns_logits else None
    loss.loss.replace_all_uses_with(made)
    loss.loss.graph.erase_node(loss.loss)
    if again is not None:
        again.meta["example_value"] = logits
        loss.layer.replace_all_uses_with(again)
    _move_behind(loss.chain, again or made)
    loss.layer.graph.erase_node(loss.layer)
    return True


def _rows_and_labels(loss: _Loss, num_rows: int) -> tuple[Node | None, Node]:
    """Numbers of the rows that have a label, None for all in their order; and the labels of all rows."""
    labels: Node = loss.options["target"]
    if not any(_name(node) == "getitem" for node in loss.chain):
        return None, labels
    steps = tuple(
        ("select", _items(node)) if _name(node) == "getitem" else ("shape", (*dynamo_value(node).shape[:-1], 1))
        for node in loss.chain
    )
    rows = _call(loss, row_numbers, tuple(dynamo_value(loss.layer).shape[:-1]), steps, dynamo_value(labels).device)
    return rows, _call(loss, spread_labels, labels, rows, num_rows, loss.options["ignore_index"])


def _call(loss: _Loss, function: Callable[..., Any], *args: Any) -> Node:
    """A call with the module and source line of the layer."""
    node = loss.layer.graph.call_function(function, args)
    node.meta = {key: value for key, value in loss.layer.meta.items() if key != "example_value"}
    return node


def _move_behind(chain: Sequence[Node], anchor: Node) -> None:
    """Move the links of ``chain`` that others read behind ``anchor``, in order, and erase the rest."""
    for node in reversed(chain):
        if node.users:
            anchor.append(node)
        else:
            node.graph.erase_node(node)
