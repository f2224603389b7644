"""What torch keeps of compiled functions goes when their backend is released, and nothing else."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from chunkc._torch_compat.core import Finalizer
from chunkc._torch_compat.release import ReleasableBackend, compilations_forgotten, forget_source


class Compiler:
    def __init__(self) -> None:
        self.num_graphs = 0

    def __call__(self, module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.num_graphs += 1
        return module.forward


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def compiled(compiler: Compiler) -> tuple[ReleasableBackend, Callable[..., Any]]:
    backend = ReleasableBackend(compiler)
    return backend, torch.compile(doubled, backend=backend, dynamic=False)


def test_a_released_backend_lets_go_of_its_compiler() -> None:
    compiler = Compiler()
    backend, run = compiled(compiler)
    assert torch.equal(run(torch.ones(2)), torch.full((2,), 2.0))
    gone = weakref.ref(compiler)
    del compiler, run
    backend.release()
    gc.collect()
    assert gone() is None


def test_frames_of_other_backends_over_the_same_function_stay() -> None:
    first, second = Compiler(), Compiler()
    backend, run = compiled(first)
    _, other = compiled(second)
    run(torch.ones(3))
    other(torch.ones(3))
    backend.release()
    assert torch.equal(other(torch.ones(3)), torch.full((3,), 2.0))
    assert (first.num_graphs, second.num_graphs) == (1, 1)


def test_a_release_within_a_frame_of_another_model_is_not_traced() -> None:
    """The garbage collector may call finalizers at any line, also between the graphs of a broken forward."""
    compiler = Compiler()
    backend, run = compiled(compiler)
    run(torch.ones(2))
    gone = weakref.ref(compiler)
    del compiler, run
    model = nn.Identity()
    Finalizer(model, backend.release)
    models = [model]
    del model

    def forward(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        models.clear()
        return x * 2

    other = Compiler()
    assert torch.equal(torch.compile(forward, backend=other)(torch.ones(2)), torch.full((2,), 4.0))
    assert other.num_graphs == 2
    gc.collect()
    assert gone() is None


def test_texts_made_within_the_block_are_forgotten_and_others_are_not() -> None:
    def names() -> set[str]:
        return set(torch.fx.graph_module._loader.eval_cache)

    earlier = torch.fx.symbolic_trace(doubled)
    before = names()
    with compilations_forgotten():
        torch.fx.symbolic_trace(doubled)
        assert len(names()) == len(before) + 1
    assert names() == before
    forget_source(earlier)
    assert names() < before
    assert torch.equal(earlier(torch.ones(2)), torch.full((2,), 2.0))
