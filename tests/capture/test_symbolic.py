"""Copies of symbolic graphs compute what the graphs captured for the same sizes compute, with the same storages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from chunkc._torch_compat.core import aot_backend
from chunkc._torch_compat.partitioning import min_cut_partition
from chunkc._torch_compat.symbolic import SYMBOLIC, size_symbol, symbols_of
from chunkc.capture.backend import boxed
from chunkc.capture.symbolic import Specialisation, save_sizes, size_inputs

Graphs = tuple[GraphModule, GraphModule]


class Pooled(nn.Module):
    """Views, slices, a mean over a changing length, and a number that is computed of sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).relu()
        halves = hidden.view(x.shape[0], x.shape[1] * 2, 4)[:, 1:]
        scaled = halves.flatten(1).sum(1, keepdim=True) * (x.shape[1] / 3)
        return (self.second(hidden).mean(1) + scaled).pow(2).sum()


def captured(model: nn.Module, *calls: torch.Tensor, dynamic: bool) -> Graphs:
    """Both graphs as partitioned at the last of ``calls``."""
    found: list[Graphs] = []

    def partition(joint: GraphModule, inputs: Sequence[Any], **options: Any) -> Graphs:
        forward, backward = min_cut_partition(joint, inputs, **options)
        save_sizes(forward, backward)
        found.append((forward, backward))
        return forward, backward

    def interpret(module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return boxed(torch.fx.Interpreter(module).boxed_run)

    backend = aot_backend(fw_compiler=interpret, bw_compiler=interpret, partition_fn=partition)
    compiled = torch.compile(model, backend=backend, dynamic=dynamic, fullgraph=True)
    for x in calls:
        compiled(x).backward()
    return found[-1]


def storage_groups(graphs: Graphs) -> list[list[str]]:
    """Names of values that share a storage, over both graphs."""
    groups: dict[int, list[str]] = {}
    for module in graphs:
        for node in module.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                groups.setdefault(value.untyped_storage()._cdata, []).append(node.name)
    return list(groups.values())


@pytest.fixture(scope="module")
def symbolic() -> Graphs:
    torch.manual_seed(0)
    return captured(Pooled(), torch.randn(2, 5, 6), dynamic=True)


def at(graphs: Graphs, x: torch.Tensor) -> Graphs:
    forward, backward = graphs
    inputs = forward.graph.find_nodes(op="placeholder")
    tensor = next(n for n in inputs if isinstance(v := n.meta["val"], torch.Tensor) and symbols_of(v))
    sizes = {size_symbol(s): n for s, n in zip(tensor.meta["val"].shape, x.shape, strict=True) if size_symbol(s)}
    assert set(sizes) == set(size_inputs(forward).values())
    specialisation = Specialisation(sizes)
    return specialisation.copy(forward), specialisation.copy(backward)


SHAPES = [(2, 5, 6), (7, 3, 6), (4, 11, 6)]


@pytest.mark.parametrize("shape", SHAPES)
def test_values_have_the_sizes_that_running_the_copy_gives(symbolic: Graphs, shape: tuple[int, ...]) -> None:
    """Every value of both graphs: dtype, shape, stride, offset, and bytes of the storage."""

    class Checked(torch.fx.Interpreter):
        num_checked = 0

        def run_node(self, n: torch.fx.Node) -> Any:
            made, told = super().run_node(n), n.meta.get("val")
            if isinstance(told, torch.Tensor):
                facts = [
                    (t.dtype, t.shape, t.stride(), t.storage_offset(), t.untyped_storage().nbytes())
                    for t in (made, told)
                ]
                assert facts[0] == facts[1], n
                self.num_checked += 1
            else:
                assert not isinstance(told, SYMBOLIC), n
            return made

    torch.manual_seed(1)
    x = torch.randn(shape)
    for module in at(symbolic, x):
        examples = [n.meta["val"] for n in module.graph.find_nodes(op="placeholder")]
        made = [
            torch.empty_strided(e.shape, e.stride(), dtype=e.dtype).uniform_() if isinstance(e, torch.Tensor) else e
            for e in examples
        ]
        checked = Checked(module)
        checked.run(*made)
        assert checked.num_checked > 5


@pytest.mark.parametrize("shape", SHAPES)
def test_values_share_storages_as_in_the_original(symbolic: Graphs, shape: tuple[int, ...]) -> None:
    copies = at(symbolic, torch.randn(shape))
    kept = {n.name for module in copies for n in module.graph.nodes}
    wanted = [[name for name in group if name in kept] for group in storage_groups(symbolic)]
    assert storage_groups(copies) == [group for group in wanted if group]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_copy_computes_loss_and_gradients_of_plain_pytorch(symbolic: Graphs, shape: tuple[int, ...]) -> None:
    torch.manual_seed(2)
    model, x = Pooled(), torch.randn(shape)
    loss = model(x)
    loss.backward()
    forward, backward = at(symbolic, x)
    params = iter(model.parameters())
    values = [n.meta["val"] for n in forward.graph.find_nodes(op="placeholder")]
    inputs = [
        v if not isinstance(v, torch.Tensor) else x if v.shape == x.shape else next(params).detach() for v in values
    ]
    outputs = forward(*inputs)
    torch.testing.assert_close(outputs[0], loss.detach())
    saved = outputs[1:]
    numbers = [v for v in saved if not isinstance(v, torch.Tensor)]
    tensors = [v for v in saved if isinstance(v, torch.Tensor)]
    gradients = [g for g in backward(*numbers, *tensors, torch.ones(())) if g is not None]
    wanted = [p.grad for p in model.parameters()]
    assert len(gradients) == len(wanted)
    for found, plain in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(found, plain)


def test_copies_read_no_size(symbolic: Graphs) -> None:
    for module in at(symbolic, torch.randn(4, 11, 6)):
        for node in module.graph.find_nodes(op="placeholder"):
            assert isinstance(node.meta["val"], torch.Tensor) or not node.users


def test_a_graph_of_fixed_sizes_has_none() -> None:
    forward, backward = captured(Pooled(), torch.randn(2, 5, 6), dynamic=False)
    assert size_inputs(forward) == size_inputs(backward) == {}


def test_backward_takes_every_size_that_forward_takes() -> None:
    """Also one that only the forward needs, so that both graphs are told apart by the same sizes."""

    class Fewer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight.sum() * 2 + x.detach().sum() * 0

    forward, backward = captured(Fewer(), torch.randn(3, 6), torch.randn(4, 6), dynamic=True)
    assert size_inputs(forward)
    assert set(size_inputs(forward).values()) == set(size_inputs(backward).values())
