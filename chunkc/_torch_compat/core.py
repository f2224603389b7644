"""Private torch APIs that chunkc uses, with the versions on which they were seen to work.

Others stand in ``inductor``, ``cuda``, ``distributed`` and (those that free memory) ``release``. Seen on torch 2.11.0,
2.13.0 and 2.15.0. The rest of the package imports only from this room. What imports torch's compiler
does so when called: that takes longer than importing torch.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, TypeVar

import torch
import torch._guards
import torch.fx
from torch import nn
from torch._compile import _disable_dynamo
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.graph import _BoxedCodeGen
from torch.multiprocessing.reductions import StorageWeakRef
from torch.torch_version import TorchVersion
from torch.utils import _pytree as pytree

from chunkc._torch_compat.release import forget_compilations, forget_source, sources

StorageKey = StorageWeakRef

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T", bound=torch.Tensor)

__all__ = [
    "FakeTensorMode",
    "Finalizer",
    "OpOverload",
    "StorageKey",
    "aot_backend",
    "as_plain_subclass",
    "break_reason",
    "call_plain",
    "capture_settings",
    "compiles_here",
    "current_backward",
    "dynamo_example",
    "dynamo_value",
    "engine_runs",
    "forget_constant_floats",
    "fresh_code",
    "graph_break",
    "hidden_from_dynamo",
    "is_capturing",
    "is_compiled_node",
    "is_profiling",
    "keep_undefined",
    "mutated_inputs",
    "num_forward_outputs",
    "outlives",
    "outputs_aliasing_inputs",
    "plain_call",
    "profiler_range",
    "pytree",
    "refuses_shared_inputs",
    "refuses_shared_outputs",
    "shared_frames",
    "storage_address",
    "storage_key",
    "swap_tensors",
    "without_guards",
    "without_modes",
    "without_weight_references",
    "wrapper_tensor",
]

_numbers = itertools.count()


def is_capturing() -> bool:
    """Whether torch.compile is tracing on this thread now."""
    return torch._guards.TracingContext.try_get() is not None


def compiles_here() -> bool:
    """Whether torch.compile is on, and no function transform or dispatch mode is active on this thread."""
    import torch._dynamo

    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    return not modes and torch._C._functorch.peek_interpreter_stack() is None and not torch._dynamo.config.disable


def without_modes() -> AbstractContextManager[Any]:
    """Hide operators from dispatch modes, which cost the first call some 50 microseconds an operator."""
    return torch.utils._python_dispatch._disable_current_modes()


def engine_runs(node: Any) -> bool:
    """Whether the backward on this thread runs ``node``; not for a leaf that ``autograd.grad`` captures."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return False


def current_backward() -> int:
    """A number of the backward under way on this thread; -1 outside of one."""
    return int(torch._C._current_graph_task_id())


def is_compiled_node(node: Any) -> bool:
    """Whether a node of an autograd graph runs a backward graph of AOTAutograd."""
    return hasattr(getattr(node, "_forward_cls", None), "_aot_id")


def keep_undefined(node: Any) -> None:
    """Have a compiled backward take None, not zeros, for undefined gradients of outputs."""
    node.set_materialize_grads(False)


def outlives(storage: torch.UntypedStorage) -> Callable[[], bool]:
    """A function that says whether the memory behind tensors is still alive, without keeping it so.

    The object of a storage lives as long as its memory. `StorageWeakRef` has a finalizer in Python: what a signal
    raises there is lost, and who shows it keeps all frames of the call under way, and so what it saves for backward.
    """
    reference = weakref.ref(storage)
    return lambda: reference() is not None


def num_references(held: object) -> int:
    """References to an object, with those of the call: as many for any object asked for at this place."""
    return sys.getrefcount(held)


def num_references_of_one_name() -> int:
    """`num_references` of an object that one local name alone holds: more where Dynamo watches calls."""
    held = object()
    return num_references(held)


use_count: Callable[[torch.Tensor], int] = getattr(torch.Tensor, "_use_count", lambda _: 0)
"""How many references to a tensor there are in C++, its Python object's among them; 0 where torch does not tell."""


