"""Inductor as chunkc uses it: graphs compiled without autograd, and single loops.

Seen on torch 2.11.0, 2.13.0 and 2.15.0. Inductor is imported at its first use.
"""

from __future__ import annotations

import ast
import copy
import ctypes
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch


def inductor_cache_folder() -> str:
    """The folder below which Inductor keeps what it compiled: TORCHINDUCTOR_CACHE_DIR or its default."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir()


def import_capture() -> None:
    """Import what a capture for Inductor imports at its first use, which takes seconds."""
    import torch._dynamo.backends.common
    import torch._inductor.decomposition
    import torch._inductor.fx_passes.joint_graph  # noqa: F401


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    from torch._inductor.decomposition import select_decomp_table

    return dict(select_decomp_table())


def inductor_joint_passes(joint: torch.fx.GraphModule) -> None:
    """Inductor's passes over a joint graph (seeded dropout, fused attention, folding), in place.

    The result follows from the graph alone, also without the device: matrix products are not padded by benchmarks.
    """
    import torch._inductor.config
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V

    fake_mode = torch._guards.detect_fake_mode([n.meta.get("val") for n in joint.graph.nodes])
    with (
        V.set_fake_mode(fake_mode),  # seeded dropout makes fake seeds
        torch._inductor.config.patch(shape_padding=False),
    ):
        joint_graph_passes(joint)


def inductor_compile(module: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[[list[Any]], Sequence[Any]]:
    """Compile a decomposed graph without autograd; the callable takes a list, which it empties.

    Outputs keep the strides of the fake tensors. Inductor's records of one graph are kept away from the next one.
    """
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.compile_fx import compile_fx_inner

    fake_mode = torch._guards.detect_fake_mode(examples) or torch._guards.detect_fake_mode(
        [n.meta.get("val") for n in module.graph.nodes]
    )

    def compile_once() -> Callable[[list[Any]], Sequence[Any]]:
        owned = copy.deepcopy(module)
        output = owned.graph.find_nodes(op="output")[0]
        visible = [i for i, n in enumerate(output.args[0]) if isinstance(n, torch.fx.Node)]
        output.meta["user_visible_output_idxs"] = visible
        with torch._guards.tracing(torch._guards.TracingContext(fake_mode)):
            return compile_fx_inner(owned, list(examples))

    num_loaded = len(PyCodeCache.modules)
    compiled: Callable[[list[Any]], Sequence[Any]] = _with_any_vectors(compile_once)
    del PyCodeCache.modules[num_loaded:]  # or Inductor keeps the generated module as long as the process lives
    return compiled


def start_kernel_workers() -> None:
    """Start the processes in which Inductor compiles Triton kernels, as its own backend of Dynamo does."""
    from torch._inductor.async_compile import maybe_warm_pool

    maybe_warm_pool()


def await_kernel_workers(timeout_s: float = 60.0) -> bool:
    """Wait until these processes take kernels, which are compiled in this one until then; whether they do."""
    from torch._inductor.async_compile import AsyncCompile, _pool_set

    compiler: Any = AsyncCompile
    with suppress(TimeoutError):
        if _pool_set:
            compiler.wait_pool_ready(timeout_s)
            return bool(compiler.use_process_pool())
    return False


def num_cache_misses() -> int:
    """Graphs so far that Inductor did not find in its cache on disk."""
    from torch._dynamo.utils import counters

    return int(counters["inductor"]["fxgraph_cache_miss"])


class LoopUnavailable(RuntimeError):
    """There is no C++ compiler, or Inductor made something else than one loop."""


def inductor_loop(
    function: Callable[..., Sequence[torch.Tensor]], examples: Sequence[torch.Tensor], *, is_parallel: bool
) -> tuple[str, str, list[tuple[str, int]]]:
    """Compile a pointwise function of 1-D CPU tensors to one C++ loop, without Dynamo.

    The loop takes any number of elements; examples as long as the first vary in length together. It is called by
    address, as Inductor's wrapper holds the GIL. An input and an output may be the same memory. With ``is_parallel`` it
    opens a parallel region with the calling thread's number of threads.

    Returns a shared library, its symbol, and the arguments in order: addresses of ("input", i) and ("output", i), and
    the number of elements as ("numel", 0), an int64. LoopUnavailable where there is no such loop.
    """
    import torch._inductor.config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        traced = make_fx(function, inductor_decompositions(), tracing_mode="symbolic")(*examples)
    for node in traced.graph.nodes:  # the rest of the metadata cannot be pickled on 2.11, and so not be cached
        node.meta = {"val": node.meta["val"]} if "val" in node.meta else {}
    graph = torch.fx.GraphModule(torch.nn.Module(), traced.graph)
    inputs = graph.graph.find_nodes(op="placeholder")
    fakes = [node.meta["val"] for node in inputs]
    context = torch._guards.TracingContext(torch._guards.detect_fake_mode(fakes))
    try:
        with torch._guards.tracing(context), torch._inductor.config.patch(_loop_settings(is_parallel)):
            compiled = _with_any_vectors(lambda: compile_fx_inner(copy.deepcopy(graph), fakes))
    except (RuntimeError, OSError) as error:
        raise LoopUnavailable(f"Inductor cannot compile here ({_first_line(error)})") from error
    return _find_loop(compiled, [node.name for node in inputs], str(fakes[0].shape[0]))


def loop_facts(*, is_parallel: bool) -> str:
    """Facts that a loop follows from beside its function: torch, processor, compiler and settings."""
    import torch._inductor.config

    settings = torch._inductor.config.save_config_portable()
    of_cpp = sorted((name, repr(value)) for name, value in settings.items() if name.startswith("cpp"))
    environ = [os.environ.get(name) for name in ("CXX", "CPPFLAGS", "CXXFLAGS", "LDFLAGS")]
    return repr((torch.__version__, _processor(), environ, of_cpp, _loop_settings(is_parallel)))


def _processor() -> str:
    """The processor in its own words; the same text on machines that are alike."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n", 1)[0].splitlines()
        return "\n".join(line for line in lines if line.startswith(("vendor_id", "model", "flags", "Features", "CPU")))
    return f"{platform.machine()} {platform.processor()} {torch.backends.cpu.get_cpu_capability()}"


