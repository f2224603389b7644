"""Which gradients depend on which output, and tangents that stay undefined up to the backward graph."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from chunkc._torch_compat.core import aot_backend
from chunkc.capture.partition import partition
from chunkc.capture.tangents import Tangent, Tangents, find_reached, keeps_undefined, tangents_of

CPU = torch.device("cpu")
NAMES = ("trunk", "first", "second")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in NAMES:
            setattr(self, name, nn.Parameter(torch.randn(4, 4)))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = (x @ self.trunk).tanh()
        return hidden @ self.first, hidden.detach() @ self.second, (x @ self.trunk).t(), x.view(-1)


class Recorder:
    def __init__(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = keeps_undefined) -> None:
        self.tangents = Tangents()
        self.reached: list[frozenset[int]] = []
        self._wrap = wrap

    def __call__(self, module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        names = [node.name for node in module.graph.find_nodes(op="placeholder")]
        params = [next((NAMES.index(n) for n in NAMES if f"_{n}_" in name), None) for name in names]

        def cut(joint: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
            reached = find_reached(joint, options["num_fwd_outputs"])
            forward, backward = partition(joint, inputs, [], **options)
            self.tangents = tangents_of(backward, reached, params)
            return forward, backward

        def backward(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            def run(args: list[Any]) -> Any:
                self.reached.append(self.tangents.fill(args))
                return graph(*args)

            run._boxed_call = True  # type: ignore[attr-defined]
            return run

        compiled = aot_backend(fw_compiler=lambda g, _: g, bw_compiler=backward, partition_fn=cut)
        return self._wrap(compiled(module, example_inputs))


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def reached_from(recorder: Recorder, outputs: Sequence[int]) -> set[str]:
    """Names of the parameters whose gradients are asked for where the loss uses ``outputs`` of the model."""
    torch._dynamo.reset_code(Model.forward.__code__)
    x = torch.randn(4, 4)
    found = torch.compile(Model(), backend=recorder, fullgraph=True, dynamic=False)(x)
    torch.stack([found[i].sum() for i in outputs]).sum().backward()
    return {NAMES[i] for i in recorder.tangents.params_of(recorder.reached[-1])}


@pytest.mark.parametrize(
    ("outputs", "wanted"),
    [
        ([0], {"trunk", "first"}),
        ([1], {"second"}),
        ([2], {"trunk"}),
        ([1, 2], {"trunk", "second"}),
        ([0, 1, 2], {"trunk", "first", "second"}),
    ],
)
def test_gradients_that_depend_on_the_outputs_used(recorder: Recorder, outputs: list[int], wanted: set[str]) -> None:
    """Also behind a view (2), and beside an output that is a view of an input."""
    assert reached_from(recorder, outputs) == wanted


def test_undefined_tangents_become_zeros() -> None:
    """A gradient that depends on no tangent is always asked for."""
    made = [
        Tangent(1, (2, 3), (1, 2), torch.float32, CPU, frozenset({0, 2})),
        Tangent(2, (4,), (1,), torch.float16, CPU, frozenset({2, 3})),
    ]
    tangents, saved, given = Tangents(tuple(made), (5, 6, 7, None)), object(), torch.ones(4)
    args = [saved, None, given]
    assert tangents.fill(args) == {1, 2, 3}
    assert tangents.params_of([1, 2, 3]) == {6, 7}
    assert args[0] is saved and args[2] is given
    assert args[1].shape == (2, 3) and args[1].stride() == (1, 2) and not args[1].any()
    assert tangents.fill([saved, given, given]) == {0, 1, 2, 3}
    nothing: list[Any] = [saved, None, None]
    assert tangents.fill(nothing) == {1}
    assert nothing[2].dtype is torch.float16


def test_what_made_the_inputs_is_left_alone() -> None:
    """A compiled function before this one may count on zeros, also where this one returns a view of its output."""
    first, second = Recorder(wrap=lambda compiled: compiled), Recorder()
    torch._dynamo.reset_code(Model.forward.__code__)
    x = torch.randn(4, 4, requires_grad=True)
    given = torch.compile(Model(), backend=first, fullgraph=True, dynamic=False)(x)
    found = torch.compile(lambda value: (value.t(), value * 2), backend=second, fullgraph=True, dynamic=False)(given[0])
    found[0].sum().backward()
    assert first.reached == [frozenset(range(len(first.tangents.params)))] and not second.reached


def test_inputs_changed_in_place(recorder: Recorder) -> None:
    """The graph is found behind an input that it changed, where it returns nothing else that has a gradient."""
    weight = torch.ones(4, requires_grad=True)
    x = weight * 2

    def change(x: torch.Tensor, y: torch.Tensor) -> None:
        x.mul_(3)
        y.mul_(x.detach())

    y = weight * 5
    torch.compile(change, backend=recorder, fullgraph=True, dynamic=False)(x, y)
    y.sum().backward()
    assert weight.grad is not None and torch.equal(weight.grad, torch.full((4,), 30.0))
    assert recorder.reached == [frozenset({1})]
