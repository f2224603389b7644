"""How many bytes operators move to and from device memory, and how many kernels they launch.

Run one by one, an operator is a kernel that reads its inputs and writes its outputs; a view does neither. A compiler
that fuses makes one kernel of neighbours without a matrix product: what one of them makes for another stays in
registers or caches. Here a *run* of such operators, between two with a matrix product, reads once what was made outside
of it, and writes once what is needed there. That is the least that any fusion of the run moves; reductions over
different axes make a compiler split it. A segment boundary inside a run is not seen.

Lookups (embedding, index) read the rows they return and not the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from chunkc._torch_compat import pytree
from chunkc.capture.bundles import Bundle
from chunkc.capture.flops import operator_flops
from chunkc.capture.partition import is_view

aten = torch.ops.aten
_LOOKUPS = frozenset({aten.embedding, aten.index, aten.index_select, aten.gather})


@dataclass(frozen=True, slots=True)
class Traffic:
    """Of one operator: ``flops``, bytes read and written, kernels launched."""

    flops: int
    nbytes: int
    num_kernels: int


def operator_traffic(bundles: Sequence[Bundle], fuses: bool) -> tuple[Traffic, ...]:
    """The traffic of every operator of one graph; ``fuses``: whether neighbours without a matrix product are fused."""
    found: list[Traffic] = []
    run: list[Bundle] = []
    for bundle in bundles:
        flops = operator_flops(bundle.main)
        if flops == 0 and fuses:
            run.append(bundle)
            continue
        found += [*_fused(run), _alone(bundle, flops)]
        run = []
    return (*found, *_fused(run))


def _alone(bundle: Bundle, flops: int) -> Traffic:
    if is_view(bundle.main):
        return Traffic(flops, 0, 0)
    reads = {source: nbytes for source, nbytes in _reads(bundle)}
    return Traffic(flops, sum(reads.values()) + sum(_nbytes(v) for v in _values(bundle)), 1)


def _fused(run: Sequence[Bundle]) -> Iterator[Traffic]:
    """The traffic of a run; its first operator that computes counts as its kernel."""
    nodes = {node for bundle in run for node in bundle.nodes}
    inside = {value for bundle in run for value in _values(bundle)}
    known: set[Node] = set()
    num_kernels = 1
    for bundle in run:
        if is_view(bundle.main):
            yield Traffic(0, 0, 0)
            continue
        total = sum(_nbytes(value) for value in _values(bundle) if _escapes(value, nodes))
        for source, nbytes in _reads(bundle):
            base = _base(source)
            if base not in inside and base not in known:
                known.add(base)
                total += nbytes
        yield Traffic(0, total, num_kernels)
        num_kernels = 0


def _reads(bundle: Bundle) -> Iterator[tuple[Node, int]]:
    """Tensors that the operator reads, with the bytes that it reads of each."""
    main = bundle.main
    is_lookup = getattr(main.target, "overloadpacket", None) in _LOOKUPS
    for source in main.all_input_nodes:
        nbytes = _nbytes(source)
        if is_lookup and source is main.args[0]:
            nbytes = min(nbytes, _nbytes(main))
        yield source, nbytes


def _values(bundle: Bundle) -> list[Node]:
    """What the operator makes: its results one by one."""
    position = bundle.nodes.index(bundle.main)
    return list(bundle.nodes[position + 1 :]) or [bundle.main]


def _base(node: Node) -> Node:
    """What ``node`` is a view of; itself, if it is none."""
    while is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _escapes(value: Node, inside: set[Node]) -> bool:
    """Whether something outside of the run needs ``value``, or a view of it."""
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
