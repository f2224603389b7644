"""Values that the forward makes and backward reads: their makers, bytes and readers.

Views share a storage, which belongs to the operator that made it; who reads a view reads the storage. Inputs and
parameters are nobody's saved values. A value may leave the device between forward and backward where nobody else holds
its storage: neither the user, who gets outputs, nor autograd, which gets what backward returns.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from pathlib import PurePath
from typing import NamedTuple

from torch.fx import Node

from chunkc.capture.bundles import CapturedGraph
from chunkc.capture.liveness import backward_storages, storages

_FRAME = re.compile(r'File "(.+?)", line (\d+), in ')
_TORCH = re.compile(r"[/\\]torch[/\\]")


class Saved(NamedTuple):
    """Bytes of one forward operator's results that backward reads, and its first and last reader.

    ``used_until``: the forward operator that reads them last; None where others hold their storage too. ``storages``:
    what tells their storages apart.
    """

    nbytes: int
    read_by: tuple[int, int]
    used_until: int | None
    storages: frozenset[Hashable]


class SavedNames(NamedTuple):
    """Names of all values in one saved value's storages: in forward, and inputs of backward."""

    made: tuple[str, ...]
    taken: tuple[str, ...]


def find_saved(forward: CapturedGraph, backward: CapturedGraph, given_out: Sequence[Node] = ()) -> dict[int, Saved]:
    """Saved values by the position of their operator in forward; ``given_out``: outputs of the user's."""
    given = {key for key, _ in storages((*forward.other_inputs(), *forward.param_inputs()))}
    maker: dict[Hashable, int] = {}
    for position, bundle in enumerate(forward.bundles):
        for key, _ in storages(bundle.nodes):
            if key not in given:
                maker.setdefault(key, position)
    sizes: dict[int, dict[Hashable, int]] = defaultdict(dict)
    read_by: dict[int, set[int]] = defaultdict(set)
    storages_of = backward_storages(backward)
    for position, bundle in enumerate(backward.bundles):
        for source in (source for node in bundle.nodes for source in node.all_input_nodes):
            for storage, nbytes in storages_of.get(source) or storages((source,)):
                if storage in maker:
                    sizes[maker[storage]][storage] = nbytes
                    read_by[maker[storage]].add(position)
    last_use = _last_uses(forward)
    held: set[Hashable] = {key for key, _ in storages(given_out)}
    results = [node for node in backward.outputs() if isinstance(node, Node)]
    held |= {key for node in results for key, _ in storages_of.get(node) or storages((node,))}
    saved = {}
    for position, found in sizes.items():
        used_until = max(last_use.get(key, position) for key in found)
        nbytes, readers = sum(found.values()), read_by[position]
        is_held = not nbytes or not held.isdisjoint(found)
        reach = (min(readers), max(readers))
        saved[position] = Saved(nbytes, reach, None if is_held else used_until, frozenset(found))
    return saved


def _last_uses(graph: CapturedGraph) -> dict[Hashable, int]:
    """The last operator that makes or reads each storage."""
    last: dict[Hashable, int] = {}
    for position, bundle in enumerate(graph.bundles):
        touched = (*bundle.nodes, *(source for node in bundle.nodes for source in node.all_input_nodes))
        last.update({key: position for key, _ in storages(touched)})
    return last


def names_of_saved(
    forward: CapturedGraph, backward: CapturedGraph, given_out: Sequence[Node] = ()
) -> Mapping[int, tuple[Saved, SavedNames]]:
    """Saved values with their names in both graphs, by the position of the operator that makes them."""
    saved = find_saved(forward, backward, given_out)
    maker = {key: position for position, value in saved.items() for key in value.storages}
    names: dict[int, tuple[dict[str, None], dict[str, None]]] = {position: ({}, {}) for position in saved}
    values = [node for bundle in forward.bundles for node in bundle.nodes]
    inputs = backward.module.graph.find_nodes(op="placeholder")
    for which, nodes in enumerate((values, inputs)):
        for node in nodes:
            for position in {maker[key] for key, _ in storages((node,)) if key in maker}:
                names[position][which][node.name] = None
    return {
        position: (saved[position], SavedNames(tuple(made), tuple(taken))) for position, (made, taken) in names.items()
    }


def source_line(node: Node) -> str:
    """Innermost line outside of torch that called the operator, ``model.py:31``; empty where unknown."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    outside = [(file, line) for file, line in frames if not _TORCH.search(file)]
    return f"{PurePath(outside[-1][0]).name}:{outside[-1][1]}" if outside else ""
