"""Which values a fusing compiler keeps in memory, as Inductor decides it, without compiling anything.

Operators by themselves write every value to memory. A compiler that fuses computes a *pointwise* value where it is
read, and keeps only its sources:

    h ──▶ float ──▶ mul ──▶ bf16 ──▶ mm       of float, mul and bf16 only bf16 is made, by one kernel that reads h
           └──────▶ add (later)                and float is computed again from h, which stays until add has run

The rules are those of ``torch._inductor`` (``ir.StorageBox.should_realize_on_reuse``, ``scheduler``):

    a value is made        when a matrix product or another library kernel reads it, or it leaves the graph
    a value may be made    when it is read more than once and reads more than 4 buffers or takes more than 30
                           operations; when it reads more than 8; and when it is drawn at random
    what is reduced        is made, and never reduced again
    what may be made       takes no memory where all of its readers are in its own kernel: no library kernel stands
                           between them, and they do not reduce both rows and columns
    a result takes over    the memory of a source of its size and dtype that its kernel reads last
    a value that is only   saved for backward is made at once, beside what else reads its sources
    a product waits        for what is added to it alone, and is added in the same kernel (``addmm``); on a GPU not
                           where element-wise operators alone read the sum (``post_grad.should_prefer_unfused_addmm``)

Segments cut a graph, and what crosses a cut is made. Where that is not so without the cut, `Access.crossing` says it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import torch
from torch.fx import Node

from chunkc._torch_compat.core import OpOverload
from chunkc.capture.bundles import Bundle
from chunkc.capture.operators.flops import operator_flops
from chunkc.capture.partition import is_view

aten, prims = torch.ops.aten, torch.ops.prims
_MAX_READS_ON_REUSE = 4
_MAX_READS = 8
_MAX_OPERATIONS_ON_REUSE = 30


class Kind(Enum):
    """How an operator is compiled."""

    VIEW = auto()
    POINTWISE = auto()
    RANDOM = auto()
    ROWS = auto()  # reduces the last dimensions
    COLUMNS = auto()  # reduces others, or all
    SCATTER = auto()
    LIBRARY = auto()


_POINTWISE_NAMES = (
    "_to_copy _unsafe_index _unsafe_masked_index arange cat clone constant_pad_nd copy diagonal_scatter embedding "
    "empty expand_copy flip full full_like gather index index_select lift_fresh_copy mse_loss ones ones_like repeat "
    "roll scalar_tensor select_scatter slice_scatter stack tril triu zeros zeros_like"
)
_POINTWISE = frozenset(getattr(aten, name) for name in _POINTWISE_NAMES.split()) | {
    prims.iota,
    prims.convert_element_type,
}
_SCATTERS = frozenset(
    {aten.index_put, aten._unsafe_index_put, aten._unsafe_masked_index_put_accumulate, aten.copy_, aten.index_add}
)
"""Those that write over what they are given; ``scatter`` and its kind make a copy of it first."""


def kind_of(node: Node) -> Kind:
    """How the operator ``node`` is compiled; a library's kernel where nothing else is known."""
    if is_view(node):
        return Kind.VIEW
    target = node.target
    if not isinstance(target, OpOverload) or operator_flops(node):
        return Kind.RANDOM if "inductor_" in str(target) else Kind.LIBRARY
    if "inductor_" in target._schema.name:
        return Kind.RANDOM
    if target.overloadpacket in _SCATTERS:
        return Kind.SCATTER
    if torch.Tag.pointwise in target.tags or target.overloadpacket in _POINTWISE:
        return Kind.POINTWISE
    if torch.Tag.reduction in target.tags:
        return _reduction_kind(node)
    return Kind.LIBRARY


def _reduction_kind(node: Node) -> Kind:
    value = node.all_input_nodes[0].meta.get("val") if node.all_input_nodes else None
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if not isinstance(value, torch.Tensor) or dims is None:
        return Kind.COLUMNS
    given = dims if isinstance(dims, list | tuple) else [dims]
    reduced = {int(d) % max(value.dim(), 1) for d in given if isinstance(d, int)}
    last = set(range(value.dim() - len(reduced), value.dim()))
    return Kind.ROWS if reduced == last and len(reduced) < value.dim() else Kind.COLUMNS


