"""Lowering: segments together compute what the whole graph computes, and equal layers give equal segments."""

from itertools import pairwise
from typing import Any

import torch
from captures import capture_once
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from chunkc.capture.bundles import CapturedGraph
from chunkc.capture.graphs import Captured
from chunkc.ir.plan import Segment
from chunkc.passes.lower import LoweredGraph, lower


class Layers(nn.Module):
    def __init__(self, depth: int = 3, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().sum()


def captured_layers() -> tuple[Layers, torch.Tensor, Captured]:
    torch.manual_seed(0)
    model, x = Layers(), torch.randn(5, 8)
    return model, x, capture_once(model, x)


MODEL, X, CAPTURED = captured_layers()


def segments_at(cuts: list[int], graph: CapturedGraph, kind: Any) -> list[Segment]:
    edges = [0, *cuts, len(graph.bundles)]
    return [Segment(kind, i, a, b, (), (), 0, 0) for i, (a, b) in enumerate(pairwise(edges))]


def lowered(graph: CapturedGraph, cuts: list[int], kind: Any = "forward") -> LoweredGraph:
    operators = [b.nodes for b in graph.bundles]
    return lower(graph.module, operators, segments_at(cuts, graph, kind), graph.params)


def run(graph: LoweredGraph, args: dict[str, Any]) -> list[Any]:
    """The segments one after the other; a value must not be there any more once it has died."""
    env = dict(args)
    for segment in graph.segments:
        values = [env[name] for name in segment.inputs]
        for position in segment.dies:
            del env[segment.inputs[position]]
        env.update(zip(segment.outputs, segment.module(*values), strict=True))
    return [env[r] if isinstance(r, str) else r[0] for r in graph.result]


def forward_args() -> dict[str, Any]:
    params = list(MODEL.parameters())
    graph = CAPTURED.forward
    names = [n.name for n in graph.module.graph.find_nodes(op="placeholder")]
    return {n: params[graph.params[n]].detach() if n in graph.params else X for n in names}


cut_lists = st.lists(st.integers(1, len(CAPTURED.forward.bundles) - 1), unique=True).map(sorted)


@settings(max_examples=40, deadline=None)
@given(cut_lists)
def test_any_cut_computes_the_same_bits(cuts: list[int]) -> None:
    args = forward_args()
    expected = CAPTURED.forward.module(*args.values())
    for got, wanted in zip(run(lowered(CAPTURED.forward, cuts), args), expected, strict=True):
        assert torch.equal(got, wanted)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, len(CAPTURED.backward.bundles) - 1), unique=True).map(sorted))
def test_backward_cut_anywhere_gives_autograds_gradients(cuts: list[int]) -> None:
    graph = CAPTURED.backward
    saved = dict(zip(saved_names(), run(lowered(CAPTURED.forward, []), forward_args())[1:], strict=True))
    placeholders = [n.name for n in graph.module.graph.find_nodes(op="placeholder")]
    args = {n: saved.get(n, torch.ones(())) for n in placeholders}
    result = run(lowered(graph, cuts, "backward"), args)
    MODEL.zero_grad()
    MODEL(X).backward()
    gradients = {
        graph.gradients[n]: v for n, v in zip(output_names(graph), result, strict=True) if n in graph.gradients
    }
    for index, param in enumerate(MODEL.parameters()):
        assert param.grad is not None
        torch.testing.assert_close(gradients[index], param.grad, rtol=1e-6, atol=1e-6)


def saved_names() -> list[str]:
    return output_names(CAPTURED.forward)[1:]


def output_names(graph: CapturedGraph) -> list[str]:
    return [str(n) for n in graph.module.graph.find_nodes(op="output")[0].args[0]]


def test_equal_layers_have_equal_keys_and_no_names() -> None:
    starts = [i for i, b in enumerate(CAPTURED.forward.bundles) if "native_layer_norm" in str(b.main.target)]
    assert len(starts) == 3
    segments = lowered(CAPTURED.forward, starts[1:]).segments
    assert segments[0].key == segments[1].key, "two whole layers"
    assert segments[1].key != segments[2].key, "the last one also computes the loss"
    assert "primals" not in segments[0].module.code and "layers" not in segments[0].module.code


def test_other_shapes_have_other_keys() -> None:
    other = capture_once(Layers(), torch.randn(6, 8))
    assert lowered(other.forward, []).segments[0].key != lowered(CAPTURED.forward, []).segments[0].key


def test_a_view_of_a_parameter_never_enters_a_segment() -> None:
    for cut in range(1, len(CAPTURED.forward.bundles)):
        for segment in lowered(CAPTURED.forward, [cut]).segments:
            made = {
                n.name for b in CAPTURED.forward.bundles for n in b.nodes if n is not b.main and n.op != "placeholder"
            }
            views = {n for n in made if n.startswith("t_") or n == "t"}
            assert not views & set(segment.inputs)


def test_a_constant_that_the_graph_returns_is_its_value() -> None:
    """Forward hands out a constant of the model that backward needs for what it computes again."""
    graph = torch.fx.Graph()
    constant = graph.get_attr("constant")
    graph.output((constant, None))
    root = torch.nn.Module()
    root.register_buffer("constant", torch.tensor([1.0, 2.0]))
    lowered = lower(torch.fx.GraphModule(root, graph), [], [], {})
    (found,), nothing = lowered.result
    assert found is root.constant and nothing == (None,)
