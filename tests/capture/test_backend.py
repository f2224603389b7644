"""Capturing one Dynamo graph: both graphs come back, and compiled code calls the functions that it was given."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, Interpreter

from chunkc._torch_compat import capture_errors
from chunkc.capture.backend import ModelTensors, capture_graph
from chunkc.capture.graphs import Captured
from chunkc.capture.tracing import TracingOptions
from chunkc.compiler.validation import param_infos
from chunkc.errors import CaptureError


class Layers(nn.Module):
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(torch.tanh(self.first(x))) * self.scale
        return y.square().mean()


class Interpreting:
    """A backend that captures, and interprets what was captured; ``calls`` names the graphs in the order they ran."""

    def __init__(self, model: nn.Module, evaluates: bool = False) -> None:
        self.tensors = ModelTensors(model, model.parameters(), param_infos(model, None))
        self.evaluates = evaluates
        self.calls: list[str] = []
        self.captured: list[Captured] = []

    def __call__(self, module: GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        functions = [lambda args, kind=kind: self.run(kind, args) for kind in ("forward", "backward")]
        captured, code = capture_graph(
            module, examples, self.tensors, TracingOptions(), *functions, evaluates=self.evaluates
        )
        self.captured.append(captured)
        return code

    def run(self, kind: str, args: list[Any]) -> Sequence[Any]:
        self.calls.append(kind)
        outputs: Sequence[Any] = Interpreter(self.captured[-1].graphs[kind].module).boxed_run(args)
        return outputs


def batch() -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


def test_compiled_code_calls_the_functions_of_both_graphs() -> None:
    model, x = Layers(), batch()
    expected = torch.autograd.grad(model(x), list(model.parameters()))
    backend = Interpreting(model)
    loss = torch.compile(model, backend=backend, fullgraph=True)(x)
    loss.backward()
    assert backend.calls == ["forward", "backward"]
    for param, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(param.grad, gradient)


def test_a_capture_says_what_the_inputs_are() -> None:
    model = Layers()
    backend = Interpreting(model)
    torch.compile(model, backend=backend, fullgraph=True)(batch())
    (captured,) = backend.captured
    assert sorted(captured.forward.params.values()) == [0, 1, 2, 3]
    assert sorted(captured.backward.gradients.values()) == [0, 1, 2, 3]
    assert captured.schedule.num_samples == 5
    assert captured.held_at_start_nbytes == (5 * 4 + 1) * 4, "the batch and the buffer"
    assert captured.tangents is not None and len(captured.tangents.tangents) == 1
    assert [s.name for s in captured.stages] == ["aot_autograd", "partition", "schedule"]


def test_a_graph_without_gradients_has_no_tangents() -> None:
    model = Layers()
    backend = Interpreting(model, evaluates=True)
    with torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True)(batch())
    (captured,) = backend.captured
    assert captured.tangents is None and captured.schedule.is_evaluation
    assert backend.calls == ["forward"]


def test_a_graph_with_nothing_to_train_is_refused() -> None:
    model = Layers().requires_grad_(False)
    with pytest.raises(capture_errors.BackendCompilerFailed) as caught:
        torch.compile(model, backend=Interpreting(model), fullgraph=True)(batch())
    assert isinstance(caught.value.inner_exception, CaptureError)
    assert "nothing to train" in str(caught.value.inner_exception)
