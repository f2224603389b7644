"""Plain PyTorch under torch.compile with chunkc's partition: the reference of dropout masks."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.fx import GraphModule, Interpreter

from chunkc._torch_compat.core import aot_backend, dynamo_example
from chunkc._torch_compat.inductor import inductor_compile
from chunkc.capture.backend import boxed
from chunkc.capture.partition import partition
from chunkc.compiler.segment_compiler import SegmentCompiler


def same_partition_backend(backend: Any) -> Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]:
    """A backend for torch.compile that partitions as chunkc does and interprets or compiles both graphs whole."""
    tracing = SegmentCompiler.of(backend).tracing

    def compile_graph(module: GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        run = inductor_compile(module, examples) if backend == "inductor" else Interpreter(module).boxed_run
        return boxed(run)

    def compile_model(module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        examples = [dynamo_example(n) for n in module.graph.find_nodes(op="placeholder")]
        is_param = [isinstance(e, nn.Parameter) for e in examples]

        def split(joint: GraphModule, inputs: Sequence[Any], **given: Any) -> tuple[GraphModule, GraphModule]:
            params = [n for n, p in zip(joint.graph.find_nodes(op="placeholder"), is_param, strict=False) if p]
            if tracing.prepare_joint is not None:
                tracing.prepare_joint(joint)
            return partition(joint, inputs, params, **given)

        extra = tracing.rewrites(module)
        compiled: Callable[..., Any] = aot_backend(
            fw_compiler=compile_graph, bw_compiler=compile_graph, partition_fn=split, **extra
        )(module, example_inputs)
        return compiled

    return compile_model
