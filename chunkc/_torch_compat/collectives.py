"""Functional collectives in graphs, and what a rank receives by them.

DTensor's redistributions are traced to these operators of ``_c10d_functional``. A collective begins an exchange and
returns the memory it will fill; ``wait_tensor`` returns the same memory once it is filled. Seen on torch 2.11.0 and
2.13.0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.fx
from torch.distributed import distributed_c10d

_NAMESPACES: Final = ("_c10d_functional::", "_dtensor::")
_WAIT: Final = "_c10d_functional::wait_tensor"
_SIZED: Final = ("all_gather_into_tensor", "reduce_scatter_tensor")
"""Collectives whose last arguments are a number of ranks and their group, which need not exist in a plan ahead."""


@dataclass(frozen=True, slots=True)
class ContextLine:
    """Ranks with slices of the same sequences: their process group, and the place of this one's."""

    group_name: str
    size: int
    place: int


def gathered(part: torch.Tensor, line: ContextLine) -> torch.Tensor:
    """The parts of all ranks of ``line``, in their order along the first dimension.

    Backward gives each rank the sum of what all of them have for its part. ``part``: contiguous, equal in shape.
    torch's own function for it has another name in 2.13 than in 2.11.
    """
    whole: torch.Tensor = _Gathered.apply(part, line)  # type: ignore[no-untyped-call]
    return whole


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, part: torch.Tensor, line: ContextLine) -> torch.Tensor:
        context.line = line
        ops: Any = torch.ops._c10d_functional
        return ops.wait_tensor(ops.all_gather_into_tensor(part, line.size, line.group_name))  # type: ignore[no-any-return]

    @staticmethod
    def backward(context: Any, whole: torch.Tensor) -> tuple[torch.Tensor, None]:
        line, ops = context.line, torch.ops._c10d_functional
        started = ops.reduce_scatter_tensor(whole.contiguous(), "sum", line.size, line.group_name)
        return ops.wait_tensor(started), None


def is_dtensor(value: object) -> bool:
    """Whether ``value`` is a DTensor, fake ones too, without the import of theirs that takes a while."""
    return isinstance(value, torch.Tensor) and hasattr(value, "placements") and hasattr(value, "to_local")


def is_wait(node: torch.fx.Node) -> bool:
    """Whether ``node`` waits for a collective, whose result it returns."""
    return _name(node) == _WAIT


def is_collective(node: torch.fx.Node) -> bool:
    """Whether ``node`` begins an exchange between ranks."""
    return _name(node).startswith(_NAMESPACES) and not is_wait(node)


def received_nbytes(node: torch.fx.Node) -> int:
    """Bytes that a rank receives by a collective, by the ring algorithms.

    An all-reduce is a reduce-scatter and an all-gather: each brings all parts of the tensor but the rank's own.
    """
    source, result = node.args[0], node.meta.get("val")
    given = source.meta.get("val") if isinstance(source, torch.fx.Node) else None
    if not isinstance(result, torch.Tensor) or not isinstance(given, torch.Tensor):
        return 0
    name, size = _name(node).split("::")[-1], _group_size(node)
    if name == "all_reduce":
        return 2 * (size - 1) * given.nbytes // size
    if name in ("all_gather_into_tensor", "all_to_all_single", "shard_dim_alltoall"):
        return (size - 1) * result.nbytes // size
    if name == "reduce_scatter_tensor":
        return (size - 1) * result.nbytes
    return int(result.nbytes)


def share_waited(graph: torch.fx.Graph) -> None:
    """Say of every wait in ``graph`` that its result is the memory of what it waits for."""
    for node in graph.nodes:
        if node.op == "call_function" and is_wait(node):
            node.meta["val"] = node.args[0].meta["val"]


def _name(node: torch.fx.Node) -> str:
    target: Any = node.target
    return str(target._schema.name) if isinstance(target, torch._ops.OpOverload) else ""


def _group_size(node: torch.fx.Node) -> int:
    """Ranks of a collective: its last argument but one, or those of the group that the last one names."""
    if _name(node).split("::")[-1] in _SIZED:
        return int(node.args[-2])  # type: ignore[arg-type]
    c10d: Any = distributed_c10d
    return int(c10d._resolve_process_group(node.args[-1]).size())