@dataclass(frozen=True, slots=True)
class Access:
    """Accesses of one operator to memory.

    Attributes:
        made: its values that take memory.
        read: values in memory that its kernel reads, those of operators computed again inside it among them.
        replaced: (source, result) of the same size and dtype, which are one memory if nothing reads the source later.
        unmade: its values that take no memory.
        is_eager: whether it is computed as soon as what it reads is there, as nothing in the graph reads its values.
    """

    made: tuple[Node, ...]
    read: tuple[Node, ...]
    replaced: tuple[tuple[Node, Node], ...] = ()
    unmade: tuple[Node, ...] = ()
    is_eager: bool = False


@dataclass(slots=True)
class _Value:
    """A value while a graph is looked at; ``sources`` are read to compute it, made values only."""

    kind: Kind
    level: int
    sources: dict[Node, None]
    num_operations: int
    is_made: bool = True
    may_vanish: bool = False
    readers: list[tuple[Kind, int]] = field(default_factory=list)


class Fusion:
    """The accesses of the operators of one graph."""

    def __init__(self, bundles: Sequence[Bundle], outputs: Collection[Node], device_type: str = "cpu") -> None:
        """``outputs`` are nodes that leave the graph, ``device_type`` is ``cpu`` or ``cuda``."""
        self._sums = dict(_sums_of_products(bundles, device_type))
        self._kinds: dict[Node, Kind] = {}
        self._products = set(self._sums.values())
        self._values: dict[Node, _Value] = {}
        self._outputs = {base_of(n) for n in outputs}
        for bundle in bundles:
            self._add(bundle)
        self._vanished = {n for n, v in self._values.items() if v.is_made and v.may_vanish and _is_inside(v)}
        self._made: dict[Node, dict[Node, None]] = {}

    def _kind(self, node: Node) -> Kind:
        if node not in self._kinds:
            self._kinds[node] = Kind.LIBRARY if node in self._sums else kind_of(node)
        return self._kinds[node]

    def _add(self, bundle: Bundle) -> None:
        kind = self._kind(bundle.main)
        if kind is Kind.VIEW:
            return
        sources, level, num_operations = self._computing(bundle)
        for node in values_of(bundle):
            value = _Value(kind, level, sources, num_operations)
            self._values[node] = value
            self._decide(node, value)
        made = [v for n in values_of(bundle) if (v := self._values[n]).is_made]
        if made:
            for source in sources:
                if source in self._values:
                    self._values[source].readers.append((kind, level))

    def _computing(self, bundle: Bundle) -> tuple[dict[Node, None], int, int]:
        """Sources, level and size of an operator; values that it computes in place are their sources."""
        sources: dict[Node, None] = {}
        level = 0
        inside = set(bundle.nodes)
        main = bundle.main
        num_operations = 1 + sum(isinstance(a, int | float) for a in main.args)
        for given in dict.fromkeys(n for node in bundle.nodes for n in node.all_input_nodes if n not in inside):
            base = base_of(given)
            value = self._values.get(base)
            if value is None:
                sources[base] = None
                num_operations += 1
                continue
            border = value.kind in (Kind.LIBRARY, Kind.SCATTER, Kind.COLUMNS)
            level = max(level, value.level + border)
            if value.is_made:
                sources[base] = None
                num_operations += 1
            else:
                sources |= value.sources
                num_operations += value.num_operations
        return sources, level, num_operations

    def _decide(self, node: Node, value: _Value) -> None:
        kind = value.kind
        users = list(users_of(node))
        is_needed = node in self._outputs or any(self._kind(u) is Kind.LIBRARY for u in users)
        if kind in (Kind.LIBRARY, Kind.SCATTER):
            value.is_made = node not in self._products
            return
        if kind in (Kind.ROWS, Kind.COLUMNS):
            return
        if kind is Kind.RANDOM:
            value.may_vanish = not is_needed
            return
        is_reused = len(users) > 1
        is_large = is_reused and (
            len(value.sources) > _MAX_READS_ON_REUSE or value.num_operations > _MAX_OPERATIONS_ON_REUSE
        )
        is_large |= len(value.sources) > _MAX_READS
        value.is_made = is_needed or is_large
        value.may_vanish = not is_needed

    def in_memory(self, base: Node) -> dict[Node, None]:
        """The values in memory behind ``base``: itself, or what is read to compute it."""
        value = self._values.get(base)
        if value is None or (value.is_made and base not in self._vanished):
            return {base: None}
        if base not in self._made:
            self._made[base] = {n: None for source in value.sources for n in self.in_memory(source)}
        return self._made[base]

    def access(self, bundle: Bundle) -> Access:
        """The accesses of the operator ``bundle`` of the graph."""
        kind = self._kind(bundle.main)
        if kind is Kind.VIEW:
            return Access((), ())
        mine = values_of(bundle)
        made = tuple(n for n in mine if self._values[n].is_made and n not in self._vanished)
        unmade = tuple(n for n in mine if n not in made)
        if not made:
            return Access((), (), unmade=unmade)
        read = {n: None for source in self._values[made[0]].sources for n in self.in_memory(source)}
        is_eager = kind is Kind.POINTWISE and all(user.op == "output" for node in made for user in users_of(node))
        casts = _casts_before(bundle) if kind is Kind.LIBRARY else ()
        return Access((*casts, *made), tuple(read), self._replaced(kind, made, read), unmade, is_eager)

    def _replaced(self, kind: Kind, made: Iterable[Node], read: Iterable[Node]) -> tuple[tuple[Node, Node], ...]:
        if kind in (Kind.LIBRARY, Kind.SCATTER):
            return ()
        free = [n for n in read if n in self._values and n not in self._outputs]
        pairs = []
        for result in made:
            source = next((n for n in free if _size(n) == _size(result)), None)
            if source is not None:
                free.remove(source)
                pairs.append((source, result))
        return tuple(pairs)


