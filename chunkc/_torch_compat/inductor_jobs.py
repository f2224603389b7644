"""Graphs as bytes, which another process compiles by Inductor into the cache on disk.

Seen on torch 2.13.0. Inductor finds a graph there by a digest of the graph, its settings and the system: where one of
them turns out to differ between both processes, it compiles the graph again, and nothing but time is lost.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Sequence
from typing import Any, Final

import torch

from chunkc._torch_compat.inductor import inductor_compile

logger = logging.getLogger(__name__)


def num_compile_processes() -> int:
    """Processes that Inductor may compile with at a time (TORCHINDUCTOR_COMPILE_THREADS)."""
    import torch._inductor.config

    return torch._inductor.config.compile_threads or 1


_NOT_SENT: Final = (
    *(pickle.PicklingError, TypeError, ValueError, AttributeError, AssertionError, RuntimeError),
    *(LookupError, ImportError, OSError),
)
"""Raised by pickling, or a user's ``__reduce__``, of objects of C++, local functions, operators, deep graphs."""


def packed(module: torch.fx.GraphModule, examples: Sequence[Any]) -> bytes | None:
    """Return a graph of CPU tensors with Inductor's settings; None for one that cannot be sent."""
    import torch._inductor.config
    from torch.fx._graph_pickler import GraphPickler, Options

    values = [*examples, *(node.meta.get("val") for node in module.graph.nodes)]
    if any(isinstance(value, torch.Tensor) and value.device.type != "cpu" for value in values):
        return None
    try:
        graph = GraphPickler.dumps((module, tuple(examples)), Options(ops_filter=None))
        is_deterministic = torch.are_deterministic_algorithms_enabled()
        deterministic = (is_deterministic, torch.is_deterministic_algorithms_warn_only_enabled())
        return pickle.dumps((torch._inductor.config.save_config(), torch.get_num_threads(), deterministic, graph))
    except _NOT_SENT as error:
        logger.debug("a segment is compiled by this process alone: %s", error)
        return None


def compile_packed(data: bytes) -> None:
    """Compile a graph that `packed` returned, for its traces in the cache."""
    import torch._inductor.config
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx._graph_pickler import GraphPickler
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    settings, num_threads, (is_deterministic, warns_only), graph = pickle.loads(data)
    torch.set_num_threads(num_threads)
    torch.use_deterministic_algorithms(is_deterministic, warn_only=warns_only)
    torch._inductor.config.load_config(settings)
    loaded: Any = GraphPickler.loads(graph, FakeTensorMode(shape_env=ShapeEnv()))
    module, examples = loaded
    inductor_compile(module, examples)
