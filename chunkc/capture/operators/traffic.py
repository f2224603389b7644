"""Bytes that operators move to and from device memory, and kernels that they launch.

An operator by itself is a kernel that reads its inputs and writes its outputs; a view does neither. A compiler that
fuses makes one kernel of neighbours without a matrix product. Such a *run*, between two with a matrix product, reads
once what was made outside of it, and writes once what is needed there. That is the least that any fusion moves:
reductions over different axes, or a segment boundary, split it.

An operator that saves or replays the state of a random generator is a kernel by itself, whatever fuses. So is a
collective, whose bytes are those that the rank receives from others.

Lookups (embedding, index) read the rows they return and not the table.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch.fx import Node

from chunkc._torch_compat.collectives import is_collective, is_wait, received_nbytes
from chunkc._torch_compat.core import pytree
from chunkc._torch_compat.partitioning import operator_of
from chunkc.capture.bundles import Bundle
from chunkc.capture.operators.flops import operator_flops
from chunkc.capture.partition import is_view

aten = torch.ops.aten
Sizes = Callable[[Node], int]
_LOOKUPS = frozenset({aten.embedding, aten.index, aten.index_select, aten.gather})


@dataclass(frozen=True, slots=True)
class Traffic:
    """Of one operator: ``flops``, bytes read and written, kernels launched."""

    flops: int
    nbytes: int
    num_kernels: int


def operator_traffic(bundles: Sequence[Bundle], fuses: bool) -> tuple[Traffic, ...]:
    """Return the traffic of every operator of one graph; ``fuses``: runs are fused."""
    traffic: list[Traffic] = []
    run: list[Bundle] = []
    sizes = cache(_nbytes)
    for bundle in bundles:
        flops = operator_flops(bundle.main)
        if (
            flops == 0
            and fuses
            and not is_collective(bundle.main)
            and operator_of(bundle.main)[0] is bundle.main.target
        ):
            run.append(bundle)
            continue
        traffic += [*_fused(run, sizes), _alone(bundle, flops, sizes)]
        run = []
    return (*traffic, *_fused(run, sizes))


def _alone(bundle: Bundle, flops: int, sizes: Sizes) -> Traffic:
    if is_view(bundle.main) or is_wait(bundle.main):
        return Traffic(flops, 0, 0)
    if is_collective(bundle.main):
        return Traffic(flops, received_nbytes(bundle.main), 1)
    reads = dict(_reads(bundle, sizes))
    return Traffic(flops, sum(reads.values()) + sum(sizes(v) for v in _values(bundle)), 1)


def _fused(run: Sequence[Bundle], sizes: Sizes) -> Iterator[Traffic]:
    """The traffic of a run; its first operator that computes counts as its kernel."""
    nodes = {node for bundle in run for node in bundle.nodes}
    inside = {value for bundle in run for value in _values(bundle)}
    outside = _Outside(sizes)
    num_kernels = 1
    for bundle in run:
        if is_view(bundle.main):
            yield Traffic(0, 0, 0)
            continue
        total = sum(sizes(value) for value in _values(bundle) if _escapes(value, nodes))
        for source, nbytes in _reads(bundle, sizes):
            if (base := _base(source)) not in inside:
                total += outside.read(source, base, nbytes)
        yield Traffic(0, total, num_kernels)
        num_kernels = 0


@dataclass(slots=True)
class _Outside:
    """Parts of tensors from outside of a run that it has read: each once, of no tensor more than it has."""

    sizes: Sizes
    _parts: set[tuple[Node, int, int]] = field(default_factory=set)
    _left_nbytes: dict[Node, int] = field(default_factory=dict)

    def read(self, source: Node, base: Node, nbytes: int) -> int:
        """Bytes moved to read ``nbytes`` of ``source``, a view of ``base`` or that itself."""
        part = (base, *_extent(source))
        if part in self._parts:
            return 0
        self._parts.add(part)
        moved = min(nbytes, self._left_nbytes.setdefault(base, self.sizes(base)))
        self._left_nbytes[base] -= moved
        return moved


def _extent(node: Node) -> tuple[int, int]:
    """Where a tensor begins in its storage, and its elements."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return 0, 0
    return int(value.storage_offset()), value.numel()


def _reads(bundle: Bundle, sizes: Sizes) -> Iterator[tuple[Node, int]]:
    """Tensors that the operator reads, with the bytes that it reads of each."""
    main = bundle.main
    is_lookup = getattr(main.target, "overloadpacket", None) in _LOOKUPS
    for source in main.all_input_nodes:
        nbytes = sizes(source)
        if is_lookup and source is main.args[0]:
            nbytes = min(nbytes, sizes(main))
        yield source, nbytes


def _values(bundle: Bundle) -> list[Node]:
    """Results of the operator, unpacked where it has several."""
    position = bundle.nodes.index(bundle.main)
    nodes = bundle.nodes[position + 1 :]
    return [n for n in nodes if not any(u.target is operator.getitem for u in n.users)] or [bundle.main]


def _base(node: Node) -> Node:
    """Return the node that ``node`` is a view of; ``node`` itself if it is no view."""
    while is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _escapes(value: Node, inside: set[Node]) -> bool:
    todo = [value]
    while todo:
        for user in todo.pop().users:
            if is_view(user):
                todo.append(user)
            elif user not in inside:
                return True
    return False


def _nbytes(node: Node) -> int:
    """Bytes of the tensors that ``node`` stands for; an expanded one has no more than its storage."""
    total = 0
    for value in pytree.tree_leaves(node.meta.get("val")):
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            total += min(value.numel() * value.element_size(), int(value.untyped_storage().nbytes()))
    return total
