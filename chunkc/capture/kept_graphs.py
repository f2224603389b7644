"""Captured graphs are kept for later runs, in AOTAutograd's cache beside what Inductor compiled.

    run      AOTAutograd's cache
    first    no entry: trace, choose, partition ──► wrappers of torch, and a document with both graphs
    later    an entry                           ──► its wrappers, and both graphs on fake tensors of that run

An entry is found by AOTAutograd's key, which knows Dynamo's graph and its inputs, but no modules or source lines, and
by `capture_key`, which has what chunkc makes of them: sources of the package among it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule

from chunkc._torch_compat.collectives import is_dtensor
from chunkc._torch_compat.core import FakeTensorMode, StorageKey, dynamo_value, pytree, storage_key
from chunkc._torch_compat.graph_documents import UnfitGraphError, dump_graphs, load_graphs
from chunkc.capture.attention.kernels import KernelSupport
from chunkc.capture.partition import module_path
from chunkc.capture.saved_values import source_line
from chunkc.files.kept import VARIABLE
from chunkc.files.sources import package_digest

logger = logging.getLogger("chunkc")


@dataclass(frozen=True, slots=True)
class TracedGraphs:
    """Both graphs as they were partitioned, and what was found on the way.

    Attributes:
        num_user_outputs: leading outputs of forward that are not merely saved.
        names: indexes of parameters by placeholder, of both graphs.
        reached: outputs behind each tangent, as of `find_reached`.
        choice: why these values are saved; empty where nothing was to choose.
    """

    forward: GraphModule
    backward: GraphModule
    num_user_outputs: int
    names: Mapping[str, int]
    reached: Mapping[str, frozenset[int]]
    choice: str

    def document(self) -> bytes | None:
        """All of it as bytes; None where the graphs fit into none."""
        facts = replace(self, forward=None, backward=None)  # type: ignore[arg-type]
        try:
            return zlib.compress(dump_graphs(facts, [self.forward, self.backward]), level=1)
        except UnfitGraphError as error:
            logger.debug("captured graphs are not kept for later runs: %s", error)
            return None

    @staticmethod
    def of(document: bytes, mode: FakeTensorMode) -> TracedGraphs:
        """Read a document on fake tensors of ``mode``."""
        facts, (forward, backward) = load_graphs(zlib.decompress(document), mode)
        found: TracedGraphs = replace(facts, forward=forward, backward=backward)
        return found


def capture_key(module: GraphModule, decompositions: Iterable[Any], *facts: object) -> str | None:
    """The key of a capture of Dynamo's graph by ``decompositions`` that follows from ``facts``, too.

    None where it is not kept: of DTensors, for any sizes, with ``CHUNKC_CACHE=0`` or torch's cache off, or where it
    follows from code that neither AOTAutograd's key nor this one has: operators and decompositions of a library or a
    user.
    """
    try:
        from chunkc._torch_compat.capture_cache import is_of_torch, keeps_captures, tracing_state
    except ImportError:  # of a torch that has its cache elsewhere: graphs are captured in every run
        return None
    graphs = [part.graph for part in module.modules() if isinstance(part, GraphModule)]
    nodes = [node for graph in graphs for node in graph.nodes]
    values = (value for node in nodes for value in pytree.tree_leaves(dynamo_value(node)))
    if not keeps_captures() or os.environ.get(VARIABLE) == "0" or any(map(_is_special, values)):
        return None
    if not all(is_of_torch(node.target) for node in nodes) or not all(map(_is_known, decompositions)):
        return None
    of_nodes = [(node.name, module_path(node), source_line(node)) for node in nodes]
    kernels = KernelSupport.current()
    state = tracing_state(), {**asdict(kernels), "enabled": sorted(kernel.name for kernel in kernels.enabled)}
    everything = package_digest(), state, facts, of_nodes, _memory(module)
    return hashlib.sha256(repr(everything).encode()).hexdigest()


def _memory(module: GraphModule) -> list[tuple[int, ...]]:
    """Memory of inputs, which AOTAutograd's key leaves out.

    For each the first one over the same memory, the bytes of that, and, if others are over it, too, where it begins.
    """
    inputs = [dynamo_value(node) for node in module.graph.find_nodes(op="placeholder")]
    keys = [storage_key(value) for value in inputs]
    uses, first, found = Counter(keys), dict[StorageKey, int](), list[tuple[int, ...]]()
    for position, (value, key) in enumerate(zip(inputs, keys, strict=True)):
        if key is None:
            found.append((position,))
            continue
        offsets = (value.storage_offset(),) if uses[key] > 1 else ()
        found.append((first.setdefault(key, position), value.untyped_storage().nbytes(), *offsets))
    return found


def _is_known(decomposition: Any) -> bool:
    """Whether a function is torch's or of this package."""
    function = getattr(decomposition, "func", decomposition)
    return str(getattr(function, "__module__", "")).startswith(("torch.", "chunkc."))


def _is_special(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)
    return is_dtensor(value) or not all(isinstance(size, int) for size in value.shape)
