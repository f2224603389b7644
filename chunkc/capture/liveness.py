"""Non-model bytes over one iteration: the storages that are alive while each operator runs.

Storages count once, whatever views they have, by the fake tensors of the graphs. Both graphs are one timeline: saved
activations live until their last use in backward, what the user holds (inputs, buffers, outputs) throughout, and the
outputs of the iteration before until forward ends. A final gradient counts with the operator that makes it.

A value that backward computes again has the fake tensor that it had in forward, but memory of its own: it is in the
storage of an input of its operator, if it has the same, and otherwise in a new one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from chunkc._torch_compat.core import pytree
from chunkc.capture.bundles import Bundle, CapturedGraph


@dataclass(frozen=True, slots=True)
class LiveBytes:
    """Bytes alive while an operator runs, those of tangents among them, and once it has run."""

    during_nbytes: int
    after_nbytes: int
    tangents_nbytes: int = 0


def storages(nodes: Iterable[Node]) -> Iterator[tuple[int, int]]:
    """(identity, bytes) of every storage behind the values of ``nodes``."""
    for node in nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                storage = value.untyped_storage()
                yield storage._cdata, int(storage.nbytes())


def backward_storages(backward: CapturedGraph) -> Mapping[Node, Sequence[tuple[Hashable, int]]]:
    """Storages of all values that backward computes; those of its inputs keep their identity."""
    storages_of: dict[Node, list[tuple[Hashable, int]]] = {}
    for node in (n for bundle in backward.bundles for n in bundle.nodes):
        aliased: dict[int, Hashable] = {}
        for source in node.all_input_nodes:
            raw = list(storages((source,)))
            named = storages_of.get(source, raw)
            aliased |= {identity: key for (identity, _), (key, _) in zip(raw, named, strict=True)}
        storages_of[node] = [(aliased.get(key, (node.name, key)), nbytes) for key, nbytes in storages((node,))]
    return storages_of


def _elements_nbytes(node: Node) -> int:
    """Bytes of the floating-point elements of a value, whatever its storage holds beside them."""
    tensors = (v for v in pytree.tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor))
    return sum(int(v.numel()) * v.element_size() for v in tensors if v.is_floating_point())


class Timeline:
    """Births and deaths of storages over forward and backward; positions count operators of both graphs."""

    def __init__(self, forward: CapturedGraph, backward: CapturedGraph, user_outputs: Sequence[Node]) -> None:
        """``user_outputs``: outputs of ``forward`` that the user gets. Payloads of parameters do not count."""
        inputs = forward.other_inputs()
        self._sizes: dict[Hashable, int] = {}
        self._birth: dict[Hashable, int] = {}
        self._death: dict[Hashable, int] = {}
        self._ignored = {key for key, _ in storages((*forward.param_inputs(), *backward.param_inputs()))}
        self._renamed = backward_storages(backward)
        self._num_forward = len(forward.bundles)
        self._num_operators = end = self._num_forward + len(backward.bundles)
        held = (*inputs, *user_outputs)
        self.held_nbytes = self._total(held)
        self._previous_output_nbytes = self._total(user_outputs) - self._total(set(user_outputs) & set(inputs))
        self._touch(inputs, -1)
        self._walk(forward.bundles, 0)
        self._tangents = [n for n in backward.other_inputs() if n.name.startswith("tangents")]
        self._touch(backward.other_inputs(), self._num_forward)
        self._walk(backward.bundles, self._num_forward)
        self._touch(held, end)
        self._touch((n for n in forward.outputs() if isinstance(n, Node)), self._num_forward)

    def _storages(self, node: Node) -> Iterable[tuple[Hashable, int]]:
        return self._renamed[node] if node in self._renamed else storages((node,))

    def _total(self, nodes: Iterable[Node]) -> int:
        return sum(dict(s for s in storages(nodes) if s[0] not in self._ignored).values())

    def _touch(self, nodes: Iterable[Node], position: int) -> None:
        for key, nbytes in (s for n in nodes for s in self._storages(n)):
            if key not in self._ignored:
                self._sizes[key] = max(nbytes, self._sizes.get(key, 0))
                self._birth.setdefault(key, position)
                self._death[key] = max(position, self._death.get(key, position))

    def _walk(self, bundles: Sequence[Bundle], start: int) -> None:
        for offset, bundle in enumerate(bundles):
            self._touch(bundle.nodes, start + offset)
            self._touch((a for n in bundle.nodes for a in n.all_input_nodes), start + offset)

    def live_bytes(self) -> list[LiveBytes]:
        births: dict[int, int] = defaultdict(int)
        deaths: dict[int, int] = defaultdict(int)
        tangents = [(key, _elements_nbytes(node)) for node in self._tangents for key, _ in self._storages(node)]
        for key, nbytes in self._sizes.items():
            births[self._birth[key]] += nbytes
            deaths[self._death[key]] += nbytes
        live: list[LiveBytes] = []
        alive = births[-1]
        for position in range(self._num_operators):
            alive += births[position]
            extra = self._previous_output_nbytes if position < self._num_forward else 0
            is_backward = position >= self._num_forward
            given = sum(n for key, n in tangents if is_backward and self._death.get(key, -1) >= position)
            live.append(LiveBytes(alive + extra, alive + extra - deaths[position], given))
            alive -= deaths[position]
        return live
