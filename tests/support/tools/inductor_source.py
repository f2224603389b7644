"""The code that Inductor generates for a segment, for the CPU or for a GPU that is not there; nothing is compiled.

Inductor asks a GPU for its properties, and Triton for its driver, before it writes code. While code is generated for
CUDA, doubles answer with those of an H100, and the tensors of the graph are fake ones on ``cuda:0``. They are not
computed again: a torch without CUDA refuses operators of Python's (``tensor[0]``, ``~tensor``) on them.
"""

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.graph import GraphLowering
from torch.fx import GraphModule
from torch.fx.node import map_aggregate
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from chunkc._torch_compat.core import FakeTensorMode, pytree
from chunkc.passes.lower import LoweredSegment


class _Generated(BaseException):
    """Ends a compilation with the code that it would load."""

    def __init__(self, source: str) -> None:
        super().__init__("generated")
        self.source = source


@dataclass(frozen=True)
class _H100:
    name: str = "NVIDIA H100 80GB HBM3"
    major: int = 9
    minor: int = 0
    multi_processor_count: int = 132
    total_memory: int = 80 << 30
    regs_per_multiprocessor: int = 65536
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    warp_size: int = 32
    gcnArchName: str = ""
    L2_cache_size: int = 50 << 20
    shared_memory_per_block: int = 49152
    shared_memory_per_block_optin: int = 232448


class _Driver:
    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0


def inductor_source(segment: LoweredSegment, device_type: str = "cpu") -> tuple[str, list[Any]]:
    """The generated module of ``segment``, and its examples as fake tensors of that device."""
    examples: list[Any] = list(segment.examples)
    module = copy.deepcopy(segment.module)
    values = [n.meta.get("val") for n in module.graph.nodes]
    fake_mode = torch._guards.detect_fake_mode(examples) or torch._guards.detect_fake_mode(values) or FakeTensorMode()
    output = module.graph.find_nodes(op="output")[0]
    output.meta["user_visible_output_idxs"] = [i for i, n in enumerate(output.args[0]) if isinstance(n, torch.fx.Node)]
    with contextlib.ExitStack() as stack:
        if device_type == "cuda":
            examples = _moved(module, examples, fake_mode)
            stack.enter_context(_gpu())
        stack.enter_context(mock.patch.object(GraphLowering, "save_output_code", staticmethod(_stop)))
        stack.enter_context(config.patch(force_disable_caches=True, fx_graph_cache=False))
        stack.enter_context(torch._guards.tracing(torch._guards.TracingContext(fake_mode)))
        try:
            compile_fx_inner(module, examples)
        except _Generated as generated:
            return generated.source, examples
    raise AssertionError("Inductor compiled a segment without generating code")


def _stop(source: str) -> None:
    raise _Generated(source)


def _moved(module: GraphModule, examples: list[Any], fake_mode: Any) -> list[Any]:
    """Let ``module`` be a graph of tensors on a GPU, in place; return ``examples`` there."""
    moved: dict[int, tuple[Any, Any]] = {}

    def move(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return torch.device("cuda", 0) if isinstance(value, torch.device) else value
        if id(value) not in moved:
            with fake_mode:
                there = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda:0")
            moved[id(value)] = value, there
        return moved[id(value)][1]

    for node in module.graph.nodes:
        node.args, node.kwargs = map_aggregate(node.args, move), map_aggregate(node.kwargs, move)
        node.meta = {"val": pytree.tree_map(move, node.meta["val"])} if "val" in node.meta else {**node.meta}
    module.recompile()
    return [move(value) for value in examples]


@contextlib.contextmanager
def _gpu() -> Iterator[None]:
    """Answers of an H100 to what Inductor asks in this block."""
    import triton
    from torch._decomp import decomposition_table
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import scheduler
    from torch._inductor.fx_passes import reinplace

    answers: dict[str, Any] = {
        "get_device_properties": lambda device=None: _H100(),
        "get_device_capability": lambda device=None: (9, 0),
        "is_bf16_supported": lambda including_emulation=True: True,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
    }
    masked = torch.ops.aten._unsafe_masked_index_put_accumulate.default
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(decomposition_table, {masked: lambda x, *_: torch.empty_like(x)}))
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
            if hasattr(CudaInterface, name):
                stack.enter_context(mock.patch.object(CudaInterface, name, staticmethod(answer)))
        for name in ("get_device_properties", "current_device"):
            stack.enter_context(mock.patch.object(CudaInterface.Worker, name, staticmethod(answers[name])))
        stack.enter_context(mock.patch.object(scheduler, "has_triton", lambda *_: True))
        stack.enter_context(mock.patch.object(reinplace, "_inplace_generalized_scatter", lambda given, *_: given))
        stack.enter_context(mock.patch.object(FakeTensorProp, "propagate_dont_convert_inputs", lambda *_: None))
        stack.enter_context(mock.patch.object(type(triton.runtime.driver), "active", _Driver()))
        yield