def storage_address(tensor: torch.Tensor) -> int:
    """Where the memory behind ``tensor`` begins; 0 where it has none or a function transform hides it."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return 0
    return int(tensor.untyped_storage().data_ptr())


def refuses_shared_inputs(error: RuntimeError) -> bool:
    """Whether AOTAutograd refuses an input that shares memory with one that is changed in place."""
    return "aliased inputs that are mutated" in str(error)


def refuses_shared_outputs(error: AssertionError) -> bool:
    """Whether AOTAutograd refuses outputs that are views of one tensor, beside tensor subclasses."""
    return "two graph outputs\nthat alias one another" in str(error)


def wrapper_tensor(cls: type, inner: torch.Tensor, requires_grad: bool) -> Any:
    """An instance of a wrapper subclass with the metadata of ``inner`` and no storage of its own."""
    layout: dict[str, Any] = {"strides": inner.stride(), "dtype": inner.dtype, "device": inner.device}
    return torch.Tensor._make_wrapper_subclass(cls, inner.shape, **layout, requires_grad=requires_grad)


def as_plain_subclass(cls: type[T], tensor: torch.Tensor, requires_grad: bool = False) -> T:
    """``tensor`` as a leaf of a subclass without dispatch of its own, as ``nn.Parameter`` is one."""
    return torch.Tensor._make_subclass(cls, tensor, requires_grad)


_LEAVES_GUARDS_OUT: Final = TorchVersion(torch.__version__) >= "2.13"


def without_guards(is_checked: Callable[[str, Any, str], bool]) -> dict[str, Any]:
    """Options of ``torch.compile`` that leave out guards of Dynamo which the caller checks by other means.

    ``is_checked``: by the guard's source, its value (None where there is none) and its kind. None are left out before
    torch 2.13: without guards inside of a tensor subclass, 2.11 does not see that it requires gradients now.
    """
    if not _LEAVES_GUARDS_OUT:
        return {}

    def keep(guards: Sequence[Any]) -> list[bool]:
        for guard in guards:  # built again now, it may find another object, as behind a property, and refuse that
            built = guard.orig_guard
            built.obj_weakref = built.guarded_class_weakref = built.guard_types = built.code_list = None
        return [not is_checked(g.name, g.value if g.has_value else None, g.guard_type) for g in guards]

    return {"guard_filter_fn": keep}


def is_profiling() -> bool:
    return bool(torch.autograd.profiler._is_profiler_enabled)


def profiler_range(name: str) -> AbstractContextManager[Any]:
    """A range of torch's profiler on its thread and autograd's, or of NVTX; next to nothing without one."""
    if not is_profiling():
        return nullcontext()
    return torch.autograd.profiler.record_function(name)


def aot_backend(**options: Any) -> Callable[..., Any]:
    from torch._dynamo.backends.common import aot_autograd

    return aot_autograd(**options)


def dynamo_example(placeholder: torch.fx.Node) -> Any:
    """The live object behind a placeholder of a Dynamo graph: for a parameter, the parameter itself."""
    grapharg = placeholder.meta.get("grapharg")
    return None if grapharg is None else grapharg.example


def dynamo_value(node: torch.fx.Node) -> Any:
    """The fake value of a node of a Dynamo graph: a tensor, a tuple of them, or None."""
    return node.meta.get("example_value")


def storage_key(value: Any) -> StorageKey | None:
    """Return the key that dense tensors over the same memory share, fake ones too; None for other values."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return StorageWeakRef(value.untyped_storage())  # type: ignore[no-untyped-call]


def graph_break(reason: str) -> Exception:
    """The exception that ends Dynamo's graph before the call under way; with ``fullgraph=True`` shown."""
    import torch._dynamo.exc

    kind = torch._dynamo.exc.Unsupported
    named: dict[str, Any] = {"gb_type": "managed parameter"} if "gb_type" in inspect.signature(kind).parameters else {}
    return kind(reason, **named)


def break_reason(module: torch.fx.GraphModule) -> str | None:
    """Why Dynamo ended this graph before its frame returned, with the source line; None where it did not."""
    ending = getattr(module, "compile_subgraph_reason", None)
    if ending is None or not ending.graph_break:
        return None
    reason = str(ending.reason).strip().splitlines()[0]
    where = [f"{f.filename}:{f.lineno} in {f.name}: {f.line}" for f in ending.user_stack[-1:]]
    return f"{reason} at {where[0]}" if where else reason


def mutated_inputs() -> tuple[int, ...]:
    """Positions of the inputs that the graph being compiled mutates. Call inside ``fw_compiler``."""
    infos = enumerate(_forward_metadata().input_info)
    return tuple(i for i, info in infos if info.mutates_data or info.mutates_metadata)


def outputs_aliasing_inputs() -> tuple[int, ...]:
    """Positions of the inputs that an output of the graph being compiled is, or is a view of."""
    names = ("alias_of_input", "is_input")
    return tuple(o.base_idx for o in _forward_metadata().output_info if o.output_type.name in names)


def _forward_metadata() -> Any:
    return torch._guards.TracingContext.get().fw_metadata


def num_forward_outputs() -> int:
    """Leading outputs of the forward graph for the user, mutated inputs included; the rest is saved."""
    return int(_forward_metadata().num_forward)


