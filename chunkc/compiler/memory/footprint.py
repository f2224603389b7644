"""The footprint of a segment: when it takes and lets go of which memory, statement by statement.

Storages are numbered within the segment: its inputs first, one number each, then what it allocates. An input's storage
is released at the statement after which the segment holds no name for it; whether its bytes then come free is for the
caller to know, who may hold it too.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from chunkc._torch_compat.core import pytree
from chunkc.capture.operators.workspace import workspace_nbytes

NO_STORAGE = -1


@dataclass(frozen=True, slots=True)
class Step:
    """One statement: storages it allocates, those it releases when done, what its kernel takes meanwhile."""

    allocates: tuple[int, ...]
    releases: tuple[int, ...]
    workspace_nbytes: int


@dataclass(frozen=True, slots=True)
class Footprint:
    """See the module's text.

    Attributes:
        nbytes: of every storage that the segment allocates, numbered from ``num_inputs``.
        steps: in order; what they do not release is released when the segment returns.
        outputs: the storage behind each output, ``NO_STORAGE`` for what is no tensor.
        is_exact: whether this is how the compiled code behaves, and not an upper bound on it.
    """

    num_inputs: int
    nbytes: tuple[int, ...]
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    is_exact: bool

    def has_apart(self, positions: Collection[int], nbytes: int) -> bool:
        """Whether the outputs at ``positions``, and no others, have storages made here, of ``nbytes``."""
        own = {storage for p, storage in enumerate(self.outputs) if p in positions} - {NO_STORAGE}
        others = {storage for p, storage in enumerate(self.outputs) if p not in positions}
        is_made = own.isdisjoint(others) and all(storage >= self.num_inputs for storage in own)
        return is_made and sum(self.nbytes[storage - self.num_inputs] for storage in own) == nbytes


@dataclass(slots=True)
class Recorder:
    """Collects a footprint from names that are bound to values and let go of.

    A tensor's storage is known by identity, so every value must be kept alive until ``footprint`` is called; the
    recorder keeps them. Fake tensors have no memory. ``constants`` are alive whether the segment runs or not.
    """

    inputs: Sequence[Any]
    constants: Sequence[torch.Tensor] = ()
    _numbers: dict[int, int] = field(default_factory=dict)
    _nbytes: list[int] = field(default_factory=list)
    _uses: Counter[int] = field(default_factory=Counter)
    _steps: list[Step] = field(default_factory=list)
    _allocated: list[int] = field(default_factory=list)
    _released: list[int] = field(default_factory=list)
    _kept: list[Any] = field(default_factory=list)
    _workspace_nbytes: int = 0

    def __post_init__(self) -> None:
        self._kept += [*self.inputs, *self.constants]
        self._numbers |= {c.untyped_storage()._cdata: NO_STORAGE for c in self.constants}
        for number, value in enumerate(self.inputs):
            for tensor in tensors_in(value):
                self._numbers.setdefault(tensor.untyped_storage()._cdata, number)

    def made(self, value: Any) -> None:
        """The statement under way has ``value``: storages that were not known are allocated by it."""
        self._kept.append(value)
        for tensor in tensors_in(value):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._numbers:
                number = len(self.inputs) + len(self._nbytes)
                self._numbers[storage._cdata] = number
                self._nbytes.append(int(storage.nbytes()))
                self._allocated.append(number)

    def took(self, workspace_nbytes: int) -> None:
        """The statement under way runs a kernel with this workspace."""
        self._workspace_nbytes = max(self._workspace_nbytes, workspace_nbytes)

    def bind(self, value: Any) -> None:
        """A name now stands for ``value``."""
        self._uses.update(self.storages(value))

    def unbind(self, value: Any) -> None:
        """A name for ``value`` is gone."""
        for number in self.storages(value):
            self._uses[number] -= 1
            if not self._uses[number]:
                self._released.append(number)

    def end_statement(self) -> None:
        """Results of the statement that no name stands for are gone."""
        released = dict.fromkeys([n for n in (*self._released, *self._allocated) if not self._uses[n]])
        if self._allocated or released or self._workspace_nbytes:
            self._steps.append(Step(tuple(self._allocated), tuple(released), self._workspace_nbytes))
        self._allocated, self._released, self._workspace_nbytes = [], [], 0

    def storages(self, value: Any) -> list[int]:
        """Numbers of the storages behind ``value``, each once; none for constants."""
        numbers = dict.fromkeys(self._numbers[t.untyped_storage()._cdata] for t in tensors_in(value))
        return [n for n in numbers if n != NO_STORAGE]

    def footprint(self, outputs: Iterable[Any], *, is_exact: bool) -> Footprint:
        found = [self.storages(value) for value in outputs]
        return Footprint(
            num_inputs=len(self.inputs),
            nbytes=tuple(self._nbytes),
            steps=tuple(self._steps),
            outputs=tuple(numbers[0] if numbers else NO_STORAGE for numbers in found),
            is_exact=is_exact,
        )


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The strided tensors in a value or in lists of values."""
    return [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor) and t.layout is torch.strided]


def graph_footprint(module: GraphModule) -> Footprint:
    """The footprint of interpreting ``module`` node by node: an upper bound for code that fuses its nodes."""
    values = _own_storages(module)
    nodes = list(module.graph.nodes)
    placeholders = [n for n in nodes if n.op == "placeholder"]
    recorder = Recorder([values[n] for n in placeholders])
    last_use = {source: node for node in nodes for source in node.all_input_nodes}
    for node in nodes:
        recorder.made(values[node])
        if node.op == "output":
            break
        recorder.bind(values[node])
        if node.op == "call_function":
            recorder.took(workspace_nbytes(node))
        for source in node.all_input_nodes:
            if last_use[source] is node:
                recorder.unbind(values[source])
        if node not in last_use and node.op != "placeholder":
            recorder.unbind(values[node])
        if node.op != "placeholder":
            recorder.end_statement()
    return recorder.footprint([values[n] for n in module.graph.find_nodes(op="output")[0].args[0]], is_exact=False)


def _own_storages(module: GraphModule) -> dict[Node, list[torch.Tensor]]:
    """Make stand-ins for the tensors of all values, which share storage as these share memory."""
    made: dict[Node, list[torch.Tensor]] = {}
    for node in module.graph.nodes:
        known: dict[int, torch.Tensor] = {}
        for source in node.all_input_nodes:
            pairs = zip(_tensors_of(source), made[source], strict=True)
            known |= {raw.untyped_storage()._cdata: own for raw, own in pairs}
        made[node] = []
        for tensor in _tensors_of(node):
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                known[storage._cdata] = torch.empty(int(storage.nbytes()), dtype=torch.uint8, device="meta")
            made[node].append(known[storage._cdata])
    return made


def _tensors_of(node: Node) -> list[torch.Tensor]:
    """The tensors of a node's value; of one whose value is not noted, those that are unpacked from it."""
    value = node.meta.get("val")
    if value is not None or node.op == "output":
        return tensors_in(value)
    return [t for user in node.users if user.target is operator.getitem for t in _tensors_of(user)]
