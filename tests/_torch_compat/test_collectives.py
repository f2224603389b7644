"""Functional collectives by name, and the bytes that a rank receives by each, of four ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.fx import Graph, Node

from chunkc._torch_compat import collectives
from chunkc._torch_compat.collectives import is_collective, is_wait, received_nbytes, share_waited

OPS = torch.ops._c10d_functional
NUM_RANKS = 4


def waited(op: object, numel: int, *args: object) -> tuple[Graph, Node, Node]:
    """A graph that reduces or gathers 16 elements of fp32 to ``numel``, and waits for that."""
    graph = Graph()
    given = graph.placeholder("given")
    given.meta["val"] = torch.zeros(16)
    made = graph.call_function(op, (given, *args, "group"))  # type: ignore[arg-type]
    wait = graph.call_function(OPS.wait_tensor.default, (made,))
    made.meta["val"], wait.meta["val"] = torch.zeros(numel), torch.zeros(numel)
    return graph, made, wait


@pytest.mark.parametrize(
    ("op", "args", "numel", "nbytes"),
    [
        (OPS.all_reduce.default, ("sum",), 16, 2 * 3 * 16),
        (OPS.all_gather_into_tensor.default, (NUM_RANKS,), 64, 3 * 64),
        (OPS.reduce_scatter_tensor.default, ("sum", NUM_RANKS), 4, 3 * 16),
    ],
    ids=["all_reduce", "all_gather", "reduce_scatter"],
)
def test_bytes_of_others(
    op: object, args: tuple[object, ...], numel: int, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank's part comes from three others, once or twice."""
    group = SimpleNamespace(size=lambda: NUM_RANKS)
    monkeypatch.setattr(collectives.distributed_c10d, "_resolve_process_group", lambda name: group)
    graph, made, wait = waited(op, numel, *args)
    assert is_collective(made) and not is_wait(made) and is_wait(wait) and not is_collective(wait)
    assert received_nbytes(made) == nbytes
    share_waited(graph)
    assert wait.meta["val"] is made.meta["val"], "a wait makes no memory"


def test_other_operators_are_none() -> None:
    graph = Graph()
    node = graph.call_function(torch.ops.aten.relu.default, (graph.placeholder("x"),))
    assert not is_collective(node) and not is_wait(node)
