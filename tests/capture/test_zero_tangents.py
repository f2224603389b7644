"""Backward graphs without tangents that nobody gives: what is left, and where nothing is left out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from chunkc._torch_compat.core import aot_backend
from chunkc.capture.partition import partition
from chunkc.capture.tangents import find_reached
from chunkc.capture.zero_tangents import find_unused, without_tangents

Forward = Callable[["Model", torch.Tensor], Any]


class Model(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.other = nn.Parameter(torch.randn(4, 4))
        self._forward = forward

    def forward(self, x: torch.Tensor) -> Any:
        return self._forward(self, x)


def backward_of(forward: Forward) -> tuple[torch.fx.GraphModule, dict[str, frozenset[int]]]:
    found: list[Any] = []

    def cut(joint: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        reached = find_reached(joint, options["num_fwd_outputs"])
        graphs = partition(joint, inputs, [], **options)
        found.append((graphs[1], reached))
        return graphs

    torch._dynamo.reset_code(Model.forward.__code__)
    backend = aot_backend(fw_compiler=lambda g, _: g, bw_compiler=lambda g, _: g, partition_fn=cut)
    torch.compile(Model(forward), backend=backend, fullgraph=True, dynamic=False)(torch.randn(4, 4))
    (graphs,) = found
    return graphs  # type: ignore[no-any-return]


def loss_and_logits(model: Model, x: torch.Tensor) -> Any:
    logits = x @ model.weight
    return logits.pow(2).sum(), logits.view(2, 8)[:, 1:] * 3


def test_what_is_left_computes_the_same_gradients() -> None:
    backward, reached = backward_of(loss_and_logits)
    cut = without_tangents(backward, reached)
    assert cut is not None
    unused = find_unused(backward, reached)
    inputs = backward.graph.find_nodes(op="placeholder")
    assert [n.name for n in cut.graph.find_nodes(op="placeholder")] == [n.name for n in inputs]
    assert not any(n.users for n in cut.graph.find_nodes(op="placeholder") if n.name in unused)
    assert len(cut.graph.nodes) < len(backward.graph.nodes)
    torch.manual_seed(0)
    given = [torch.randn(n.meta["val"].shape) for n in inputs]
    zeros = [torch.zeros_like(v) if n.name in unused else v for n, v in zip(inputs, given, strict=True)]
    nothing = [None if n.name in unused else v for n, v in zip(inputs, given, strict=True)]
    for ours, plain in zip(cut(*nothing), backward(*zeros), strict=True):
        assert (ours is None and plain is None) or torch.equal(ours, plain)
    assert not torch.equal(backward(*given)[0], backward(*zeros)[0])


def with_factors(model: Model, x: torch.Tensor) -> Any:
    hidden = x @ model.weight
    return (hidden * model.other).pow(2).sum(), hidden.sin() * model.other


def test_factors_of_the_zeros_are_not_computed() -> None:
    backward, reached = backward_of(with_factors)
    cut = without_tangents(backward, reached)
    assert cut is not None
    unread = [{n.name for n in g.graph.nodes if n.op == "call_function" and not n.users} for g in (backward, cut)]
    assert unread[1] <= unread[0]
    assert {"aten.sin.default", "aten.cos.default"}.isdisjoint(str(n.target) for n in cut.graph.nodes)


def no_scalar(model: Model, x: torch.Tensor) -> Any:
    return x @ model.weight, x @ model.weight * 2


def a_parameter_of_its_own(model: Model, x: torch.Tensor) -> Any:
    return (x @ model.weight).sum(), x @ model.other


def read_by_others(model: Model, x: torch.Tensor) -> Any:
    logits = x @ model.weight
    return logits.sum(), logits.cumsum(0)


@pytest.mark.parametrize("forward", [no_scalar, a_parameter_of_its_own, read_by_others])
def test_where_nothing_is_left_out(forward: Forward) -> None:
    """No output is taken for the loss; a parameter would have no gradient; an operator that is not listed."""
    assert without_tangents(*backward_of(forward)) is None
