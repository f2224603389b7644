"""Values that the forward makes and backward reads: their makers, bytes and readers.

Views share a storage, which belongs to the operator that made it; who reads a view reads the storage. Inputs and
parameters are nobody's saved values.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable
from pathlib import PurePath
from typing import NamedTuple

from torch.fx import Node

from chunkc.capture.bundles import CapturedGraph
from chunkc.capture.liveness import backward_storages, storages

_FRAME = re.compile(r'File "(.+?)", line (\d+), in ')
_TORCH = re.compile(r"[/\\]torch[/\\]")


class Saved(NamedTuple):
    """Bytes of one forward operator's results that backward reads, and its first and last reader."""

    nbytes: int
    read_by: tuple[int, int]


def find_saved(forward: CapturedGraph, backward: CapturedGraph) -> dict[int, Saved]:
    """Saved values by the position of the forward operator that makes them."""
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
    return {
        position: Saved(sum(sizes[position].values()), (min(read_by[position]), max(read_by[position])))
        for position in sizes
    }


def source_line(node: Node) -> str:
    """Innermost line outside of torch that called the operator, ``model.py:31``; empty where unknown."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    outside = [(file, line) for file, line in frames if not _TORCH.search(file)]
    return f"{PurePath(outside[-1][0]).name}:{outside[-1][1]}" if outside else ""
