"""A compiled model inside of another ``torch.compile`` is called as it is, and what is around it is compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from small import HW, OPTIONS, TOLERANCE, Small, Twins, twins_at
from torch import nn
from torch.fx import GraphModule

import chunkc


class Graphs:
    """A backend that counts what it is given."""

    def __init__(self) -> None:
        self.num_ops: list[int] = []

    def __call__(self, module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.num_ops.append(sum(node.op.startswith("call") for node in module.graph.nodes))
        forward: Callable[..., Any] = module.forward
        return forward


def train(twins: Twins, call: Callable[[], torch.Tensor], plain: Callable[[], torch.Tensor]) -> None:
    """Three steps of both."""
    for _ in range(3):
        for (_, optimizer), loss_of in zip(twins.sides(), (call, plain), strict=True):
            loss_of().backward()
            optimizer.step()
            optimizer.zero_grad()
    twins.check_params()


def test_a_compiled_model_handed_to_torch_compile_runs_as_it_is() -> None:
    graphs, twins = Graphs(), twins_at("staged")
    outer = torch.compile(twins.model, backend=graphs)
    train(twins, lambda: outer(twins.x), lambda: twins.plain(twins.x))
    assert chunkc.stats(twins.model)["num_compiles"] == 0
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(outer(twins.x), twins.plain(twins.x), atol=TOLERANCE, rtol=0)
    assert not graphs.num_ops


def test_a_function_around_a_compiled_model_breaks_there() -> None:
    """Its own operators before and after the call are compiled."""
    graphs, twins = Graphs(), twins_at("staged")

    def loss_of(model: nn.Module) -> torch.Tensor:
        return torch.sin(model(torch.cos(twins.x))) * 2

    outer = torch.compile(loss_of, backend=graphs)
    train(twins, lambda: outer(twins.model), lambda: loss_of(twins.plain))
    assert graphs.num_ops == [1, 2] and chunkc.stats(twins.model)["num_compiles"] == 0


def test_operators_on_parameters_break_too() -> None:
    """A penalty in a compiled function reads true values and makes true gradients; ``fullgraph=True`` says why not."""
    twins = twins_at("staged")

    def penalty(model: nn.Module) -> torch.Tensor:
        return model.second.weight.square().sum()

    with pytest.raises(Exception, match=r"second\.weight.*inside another torch\.compile"):
        torch.compile(penalty, backend="eager", fullgraph=True)(twins.model)
    outer = torch.compile(penalty, backend="eager")
    train(twins, lambda: outer(twins.model) + twins.model(twins.x), lambda: penalty(twins.plain) + twins.plain(twins.x))


class Around(nn.Module):
    """A trained layer before another model, which is none of its own parts."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.call_inner = lambda x: inner(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.call_inner(self.layer(x)))


def test_one_compiled_model_inside_another_is_a_break() -> None:
    """Both train, each by its own plan."""
    torch.manual_seed(3)
    twins = twins_at("staged")
    layer = Around(Small()).layer
    sides = []
    for inner, own in ((twins.model, True), (twins.plain, False)):
        around = Around(inner)
        around.layer.load_state_dict(copy.deepcopy(layer.state_dict()))
        around = chunkc.compile(around, HW, dtype=torch.float32, backend="eager") if own else around
        make = chunkc.AdamW if own else torch.optim.AdamW
        sides.append((around, make(around.parameters(), **OPTIONS)))
    for _ in range(3):
        for (around, outer), (_, optimizer) in zip(sides, twins.sides(), strict=True):
            around(twins.x).backward()
            for one in (outer, optimizer):
                one.step()
                one.zero_grad()
    twins.check_params()
    torch.testing.assert_close(sides[0][0].layer.weight + 0, sides[1][0].layer.weight + 0, atol=TOLERANCE, rtol=0)