@contextmanager
def without_weight_references(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Within the block recurrent modules hold no weak references to weights, which bar swapping those."""
    recurrent = [module for module in modules if isinstance(module, nn.RNNBase)]
    for module in recurrent:
        module._flat_weight_refs = []
    try:
        yield
    finally:
        for module in recurrent:
            module._flat_weight_refs = [None if w is None else weakref.ref(w) for w in module._flat_weights]


def swap_tensors(first: torch.Tensor, second: torch.Tensor) -> None:
    """Exchange what two tensor objects are; whoever holds one of them then sees the other."""
    torch.utils.swap_tensors(first, second)  # type: ignore[no-untyped-call]


def hidden_from_dynamo(function: F) -> F:
    """Dynamo traces neither ``function`` nor anything that it calls, unless that is compiled by itself."""
    return _disable_dynamo(function, recursive=True)  # type: ignore[return-value]


class Finalizer(weakref.finalize):  # type: ignore[type-arg]
    """``weakref.finalize`` hidden from Dynamo, which compiles all that is called in frames of user code.

    Dynamo is imported when one is made, never while an object goes.
    """

    __slots__ = ()

    def __init__(self, held: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        import torch._dynamo  # noqa: F401

        super().__init__(held, function, *args, **kwargs)

    @hidden_from_dynamo
    def __call__(self, _: Any = None) -> Any:
        return super().__call__(_)


class _IgnoredFunctions(frozenset[Callable[..., Any]]):
    """Functions, whose deep copy is a list of their names.

    torch 2.11 writes a deep copy of this setting to its metrics as JSON, and logs an error where that is a set of
    functions; 2.13 and later leave the setting out.
    """

    def __deepcopy__(self, memo: object) -> list[str]:
        return sorted(f.__qualname__ for f in self)


@contextmanager
def capture_settings() -> Iterator[None]:
    """Apply Dynamo's settings for a capture.

    Logging breaks no graph, later hooks cause a new capture, and recurrent modules are captured step by step.
    """
    import torch._dynamo.utils

    levels = {"debug", "info", "warning", "warn", "error", "exception", "critical", "log"}
    names = {n for n in dir(logging.Logger) if n in levels or n.endswith("_once")}
    methods = {getattr(logging.Logger, n) for n in names} | set(torch._dynamo.config.ignore_logging_functions)
    ignored = _IgnoredFunctions(methods)
    settings = torch._dynamo.config.patch(
        ignore_logging_functions=ignored, skip_nnmodule_hook_guards=False, allow_rnn=True
    )
    first = sources.next_id
    try:
        with settings:
            yield
    finally:
        if sources.next_id > first or torch._dynamo.utils.get_metrics_context()._edits:
            forget_compilations(first)


def forget_constant_floats() -> None:
    """Have the next capture try again to make inputs of floats that Dynamo has taken for constants."""
    from torch._dynamo.symbolic_convert import TensorifyState

    TensorifyState.clear()


@contextmanager
def shared_frames() -> Iterator[None]:
    """Lift Dynamo's limits on recompiling a function, which all models of a class share, for one call."""
    import torch._dynamo

    many = 1 << 30
    breaks: dict[str, Any] = {"capture_scalar_outputs": False, "capture_dynamic_output_shape_ops": False}
    with torch._dynamo.config.patch(recompile_limit=many, accumulated_recompile_limit=many, **breaks):
        yield


def call_plain(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The module's forward with its hooks, without any compiled implementation. Dynamo inlines it."""
    return nn.Module._call_impl(model, *args, **kwargs)  # type: ignore[no-untyped-call]


def boxed_code(module: torch.fx.GraphModule) -> Callable[[list[Any]], Any]:
    """The code of ``module`` as a function of a list that it empties; values die at their last use."""
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    graph.set_codegen(_BoxedCodeGen())
    boxed = torch.fx.GraphModule(module, graph)
    forget_source(boxed)
    run: Callable[[list[Any]], Any] = boxed.forward
    return run


def fresh_code(function: Any) -> Any:
    """The same function over a code object of its own, with a name of its own.

    Dynamo keeps frames and limits per code object, and notes by file, line and name which inputs change in size.
    """
    code = function.__code__
    function.__code__ = code.replace(co_name=f"{code.co_name}_{next(_numbers)}")
    return function


def plain_call(model: nn.Module) -> Callable[..., Any]:
    """`call_plain` of ``model``, as a function with `fresh_code`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return nn.Module._call_impl(model, *args, **kwargs)  # type: ignore[no-untyped-call]

    framed: Callable[..., Any] = fresh_code(call)
    return framed
