"""Sizes as torch traces them: symbols, expressions over them, and fake tensors of a given size.

Seen on torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node

from chunkc._torch_compat.core import dynamo_value, pytree

if TYPE_CHECKING:
    import sympy  # type: ignore[import-untyped]

Symbol: TypeAlias = "sympy.Symbol"
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_MARKS = ("_dynamo_weak_dynamic_indices", "_has_dynamo_dim_marking")
_ASSERTIONS = (
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten.sym_constrain_range.default,
    torch.ops.aten.sym_constrain_range_for_size.default,
)


def is_fake(value: object) -> bool:
    """Whether ``value`` is a tensor without values, by which torch traces."""
    return isinstance(value, FakeTensor)


@contextmanager
def changing(sizes: Iterable[tuple[torch.Tensor, int]]) -> Iterator[None]:
    """Within the block Dynamo captures these dimensions of tensors for any size, where it can.

    Marks of the caller's own stay as they are.
    """
    from torch._dynamo import maybe_mark_dynamic

    before: dict[int, tuple[torch.Tensor, dict[str, Any]]] = {}
    for tensor, dimension in sizes:
        marks = {name: copy.copy(tensor.__dict__[name]) for name in _MARKS if name in tensor.__dict__}
        before.setdefault(id(tensor), (tensor, marks))
        maybe_mark_dynamic(tensor, dimension)
    try:
        yield
    finally:
        for tensor, marks in before.values():
            for name in _MARKS:
                tensor.__dict__.pop(name, None)
            tensor.__dict__.update(marks)


def has_unbacked_size(node: Node) -> bool:
    """Whether a node of a Dynamo graph is a tensor with a size that only the data of a run tells."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    tensors = (v for v in pytree.tree_leaves(dynamo_value(node)) if isinstance(v, torch.Tensor))
    return any(free_unbacked_symbols(t) for t in tensors)


def symbols_of(value: torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool) -> Collection[Symbol]:
    """Symbols in a number, or in the sizes, strides and offset of a tensor."""
    from torch.fx.experimental.symbolic_shapes import free_symbols

    return free_symbols(value)


def size_symbol(value: object) -> Symbol | None:
    """The symbol that ``value`` is, where it is an integer that a graph takes as an input; else None."""
    if not isinstance(value, torch.SymInt):
        return None
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return value.node.expr if value.node.expr.is_Symbol and not free_unbacked_symbols(value) else None


def size_hint(value: int | torch.SymInt) -> int:
    """A size as it is in the call at hand; nothing is specialised to it."""
    return hint_of(value) if isinstance(value, torch.SymInt) else value


def hint_of(value: torch.SymInt) -> int:
    """The size that a symbolic one had in the call that was traced."""
    return int(value.node.hint)


def evaluated(value: torch.SymInt | torch.SymFloat | torch.SymBool, sizes: Mapping[Symbol, int]) -> Any:
    """The int, float or bool that ``value`` is at ``sizes``, which name all of its symbols."""
    import sympy

    number = value.node.expr.xreplace({symbol: sympy.Integer(size) for symbol, size in sizes.items()})
    kind = int if isinstance(value, torch.SymInt) else float if isinstance(value, torch.SymFloat) else bool
    return kind(number)


def is_assertion(node: Node) -> bool:
    """Whether ``node`` checks sizes and computes nothing."""
    return node.target in _ASSERTIONS


def meta_storage(nbytes: int) -> torch.UntypedStorage:
    """Storage of ``nbytes`` without memory."""
    return torch.empty(nbytes, dtype=torch.uint8, device="meta").untyped_storage()


def fake_like(
    tensor: torch.Tensor, storage: torch.UntypedStorage, offset: int, shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """A fake tensor with the mode, dtype and device of ``tensor``, over ``storage`` without memory."""
    if not isinstance(tensor, FakeTensor):
        raise TypeError(f"a captured value is a fake tensor, not {type(tensor).__name__}")
    meta = torch.empty(0, dtype=tensor.dtype, device="meta").set_(storage, offset, shape, stride)
    return FakeTensor(tensor.fake_mode, meta, tensor.device)
