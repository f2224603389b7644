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
from chunkc.capture.bundles import CapturedGraph
from chunkc.capture.operators.fusion import Fusion
from chunkc.capture.partition import is_view

MARGIN = 1 / 16
"""Share of the estimated bytes of fused operators by which more are counted.

Of the most that Inductor allocates in whole graphs of thirteen models, for a GPU and for the CPU, in bf16 and fp32, the
estimate without it has 0.96 to 1.02, and of ALBERT's on the CPU 0.90: Inductor takes buffers there long before they are
read. With it all lie between 0.95 and 1.15, and so they are tested (``tests/capture/test_fusion.py``).
"""

_GRAIN_NBYTES = 16
"""Whole numbers of it are estimated, so that the margin is a whole number and of equal layers the same."""


@dataclass(frozen=True, slots=True)
class LiveBytes:
    """Bytes alive while an operator runs, those of tangents among them, and once it has run.

    ``crossing_nbytes``: more bytes alive before it if a segment begins with it (`chunkc.capture.operators.fusion`).
    """

    during_nbytes: int
    after_nbytes: int
    tangents_nbytes: int = 0
    crossing_nbytes: int = 0


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

    def __init__(
        self,
        forward: CapturedGraph,
        backward: CapturedGraph,
        user_outputs: Sequence[Node],
        *,
        fuses: bool = False,
        device_type: str = "cpu",
    ) -> None:
        """``user_outputs``: outputs of ``forward`` that the user gets. Payloads of parameters do not count.

        ``fuses``: operators are fused to kernels for ``device_type``, which keep what `Fusion` says; else each writes
        its values to memory.
        """
        self._fuses, self._device_type = fuses, device_type
        self._margin = MARGIN if fuses else 0.0
        self._aliases: dict[Hashable, Hashable] = {}
        self._discounts: dict[int, int] = defaultdict(int)
        self._crossing: dict[int, int] = defaultdict(int)
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
        self._walk(forward, 0)
        self._tangents = [n for n in backward.other_inputs() if n.name.startswith("tangents")]
        self._touch(backward.other_inputs(), self._num_forward)
        self._walk(backward, self._num_forward)
        self._touch(held, end)
        self._touch((n for n in forward.outputs() if isinstance(n, Node)), self._num_forward)

    def _storages(self, node: Node) -> Iterable[tuple[Hashable, int]]:
        found = self._renamed[node] if node in self._renamed else storages((node,))
        return [(self._aliases.get(key, key), nbytes) for key, nbytes in found]

    def _total(self, nodes: Iterable[Node]) -> int:
        return sum(dict(s for s in storages(nodes) if s[0] not in self._ignored).values())

    def _touch(self, nodes: Iterable[Node], position: int) -> None:
        for key, nbytes in (s for n in nodes for s in self._storages(n)):
            if key not in self._ignored:
                counted = -(-nbytes // _GRAIN_NBYTES) * _GRAIN_NBYTES if self._fuses else nbytes
                self._sizes[key] = max(counted, self._sizes.get(key, 0))
                self._birth.setdefault(key, position)
                self._death[key] = max(position, self._death.get(key, position))

    def _walk(self, graph: CapturedGraph, start: int) -> None:
        if self._fuses:
            return self._walk_fused(graph, start)
        for offset, bundle in enumerate(graph.bundles):
            self._touch(bundle.nodes, start + offset)
            self._touch((a for n in bundle.nodes for a in n.all_input_nodes), start + offset)
        return None

    def _walk_fused(self, graph: CapturedGraph, start: int) -> None:
        outputs = [n for n in graph.outputs() if isinstance(n, Node)]
        for node in (n for bundle in graph.bundles for n in bundle.nodes if is_view(n)):
            pairs = zip(self._storages(node), self._storages(node.all_input_nodes[0]), strict=False)
            self._aliases |= {view: base for (view, _), (base, _) in pairs if view != base}
        fusion = Fusion(graph.bundles, outputs, self._device_type)
        replaced, unmade = [], []
        made_at: dict[Node, int] = {}
        for position, bundle in enumerate(graph.bundles, start):
            access = fusion.access(bundle)
            if access.is_eager:
                position = max((made_at[n] for n in access.read if n in made_at), default=position)
            made_at |= dict.fromkeys(access.made, position)
            self._touch((*access.made, *access.read), position)
            replaced += [(position, source, result) for source, result in access.replaced]
            unmade += [(position, node) for node in access.unmade]
        ends_early = self._last_reads(graph, start)
        for position, node in unmade:
            for key, nbytes in self._storages(node):
                self._cross(position, ends_early.pop(key, position), nbytes)
        for position, source, result in replaced:
            before, after = (next(key for key, _ in self._storages(n)) for n in (source, result))
            if before != after and self._death[before] == position == self._birth[after]:
                self._discounts[position] += self._sizes[after]
                self._cross(self._birth[before], position, self._sizes[after])
                ends_early.pop(before, None)
        stay = {key for n in (*graph.other_inputs(), *outputs) for key, _ in self._storages(n)}
        for key, last in ends_early.items():
            if key not in stay and key in self._death:
                self._cross(last, self._death[key], -self._sizes[key])

    def _last_reads(self, graph: CapturedGraph, start: int) -> dict[Hashable, int]:
        """Positions at which operators by themselves would last read each storage."""
        last: dict[Hashable, int] = {}
        for position, bundle in enumerate(graph.bundles, start):
            for node in (a for n in bundle.nodes for a in n.all_input_nodes):
                last |= {key: position for key, _ in self._storages(node)}
        return last

    def _cross(self, after: int, until: int, nbytes: int) -> None:
        """``nbytes`` more are alive at cuts behind operator ``after``, up to the one in front of ``until``."""
        self._crossing[after + 1] += nbytes
        self._crossing[max(after, until) + 1] -= nbytes

    def live_bytes(self) -> list[LiveBytes]:
        births: dict[int, int] = defaultdict(int)
        deaths: dict[int, int] = defaultdict(int)
        tangents = [(key, _elements_nbytes(node)) for node in self._tangents for key, _ in self._storages(node)]
        for key, nbytes in self._sizes.items():
            births[self._birth[key]] += nbytes
            deaths[self._death[key]] += nbytes
        live: list[LiveBytes] = []
        alive, crossing = births[-1], 0
        for position in range(self._num_operators):
            alive += births[position] - self._discounts[position]
            crossing += self._crossing[position]
            extra = self._previous_output_nbytes if position < self._num_forward else 0
            is_backward = position >= self._num_forward
            given = sum(n for key, n in tangents if is_backward and self._death.get(key, -1) >= position)
            after = alive + extra - deaths[position] + self._discounts[position]
            during, after = (n + int(self._margin * n) for n in (alive + extra, after))
            live.append(LiveBytes(during, after, given, max(0, crossing)))
            alive -= deaths[position] - self._discounts[position]
        return live
