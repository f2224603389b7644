"""Graphs as bytes: what is read back is what was written, on the fake tensors of another mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node, Proxy

from chunkc._torch_compat.graph_documents import UnfitGraphError, dump_graphs, load_graphs

aten = torch.ops.aten


def placeholder(graph: Graph, name: str, value: object) -> Node:
    node = graph.placeholder(name)
    node.meta = {"val": value}
    return node


def graph_of(
    body: Callable[[Proxy], Proxy], value: object, constants: dict[str, torch.Tensor] | None = None
) -> GraphModule:
    graph = Graph()
    graph.output(body(Proxy(placeholder(graph, "x", value))).node)
    return GraphModule(constants or {}, graph)


def test_memory_is_shared_as_it_was_across_graphs() -> None:
    with FakeTensorMode():
        whole = torch.empty(4, 6, dtype=torch.bfloat16)
        part, apart = whole[1:3, 2:].t(), torch.empty(4, 6, dtype=torch.bfloat16)
    modules = [graph_of(lambda x: x, value) for value in (whole, part, apart)]
    mode = FakeTensorMode()
    header, found = load_graphs(dump_graphs({"a": 1}, modules), mode)
    assert header == {"a": 1}
    read = [next(iter(module.graph.nodes)).meta["val"] for module in found]
    for value, wanted in zip(read, (whole, part, apart), strict=True):
        assert type(value) is FakeTensor
        assert value.fake_mode is mode
        layout = value.shape, value.stride(), value.storage_offset(), value.dtype, value.device
        assert layout == (wanted.shape, wanted.stride(), wanted.storage_offset(), wanted.dtype, wanted.device)
        assert value.untyped_storage().nbytes() == wanted.untyped_storage().nbytes()
    memory = [value.untyped_storage()._cdata for value in read]
    assert memory[0] == memory[1] != memory[2]


def test_nodes_keep_names_arguments_and_lines_and_new_ones_go_on() -> None:
    with FakeTensorMode():
        value = torch.empty(3, 4)
    graph = Graph()
    x = placeholder(graph, "primals_1", value)
    first = graph.call_function(aten.add.Tensor, (x, 2), {"alpha": 3})
    graph.erase_node(graph.call_function(aten.add.Tensor, (first, 1)))
    both = graph.call_function(aten.cat.default, ([x, first], -1))
    both.meta = {
        "stack_trace": '  File "model.py", line 3',
        "nn_module_stack": {"a": ("L['self'].a", nn.Linear)},
        "left": out,
    }
    graph.output((both, None, [first]))
    _, [module] = load_graphs(dump_graphs(None, [GraphModule({}, graph)]), FakeTensorMode())
    assert str(module.graph) == str(graph)
    assert [n.meta for n in module.graph.nodes][2] == {
        "stack_trace": '  File "model.py", line 3',
        "nn_module_stack": {"a": ("L['self'].a", "Linear")},
    }
    names = [of.call_function(aten.add.Tensor, (next(iter(of.nodes)), 1)).name for of in (graph, module.graph)]
    assert names[0] == names[1] == "add_tensor_2"
    torch.testing.assert_close(module(torch.ones(3, 4))[0], torch.ones(3, 8).index_fill(1, torch.arange(4, 8), 7.0))


def out() -> None:
    """A value that is not kept."""


def test_small_constants_are_kept() -> None:
    def body(x: Proxy) -> Proxy:
        return x * Proxy(x.node.graph.get_attr("scale"))

    with FakeTensorMode():
        value = torch.empty(3)
    module = graph_of(body, value, {"scale": torch.tensor([1.0, 2.0, 3.0])})
    _, [found] = load_graphs(dump_graphs(None, [module]), FakeTensorMode())
    assert torch.equal(found(torch.ones(3)), torch.tensor([1.0, 2.0, 3.0]))


def symbolic() -> GraphModule:
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext([DimDynamic.DYNAMIC])
    return graph_of(lambda x: x, mode.from_tensor(torch.empty(5), symbolic_context=context))


def sparse() -> GraphModule:
    with FakeTensorMode():
        return graph_of(lambda x: x, torch.empty(3, 3).to_sparse())


def graph_inside() -> GraphModule:
    graph = Graph()
    graph.output(graph.get_attr("inner"))
    return GraphModule({"inner": graph_of(lambda x: x, None)}, graph)


def large_constant() -> GraphModule:
    return graph_of(lambda x: Proxy(x.node.graph.get_attr("table")), None, {"table": torch.zeros(100, 100)})


@pytest.mark.parametrize("make", [symbolic, sparse, graph_inside, large_constant])
def test_other_graphs_are_refused(make: Callable[[], GraphModule]) -> None:
    with pytest.raises(UnfitGraphError):
        dump_graphs(None, [make()])