def cpp_library(source: str, *flags: str) -> ctypes.CDLL:
    """Compile C++ to a shared library by Inductor's compiler and cache, or LoopUnavailable."""
    from torch._inductor.codecache import CppCodeCache

    try:
        library = _with_any_vectors(lambda: CppCodeCache.load(source, extra_flags=flags))
    except (RuntimeError, OSError) as error:
        raise LoopUnavailable(f"Inductor cannot compile here ({_first_line(error)})") from error
    return ctypes.CDLL(library._name)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _with_any_vectors(compile_once: Callable[[], Any]) -> Any:
    """Compile by the vector instructions that the processor names, else by those that Inductor tried."""
    import torch._inductor.config

    with named_vectors():
        try:
            return compile_once()
        except (RuntimeError, OSError):
            if torch._inductor.config.cpp.vec_isa_ok is not True:
                raise
            _forget_vectors()
            with torch._inductor.config.patch({"cpp.vec_isa_ok": None}):
                return compile_once()


@contextmanager
def named_vectors() -> Iterator[None]:
    """Within the block, take the vector instructions that the processor names, and forget them at its end.

    Inductor tries each kind in a process of its own, in every run: more than half of the time that a loop takes, or a
    segment from the cache. Some variants it tries all the same: so many compilations have one block around them. What
    it has tried before, or what the user has set, stays.
    """
    import torch._inductor.config
    from torch._inductor import cpu_vec_isa

    if torch._inductor.config.cpp.vec_isa_ok is not None or cpu_vec_isa.valid_vec_isa_list.cache_info().currsize:
        yield
        return
    try:
        with torch._inductor.config.patch({"cpp.vec_isa_ok": True}):
            yield
    finally:
        _forget_vectors()


def _forget_vectors() -> None:
    from torch._inductor import cpu_vec_isa

    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    for kind in {base for isa in cpu_vec_isa.supported_vec_isa_list for base in type(isa).__mro__}:
        forget = getattr(vars(kind).get("__bool__"), "cache_clear", None)
        if forget is not None:
            forget()


def _loop_settings(is_parallel: bool) -> dict[str, Any]:
    """Return Inductor's settings for a loop with each output computed from inputs and IEEE 754 rounding."""
    never = 1 << 20
    return {
        "cpp_wrapper": False,
        "cpp.dynamic_threads": is_parallel,
        "cpp.threads": -1 if is_parallel else 1,
        "cpp.enable_floating_point_contract_flag": "off",
        "cpp.enable_unsafe_math_opt_flag": False,
        "realize_reads_threshold": never,
        "realize_opcount_threshold": never,
        "realize_acc_reads_threshold": never,
    }


def _find_loop(compiled: Any, inputs: Sequence[str], numel: str) -> tuple[str, str, list[tuple[str, int]]]:
    tree = ast.parse(compiled.source_code)
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func).startswith("cpp_fused")]
    call = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "call")
    returned = next(n.value for n in reversed(call.body) if isinstance(n, ast.Return))
    outputs = [ast.unparse(n) for n in returned.elts] if isinstance(returned, ast.Tuple) else []
    known = {name: ("input", i) for i, name in enumerate(inputs)} | {numel: ("numel", 0)}
    known |= {name: ("output", i) for i, name in enumerate(outputs)}
    names = [ast.unparse(n) for c in calls for n in c.args]
    if len(calls) != 1 or not set(outputs) <= set(names) <= set(known) or len(set(outputs)) != len(outputs):
        raise LoopUnavailable(f"Inductor did not make one loop: {len(calls)} calls with {names} return {outputs}")
    binding = compiled.current_callable.__globals__[ast.unparse(calls[0].func)]
    return binding.__self__.__file__, "kernel", [known[name] for name in names]


def inductor_code(compiled: Any) -> tuple[str, dict[str, torch.Tensor]] | None:
    """The Python module that Inductor generated for a graph, and its constants by name; None without one."""
    source, constants = getattr(compiled, "source_code", None), getattr(compiled, "constants", None)
    if not isinstance(source, str) or getattr(compiled, "frozen_param_names", None):
        return None
    return source, {name: value for name, value in (constants or {}).items() if isinstance(value, torch.Tensor)}
