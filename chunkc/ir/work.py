"""Work of a segment in counts that hold on any machine; a cost model turns them into time.

Operators of one kind and dtype are added up: a processor is as fast at all of them. A matrix product or an attention is
bounded by arithmetic or by the bytes that it moves, whichever takes longer; a collective of the model's own, as of
tensor parallelism, by the bytes that the rank receives; anything else by bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from chunkc.ir.schedule import Operator

_COLLECTIVES: Final = ("_c10d_functional.", "_dtensor.")


class Kind(StrEnum):
    """The bound of an operator: matrix products (convolutions too), fused attention, a link, or memory."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    MEMORY = "memory"
    LINK = "link"


@dataclass(frozen=True, slots=True)
class Work:
    """Operators of one kind and dtype (of the first floating-point operand; empty: none) together."""

    kind: Kind
    dtype: str
    flops: int
    nbytes: int
    num_kernels: int


def kind_of(operator: Operator) -> Kind:
    if operator.target.startswith(_COLLECTIVES):
        return Kind.LINK
    if operator.flops == 0:
        return Kind.MEMORY
    return Kind.ATTENTION if "scaled_dot_product" in operator.target else Kind.MATMUL


def work_of(operators: Iterable[Operator]) -> tuple[Work, ...]:
    """The work of ``operators``, by kind and dtype; what neither computes nor moves anything is left out."""
    sums: dict[tuple[Kind, str], list[int]] = {}
    for op in operators:
        kind = kind_of(op)
        total = sums.setdefault((kind, "" if kind in (Kind.MEMORY, Kind.LINK) else op.dtype), [0, 0, 0])
        for position, count in enumerate((op.flops, op.nbytes, op.num_kernels)):
            total[position] += count
    return tuple(Work(kind, dtype, *sums[kind, dtype]) for kind, dtype in sorted(sums) if any(sums[kind, dtype]))
