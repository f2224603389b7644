"""FX graphs over fake tensors as bytes: operators, names, and the metadata that others read.

Nodes are records of one pickle stream, in order, so that what a node refers to was read before it. A fake tensor is
its layout over a numbered storage: tensors that share memory share it again, in the fake mode of the reader.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any, Final

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes

from chunkc._torch_compat.partitioning import uncompiled

UnfitGraphError = pickle.PicklingError
"""Raised by graphs that have no bytes: those of symbolic sizes, with graphs inside, or over other kinds of tensors."""

_KEYS: Final = ("val", "stack_trace", "nn_module_stack", "fwd_nn_module_stack", "original_aten")
_STACKS: Final = ("nn_module_stack", "fwd_nn_module_stack")
_MODE: Final = object()
_MAX_CONSTANT_NUMEL: Final = 4096


def dump_graphs(header: Any, modules: Sequence[GraphModule]) -> bytes:
    """``header``, any value that pickles, and graphs that may share fake tensors.

    Raises:
        UnfitGraphError: as it says.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    try:
        pickler.dump((header, [_constants(module) for module in modules]))
        for module in modules:
            pickler.add(module.graph)
    except (TypeError, AttributeError, RecursionError, RuntimeError) as error:  # of a value inside of the graphs
        raise UnfitGraphError(str(error)) from error
    return stream.getvalue()


def load_graphs(document: bytes, mode: FakeTensorMode) -> tuple[Any, list[GraphModule]]:
    """Read what `dump_graphs` wrote, over fake tensors of ``mode``.

    The bytes are trusted as code is: they name functions to call.
    """
    with _disable_current_modes():
        unpickler = _Unpickler(io.BytesIO(document), mode)
        header, constants = unpickler.load()
        return header, [uncompiled(_root(of_one), unpickler.graph()) for of_one in constants]


def _constants(module: GraphModule) -> dict[str, torch.Tensor]:
    found = {}
    for node in module.graph.find_nodes(op="get_attr"):
        value = getattr(module, str(node.target), None)
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor) or value.numel() > _MAX_CONSTANT_NUMEL:
            raise UnfitGraphError(f"{node.target} is no small tensor")
        found[str(node.target)] = value
    return found


def _root(constants: dict[str, torch.Tensor]) -> torch.nn.Module:
    root = torch.nn.Module()
    for name, value in constants.items():
        root.register_buffer(name, value)
    return root


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self._nodes: dict[Node, int] = {}
        self._storages: dict[int, tuple[int, torch.UntypedStorage]] = {}

    def add(self, graph: Graph) -> None:
        names = graph._graph_namespace
        self.dump((len(graph.nodes), sorted(names._used_names), names._base_count))
        for node in graph.nodes:
            meta = {key: _meta(key, node.meta[key]) for key in _KEYS if key in node.meta}
            self.dump((node.op, node.target, node.args, node.kwargs, node.name, meta))
            self._nodes[node] = len(self._nodes)

    def persistent_id(self, obj: Any) -> Any:
        if obj is _MODE:
            return ("mode",)
        if isinstance(obj, Node):
            return "node", self._nodes[obj]
        if isinstance(obj, torch.UntypedStorage) and obj.device.type == "meta":
            number, _ = self._storages.setdefault(obj._cdata, (len(self._storages), obj))
            return "storage", number, obj.nbytes()
        return None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.SymInt | torch.SymFloat | torch.SymBool | torch.nn.Module):
            raise UnfitGraphError(f"a {type(obj).__name__} is inside of the graph")
        if isinstance(obj, FakeTensor):
            return _fake_tensor, (_MODE, *_layout(obj))
        if isinstance(obj, OpOverload):
            return _operator, (obj.namespace, obj._opname, obj._overloadname)
        if isinstance(obj, HigherOrderOperator):
            return _higher_order, (obj.name(),)  # type: ignore[no-untyped-call]
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, mode: FakeTensorMode) -> None:
        super().__init__(stream)
        self._mode = mode
        self._nodes: list[Node] = []
        self._storages: dict[int, torch.UntypedStorage] = {}

    def graph(self) -> Graph:
        """Read the next graph."""
        graph, (num_nodes, used_names, counts) = Graph(), self.load()
        for _ in range(num_nodes):
            op, target, args, kwargs, name, meta = self.load()
            node = graph.create_node(op, target, args, kwargs, name)
            if node.name != name:
                raise ValueError(f"the node {name} has become {node.name}")
            node.meta = meta
            self._nodes.append(node)
        names = graph._graph_namespace  # later nodes get the names that they would have had
        names._used_names.update(used_names)
        names._base_count.update(counts)
        return graph

    def persistent_load(self, pid: Any) -> Any:
        kind, *facts = pid
        if kind == "mode":
            return self._mode
        if kind == "node":
            return self._nodes[facts[0]]
        number, nbytes = facts
        if number not in self._storages:
            self._storages[number] = torch.UntypedStorage(nbytes, device="meta")  # type: ignore[no-untyped-call]
        return self._storages[number]


def _meta(key: str, value: Any) -> Any:
    """A value of a node's metadata; of the classes of modules, their names."""
    if key not in _STACKS or not value:
        return value
    return {name: (path, getattr(of, "__qualname__", of)) for name, (path, of) in value.items()}


def _layout(tensor: FakeTensor) -> Iterable[Any]:
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        raise UnfitGraphError("a tensor inside of the graph is not plain")
    layout = tuple(tensor.size()), tuple(tensor.stride()), tensor.storage_offset()
    return tensor.untyped_storage(), *layout, tensor.dtype, tensor.device, tensor.requires_grad


def _fake_tensor(
    mode: FakeTensorMode,
    storage: torch.UntypedStorage,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool,
) -> FakeTensor:
    inner = torch.empty(0, dtype=dtype, device="meta").set_(storage, offset, size, stride)
    return FakeTensor(mode, inner.requires_grad_(requires_grad), device)


def _operator(namespace: str, name: str, overload: str) -> Any:
    if namespace == "prims":
        import_module("torch._inductor.inductor_prims")  # found among torch.ops once it is imported
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def _higher_order(name: str) -> Any:
    return getattr(torch.ops.higher_order, name)
