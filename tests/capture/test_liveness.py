"""Liveness against the allocator: what the schedule says is alive is what really is, operator by operator."""

import weakref
from typing import Any

import pytest
import torch
from captures import capture_once
from torch import nn
from torch.fx import Interpreter, Node

from chunkc.capture.bundles import CapturedGraph


class Mlp(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.nn.functional.gelu(layer(x))
        return self.norm(x).square().mean()


class StorageCounter(Interpreter):
    """Runs a graph and records the bytes of all storages that are alive after each node, parameters left out."""

    def __init__(self, graph: CapturedGraph, alive: dict[int, tuple[Any, int]], params: set[int]) -> None:
        super().__init__(graph.module)
        self._alive = alive
        self._params = params

    def track(self, value: Any) -> None:
        for tensor in [value] if isinstance(value, torch.Tensor) else value if isinstance(value, tuple | list) else []:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._params:
                self._alive[storage._cdata] = (
                    torch.multiprocessing.reductions.StorageWeakRef(storage),
                    storage.nbytes(),
                )

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n.op == "call_function":
            self.track(value)
        return value


def live_storage_nbytes(alive: dict[int, tuple[Any, int]]) -> int:
    return sum(nbytes for reference, nbytes in alive.values() if not reference.expired())


def measure(graph: CapturedGraph, args: list[Any], counted: list[torch.Tensor]) -> list[int]:
    alive: dict[int, tuple[Any, int]] = {}
    payloads = {args[i].untyped_storage()._cdata for i in range(len(args)) if not any(args[i] is c for c in counted)}
    counter = StorageCounter(graph, alive, payloads)
    for tensor in counted:
        counter.track(tensor)
    last_names = [bundle.nodes[-1].name for bundle in graph.bundles]
    found: dict[str, int] = {}
    env = counter.env
    values = iter(args)
    last_use: dict[Node, Node] = {}
    for node in graph.module.graph.nodes:
        for source in node.all_input_nodes:
            last_use[source] = node
    for node in graph.module.graph.nodes:
        if node.op == "placeholder":
            env[node] = next(values)
            continue
        if node.op == "output":
            break
        env[node] = counter.run_node(node)
        for source in [*node.all_input_nodes, node]:
            if last_use.get(source, node) is node and source in env:
                del env[source]
        found[node.name] = live_storage_nbytes(alive)
    return [found[name] for name in last_names]


@pytest.mark.parametrize(("width", "depth"), [(8, 1), (16, 3)])
def test_forward_liveness_equals_storages_really_alive(width: int, depth: int) -> None:
    model, x = Mlp(width, depth), torch.randn(4, width)
    captured = capture_once(model, x)
    params = list(model.parameters())
    names = [n.name for n in captured.forward.module.graph.find_nodes(op="placeholder")]
    args = [params[captured.forward.params[n]].detach() if n in captured.forward.params else x for n in names]
    measured = measure(captured.forward, args, [x])
    outputs = captured.schedule.held_nbytes - x.untyped_storage().nbytes()
    planned = [op.live_after_nbytes - outputs for op in captured.schedule.forward.operators]
    assert planned == measured


def test_storages_are_counted_once_however_many_views_they_have() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scaled = x * self.weight
            return (scaled.view(8, -1).t().sin() * scaled.view(-1, 8).cos()).sum()

    captured = capture_once(Views(), torch.randn(64))
    first = captured.schedule.forward.operators[0]
    assert first.target.startswith("aten.mul")
    base = 64 * 4
    assert first.live_nbytes == 2 * base + 4, "the input, the product and the previous iteration's output"
    assert max(op.live_nbytes for op in captured.schedule.forward.operators) <= 5 * base + 8


def test_gradients_leave_the_count_of_later_operators() -> None:
    captured = capture_once(Mlp(32, 4), torch.randn(2, 32))
    operators = captured.schedule.backward.operators
    gradient_nbytes = 32 * 32 * 4
    assert sorted(p for op in operators for p in op.grads) == list(range(len(captured.schedule.params)))
    assert operators[-1].live_after_nbytes < gradient_nbytes, "none of four weight gradients is counted at the end"


def test_expired_references_do_not_keep_storages() -> None:
    tensor = torch.ones(16)
    reference = weakref.ref(tensor)
    alive: dict[int, tuple[Any, int]] = {}
    storage = tensor.untyped_storage()
    alive[storage._cdata] = (torch.multiprocessing.reductions.StorageWeakRef(storage), storage.nbytes())
    assert live_storage_nbytes(alive) == 64
    del tensor, storage
    assert reference() is None
    assert live_storage_nbytes(alive) == 0
