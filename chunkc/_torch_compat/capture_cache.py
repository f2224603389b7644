"""AOTAutograd's cache on disk, for captured graphs: an entry has torch's wrappers, and a document.

AOTAutograd finds entries by Dynamo's graph, its inputs and torch's settings, and by an attribute of the graph that says
what else a capture follows from. Of what the compilers return it keeps `CapturedCode`. Where it finds an entry it calls
no compiler and no partition function: the code then hands over its document. Seen on torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol

import torch
import torch._functorch.config
import torch._inductor.config
from torch._functorch._aot_autograd.autograd_cache import (
    BypassAOTAutogradCache,
    should_use_local_autograd_cache,
)
from torch._functorch._aot_autograd.schemas import SerializableAOTDispatchCompiler
from torch._inductor.output_code import OutputCode
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.torch_version import TorchVersion

from chunkc._torch_compat.core import aot_backend

Code = Callable[[list[Any]], Sequence[Any]]
CompileGraph = Callable[[GraphModule, Sequence[Any]], Code]

_ATTRIBUTE = "chunkc_capture"


class Keeper(Protocol):
    """One capture, as the cache sees it."""

    def document(self) -> bytes | None:
        """Both graphs, once the first is compiled; None where they fit into none."""
        ...

    def restore(self, document: bytes, mode: FakeTensorMode) -> None:
        """Take the graphs from the document instead of tracing."""
        ...

    def code(self, is_backward: bool) -> Code:
        """The function that runs in place of a graph."""
        ...


_capturing: ContextVar[Keeper] = ContextVar("_capturing")


@dataclass
class CapturedCode(OutputCode):
    """Stands for one graph: in a process ``run``; on disk the document, beside forward."""

    document: bytes | None
    is_backward: bool
    run: Code | None

    def __post_init__(self) -> None:
        vars(self).update(_boxed_call=True)  # of the instance: wrappers take over what it holds

    __call__ = property(attrgetter("run"))  # a call goes through no frame of Python

    def prepare_for_serialization(self) -> None:
        self.run = None
        if self.document is None and not self.is_backward:
            raise BypassAOTAutogradCache("the captured graphs have no document")

    def post_compile(self, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        keeper, mode = _capturing.get(), torch._guards.TracingContext.get().fake_mode
        if not self.is_backward:
            if self.document is None or mode is None:
                raise BypassAOTAutogradCache("there is no document, or nothing to read it on")
            keeper.restore(self.document, mode)
        self.document, self.run = None, keeper.code(self.is_backward)

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """No kernels belong to it."""


def keeps_captures() -> bool:
    """Whether AOTAutograd keeps what it makes: by its settings, beside subclasses from torch 2.13 on."""
    is_in_use = should_use_local_autograd_cache() and not torch._functorch.config.strict_autograd_cache
    return is_in_use and TorchVersion(torch.__version__) >= "2.13"


def tracing_state() -> tuple[object, ...]:
    """Settings of the process that decide what is traced, and that AOTAutograd's own key does not have."""
    of_torch, einsum = torch._C, torch.backends.opt_einsum
    attention = of_torch._get_sdp_priority_order(), of_torch._get_math_sdp_allow_fp16_bf16_reduction()
    fast_paths = torch.backends.mha.get_fastpath_enabled(), of_torch._get_nnpack_enabled()
    contraction = einsum.is_available(), einsum.enabled, einsum.strategy
    libraries = torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled, torch.backends.quantized.engine
    overridden = sorted(name for name in torch.library._impls if name.startswith("aten/"))
    return attention, fast_paths, contraction, libraries, overridden


def is_of_torch(operator: object) -> bool:
    """Whether ``operator`` is a function, or of a namespace of torch's: not of a library or a user."""
    namespace = operator.namespace if isinstance(operator, OpOverload) else None
    if isinstance(operator, OpOverloadPacket):
        namespace = operator._qualified_op_name.partition("::")[0]
    return namespace in (None, "aten", "prim", "prims", "inductor")


def cached_aot_backend(key: str, keeper: Keeper, **options: Any) -> Callable[..., Any]:
    """`aot_backend`, which finds what an earlier run captured under the same ``key``, or keeps it.

    ``options`` are those of AOTAutograd; the forward's and backward's compilers are called together.
    """

    def kept(compile_graph: CompileGraph, is_backward: bool) -> Any:
        def compile_one(module: GraphModule, example_inputs: Sequence[Any]) -> CapturedCode:
            run = compile_graph(module, example_inputs)
            return CapturedCode(None if is_backward else keeper.document(), is_backward, run)

        return SerializableAOTDispatchCompiler(CapturedCode, compile_one)

    compilers = {"fw_compiler": kept(options["fw_compiler"], False), "bw_compiler": kept(options["bw_compiler"], True)}
    compile_with_aot = aot_backend(**{**options, **compilers})

    def compile_graph(module: GraphModule, example_inputs: Sequence[Any]) -> Any:
        setattr(module, _ATTRIBUTE, key)
        token = _capturing.set(keeper)
        settings = {"bundled_autograd_cache": True, "force_non_lazy_backward_lowering": True}
        marked = {**torch._inductor.config.unsafe_marked_cacheable_functions, **_own_functions(module, key)}
        try:
            with (
                torch._functorch.config.patch(settings),
                torch._inductor.config.patch(unsafe_marked_cacheable_functions=marked),
            ):
                return compile_with_aot(module, example_inputs)
        finally:
            _capturing.reset(token)
            delattr(module, _ATTRIBUTE)

    return compile_graph


def _own_functions(module: GraphModule, key: str) -> dict[str, str]:
    """Functions of this package that rewrites put into Dynamo's graph, which AOTAutograd does not know."""
    targets = {node.target for node in module.graph.nodes if node.op == "call_function"}
    names = [f"{target.__module__}.{target.__name__}" for target in targets if hasattr(target, "__name__")]
    return {name: key for name in names if name.startswith("chunkc.")}
