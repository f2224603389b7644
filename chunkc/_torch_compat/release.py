"""Release memory of deleted models that torch would keep until the process ends.

    kept by                                  until
    Dynamo's table of backends               the process ends: `ReleasableBackend` leaves an empty one there
    code of functions, compiled frames       each other; frames end when Dynamo invalidates them
    finalizers of guarded global objects     the process ends: the guards that they hold are emptied
    fake inputs with an autograd history     each other, through C++ nodes that Python's collector cannot see
    AOTAutograd's state of random numbers    the next capture
    symbolic sizes, in caches of methods     256 others are met, for each method
    tracebacks of compilations               the thread ends; they hold the code of every frame that called
    FX's texts of graph modules              the process ends

Seen on torch 2.13.0.
"""

from __future__ import annotations

import linecache
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch._guards
import torch.fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

sources = torch.fx.graph_module._loader
"""Texts of graph modules, numbered: ``next_id`` grows with each that is compiled."""


class ReleasableBackend:
    """A torch.compile backend that lets go of its compiler, and of the code that the compiler made."""

    def __init__(self, compile_graph: Callable[..., Callable[..., Any]]) -> None:
        self._compile_graph = compile_graph
        self._fake_modes = weakref.WeakSet[FakeTensorMode]()

    def __call__(self, module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        from torch._decomp.decompositions_for_rng import PhiloxStateTracker

        mode = torch._guards.TracingContext.get().fake_mode
        if mode is not None:
            self._fake_modes.add(mode)
        try:
            return self._compile_graph(module, example_inputs)
        finally:
            with _disable_current_modes():
                PhiloxStateTracker.reset()  # type: ignore[no-untyped-call]

    def release(self) -> None:
        """Drop the compiler and all frames that were compiled by it; frames of other backends stay."""
        import torch._C._dynamo.eval_frame
        import torch._dynamo.utils
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self._compile_graph = _compile_released
        for mode in self._fake_modes:
            if mode.shape_env is not None and mode.shape_env.tracked_fakes is not None:
                mode.shape_env.tracked_fakes.clear()
        for method in vars(ShapeEnv).values():
            getattr(method, "cache_clear", lambda: None)()
        functions = {id(code): code for code in list(torch._dynamo.utils.orig_code_map.values.values())}
        for code in functions.values():
            for entry in torch._C._dynamo.eval_frame._debug_get_cache_entry_list(code):
                if getattr(entry.backend, "compiler_fn", None) is self:
                    _drop_frame(entry)


def _compile_released(module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    raise RuntimeError("the compiled model was deleted while Dynamo captured its forward")


def _drop_frame(entry: Any) -> None:
    """Invalidate a compiled frame as Dynamo does when a guarded object is gone, and empty its guards."""
    from torch._dynamo.guards import DeletedGuardManagerWrapper

    guards = entry.guard_manager
    if guards.cache_entry is not None and guards.extra_state is not None:
        deleted = DeletedGuardManagerWrapper("the backend that compiled it was released")
        guards.extra_state.invalidate(guards.cache_entry, deleted)
        vars(guards).update(vars(deleted))


@contextmanager
def compilations_forgotten() -> Iterator[None]:
    """Forget, as `forget_compilations`, what the block compiles."""
    first = sources.next_id
    try:
        yield
    finally:
        forget_compilations(first)


def forget_compilations(first: int) -> None:
    """Drop texts of graph modules from number ``first`` on, and tracebacks of this thread's compilations.

    Messages of a compilation under way show its tracebacks. Texts of other threads go as well.
    """
    from torch._dynamo.utils import get_metrics_context

    if sources.next_id > first:
        for name in [n for n in list(sources.eval_cache) if _number(n) >= first]:
            _forget_source(name)
    metrics = get_metrics_context()
    if not metrics.in_progress():
        metrics._edits.clear()


def forget_source(module: torch.fx.GraphModule) -> None:
    """Drop the text of one graph module, whose code runs as before."""
    _forget_source(type(module).forward.__code__.co_filename)


def _number(source: str) -> int:
    number = source.partition(" ")[0].rpartition(".")[2]
    return int(number) if number.isdigit() else -1


def _forget_source(name: str) -> None:
    sources.eval_cache.pop(name, None)
    linecache.cache.pop(name, None)