def _sums_of_products(bundles: Sequence[Bundle], device_type: str) -> Iterator[tuple[Node, Node]]:
    """Pairs (sum, matrix product) that one kernel computes."""
    for node in (bundle.main for bundle in bundles):
        if node.target is not aten.add.Tensor or node.kwargs or len(node.all_input_nodes) != len(node.args):
            continue
        if device_type == "cuda" and all(kind_of(user) in (Kind.POINTWISE, Kind.VIEW) for user in node.users):
            continue
        for given in node.all_input_nodes:
            is_alone = given.target is aten.mm.default and len(given.users) == 1
            if is_alone and given.meta["val"].shape == node.meta["val"].shape:
                yield node, given
                break


def _is_inside(value: _Value) -> bool:
    """Whether all readers are in the kernel that makes a value."""
    kinds = {kind for kind, _ in value.readers}
    return all(level == value.level for _, level in value.readers) and not (
        Kind.COLUMNS in kinds and Kind.ROWS in kinds
    )


def _casts_before(bundle: Bundle) -> tuple[Node, ...]:
    """Casts of parameters that a library's kernel reads."""
    return tuple(n for n in bundle.nodes[: bundle.nodes.index(bundle.main)] if not is_view(n))


def _size(node: Node) -> tuple[int, torch.dtype] | None:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    return int(value.untyped_storage().nbytes()), value.dtype


def values_of(bundle: Bundle) -> list[Node]:
    """The values that an operator computes, several where it has several results."""
    position = bundle.nodes.index(bundle.main)
    return list(bundle.nodes[position + 1 :]) or [bundle.main]


def base_of(node: Node) -> Node:
    """The node that ``node`` is a view of; itself if it is none."""
    while is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def users_of(node: Node) -> Iterable[Node]:
    """Operators that read ``node``, through views too."""
    todo, seen = [node], set[Node]()
    while todo:
        for user in todo.pop().users:
            if is_view(user):
                todo.append(user)
            elif user not in seen:
                seen.add(user)
                yield user
