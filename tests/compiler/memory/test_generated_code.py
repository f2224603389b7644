"""Reading generated code: by hand against what it must say, and compiled segments against malloc's own count."""

import ast
import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from statistics import median_low
from typing import Any

import pytest
import torch
from inductor_source import inductor_source
from torch import nn

from chunkc._torch_compat.core import FakeTensorMode
from chunkc._torch_compat.inductor import inductor_code
from chunkc.compiler.memory.footprint import Footprint, Step, graph_footprint
from chunkc.compiler.memory.inductor import NotUnderstoodError, source_footprint
from chunkc.compiler.plan_ahead import capture_ahead
from chunkc.compiler.segment_compiler import compile_inductor, footprint_of
from chunkc.ir.plan import Segment
from chunkc.passes.lower import LoweredSegment, lower
from chunkc.runtime.devices.malloc_meter import malloc_reader

KIB = 1 << 10
BASE = 64 * KIB

SOURCE = """
from torch._inductor.async_compile import AsyncCompile
async_compile = AsyncCompile()
cpp_fused_0 = async_compile.cpp_pybinding(['const float*', 'float*'], r'''
extern "C" void kernel(const float* in_ptr0, float* out_ptr0) { /* no scratch */ }
''')
cpp_fused_1 = async_compile.cpp_pybinding(['float*'], '''
    std::unique_ptr<float []> buf_local = std::make_unique<float []>(static_cast<int64_t>(1024L));
''')
class Runner:
    def call(self, args):
        in0, in1, in2 = args
        args.clear()
        assert_size_stride(in0, (64, 32), (32, 1), 'input')
        assert_size_stride_grouped((in0, in1), ((64, 32), (64, 32)), ((32, 1), (32, 1)), 'input')
        buf0 = empty_strided_cpu((64, 32), (32, 1), torch.float32)
        cpp_fused_0(in0, buf0)
        del in0
        buf1 = empty_strided_cpu((64, 64), (64, 1), torch.float32)
        # Topologically Sorted Source Nodes: [], Original ATen: []
        extern_kernels.mm(buf0, reinterpret_tensor(in1, (32, 64), (1, 32), 0), out=buf1)
        buf2 = reinterpret_tensor(buf0, (32, 64), (64, 1), 0); del buf0  # reuse
        cpp_fused_1(buf2)
        buf3 = torch.ops.aten.native_layer_norm.default(buf1, [64], None, None, 1e-05)
        buf4 = buf3[0]
        assert_size_stride(buf4, (64, 64), (64, 1), 'torch.ops.aten.native_layer_norm.default')
        del buf3
        del buf1
        return (buf2, reinterpret_tensor(buf4, (4096, ), (1, ), 0), in2, None, )
"""

EXAMPLES = [torch.empty(64, 32), torch.empty(64, 32), 7]


def test_generated_code_by_hand() -> None:
    """Reuse takes nothing, what an operator returns besides goes with the tuple, scratch buffers count per thread."""
    scratch = 1024 * 4 * torch.get_num_threads()
    assert source_footprint(SOURCE, {}, EXAMPLES) == Footprint(
        num_inputs=3,
        nbytes=(64 * 32 * 4, 64 * 64 * 4, 64 * 64 * 4, 64 * 4, 64 * 4),
        steps=(
            Step((3,), (), 0),
            Step((), (), BASE),
            Step((), (0,), 0),
            Step((4,), (), 0),
            Step((), (), BASE),
            Step((), (), BASE + scratch),
            Step((5, 6, 7), (), BASE),
            Step((), (6, 7), 0),
            Step((), (4,), 0),
        ),
        outputs=(3, 5, -1, -1),
        is_exact=True,
    )


CHANGES = {
    "an unknown function": ("cpp_fused_1(buf2)", "triton_fused_1(buf2)"),
    "a branch": ("cpp_fused_1(buf2)", "if True: cpp_fused_1(buf2)"),
    "a name deleted twice": ("del buf3\n", "del buf3\n        del buf3\n"),
    "a name used after it was deleted": ("cpp_fused_1(buf2)", "cpp_fused_1(buf0)"),
    "a kernel that allocates in a way of its own": ("/* no scratch */", "auto p = malloc(n);"),
    "scratch of an unknown type": ("make_unique<float []>", "make_unique<Thing []>"),
    "another shape than the code asserts": ("(64, 32), (32, 1), 'input'", "(64, 33), (33, 1), 'input'"),
    "other strides than the code asserts of several": ("((32, 1), (32, 1))", "((32, 1), (1, 64))"),
    "an operator that does not exist": ("native_layer_norm.default(", "native_layer_form.default("),
    "an operator with wrong arguments": ("[64], None, None, 1e-05", "[65], None, None, 1e-05"),
    "an operator that changes storages": ("native_layer_norm.default(buf1,", "set_.source_Tensor(buf1,"),
    "an operator returning what it should write": (", out=buf1)", ").bias_addmm(buf0)"),
    "nothing returned": ("return (buf2", "unused = (buf2"),
    "no function": ("def call", "def called"),
    "an expression": ("cpp_fused_1(buf2)", "buf2 + 1"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_is_not_understood_is_refused(what: str) -> None:
    before, after = CHANGES[what]
    assert before in SOURCE
    with pytest.raises(NotUnderstoodError):
        source_footprint(SOURCE.replace(before, after), {}, EXAMPLES)


CUDA_SOURCE = """
from torch._inductor.async_compile import AsyncCompile
async_compile = AsyncCompile()
triton_poi_fused_0 = async_compile.triton('triton_poi_fused_0', '''
def triton_poi_fused_0(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr): malloc
''', device_str='cuda')
class Runner:
    def call(self, args):
        in0, in1 = args
        args.clear()
        assert_size_stride(in0, (64, 32), (32, 1), 'input')
        with torch.cuda._DeviceGuard(0):
            torch.cuda.set_device(0)
            in0 = copy_if_misaligned(in0)
            buf0 = empty_strided_cuda((64, 32), (32, 1), torch.bfloat16)
            raw_stream0 = get_raw_stream(0)
            triton_poi_fused_0.run(in0, buf0, 2048, stream=raw_stream0)
            del in0
            workspace_0 = empty_strided_cuda((4096, ), (1, ), torch.uint8)
            workspace_0.zero_()
            triton_poi_fused_0.run(workspace_0, buf0, 2048, stream=raw_stream0)
            del workspace_0
            buf1 = empty_strided_cuda((64, 64), (64, 1), torch.bfloat16)
            extern_kernels.mm(buf0, reinterpret_tensor(in1, (32, 64), (1, 32), 0), out=buf1)
            del in1
            buf2 = buf0; del buf0  # reuse
            triton_poi_fused_0.run(buf1, buf2, 2048, stream=raw_stream0)
            buf3 = torch.ops.aten.full.default([4], 1, dtype=torch.float32, device=device(type='cuda', index=0))
        return (buf2, buf1, buf3, )
"""


def cuda_examples() -> list[torch.Tensor]:
    with FakeTensorMode():
        return [torch.empty(64, 32, dtype=torch.bfloat16, device="cuda") for _ in range(2)]


def test_code_for_a_gpu_by_hand() -> None:
    """Scratch memory is a buffer of the code's, products take none, and kernels are Triton's."""
    assert source_footprint(CUDA_SOURCE, {}, cuda_examples()) == Footprint(
        num_inputs=2,
        nbytes=(64 * 32 * 2, 4096, 64 * 64 * 2, 16),
        steps=(
            Step((2,), (), 0),
            Step((), (0,), 0),
            Step((3,), (), 0),
            Step((), (3,), 0),
            Step((4,), (), 0),
            Step((), (), BASE),
            Step((), (1,), 0),
            Step((5,), (), BASE),
        ),
        outputs=(2, 4, 5),
        is_exact=True,
    )


@pytest.mark.parametrize(
    "change",
    [
        ("torch.cuda._DeviceGuard(0)", "torch.cuda.stream(0)"),
        ("workspace_0.zero_()", "workspace_0.resize_(8)"),
        ("triton_poi_fused_0.run(in0", "triton_poi_fused_1.run(in0"),
        ("empty_strided_cuda((64, 64)", "empty_strided_xpu((64, 64)"),
    ],
)
def test_code_for_a_gpu_that_is_not_understood_is_refused(change: tuple[str, str]) -> None:
    assert change[0] in CUDA_SOURCE
    with pytest.raises(NotUnderstoodError):
        source_footprint(CUDA_SOURCE.replace(*change), {}, cuda_examples())


def test_constants_are_no_memory_of_a_segment() -> None:
    source = SOURCE.replace("cpp_fused_1(buf2)", "cpp_fused_0(_tensor_constant0, buf2)")
    found = source_footprint(source, {"_tensor_constant0": torch.empty(999)}, EXAMPLES)
    assert found.nbytes == source_footprint(SOURCE, {}, EXAMPLES).nbytes
    with pytest.raises(NotUnderstoodError):
        source_footprint(source, {}, EXAMPLES)


# --- compiled segments ------------------------------------------------------------------------------------------------


class Mixture(nn.Module):
    def __init__(self, *, convolves: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(512, 128)
        self.wide, self.narrow = nn.Linear(128, 512), nn.Linear(512, 128)
        self.norm = nn.LayerNorm(128)
        self.mix = nn.Conv1d(128, 128, 3, padding=1) if convolves else nn.Identity()
        self.head = nn.Linear(128, 512)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = x + nn.functional.dropout(self.narrow(nn.functional.gelu(self.wide(self.norm(x)))), 0.1)
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        heads = x.view(*ids.shape, 4, 32).transpose(1, 2)
        x = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(2)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def whole_graphs(dtype: torch.dtype, *, convolves: bool = True) -> Iterator[LoweredSegment]:
    captured = capture_ahead(Mixture(convolves=convolves), dtype, (torch.zeros(8, 128, dtype=torch.int64),), "inductor")
    for kind, graph in (("forward", captured.forward), ("backward", captured.backward)):
        whole = Segment(kind, 0, 0, len(graph.bundles), (), (), 0, 0)
        yield lower(graph.module, [b.nodes for b in graph.bundles], [whole], graph.params).segments[0]


@dataclass(slots=True)
class Probe:
    """Malloc's count around every statement of a generated ``call``."""

    compiled: Any
    read: Any
    before: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)
    highest: list[int] = field(default_factory=list)

    def function(self) -> Any:
        source, _ = inductor_code(self.compiled)
        tree = next(n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef) and n.name == "call")
        begin, end = (ast.parse(f"__{name}__()").body[0] for name in ("begin", "end"))
        last = tree.body.pop()
        tree.body = [n for statement in tree.body for n in (begin, statement, end)] + [last]
        space = {**self.compiled.current_callable.__func__.__globals__, "__begin__": self.begin, "__end__": self.end}
        exec(compile(ast.fix_missing_locations(ast.Module([tree], [])), "probed", "exec"), space)
        return space["call"]

    def begin(self) -> None:
        self.before.append(self.read())
        self.highest.append(self.before[-1])

    def end(self) -> None:
        self.after.append(self.read())

    @contextmanager
    def watching(self) -> Iterator[None]:
        done = threading.Event()

        def run() -> None:
            while not done.is_set():
                statement = len(self.after)
                if len(self.highest) > statement:
                    level = self.read()
                    if len(self.after) == statement:  # it is still the same one
                        self.highest[statement] = max(self.highest[statement], level)
                time.sleep(1e-5)  # without, the kernels' threads wait for this one

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def probed(segment: LoweredSegment, compiled: Any, times: int = 7) -> list[Probe]:
    found = []
    for _ in range(times):
        probe = Probe(compiled, malloc_reader())
        args = [torch.empty_strided(e.shape, e.stride(), dtype=e.dtype).zero_() for e in segment.examples]
        gc.collect()
        function = probe.function()
        with probe.watching():
            function(None, args)
        found.append(probe)
    return found[2:]


@pytest.mark.skipif(malloc_reader() is None, reason="no reading of malloc on this system")
@pytest.mark.parametrize(
    "dtype", (pytest.param(torch.float32, marks=pytest.mark.slow), pytest.param(torch.bfloat16, marks=pytest.mark.slow))
)
def test_compiled_segments_take_what_is_read_from_their_code(dtype: torch.dtype) -> None:
    """Every statement that takes or frees 16 KiB or more, in order; and no kernel takes more than its allowance."""
    for segment in whole_graphs(dtype):
        compiled = compile_inductor(segment)
        found = footprint_of(segment, compiled)
        assert found.is_exact
        sizes = [e.numel() * e.element_size() for e in segment.examples] + list(found.nbytes)
        planned = [(sum(sizes[n] for n in s.allocates), sum(sizes[n] for n in s.releases)) for s in found.steps]
        probes = probed(segment, compiled)
        wanted = [a - r for a, r in planned if abs(a - r) >= 16 * KIB]
        runs = [[after - before for before, after in zip(p.before, p.after, strict=True)] for p in probes]
        changes = [median_low(run[i] for run in runs) for i in range(len(runs[0]))]
        large = [c for c in changes if abs(c) >= 16 * KIB]
        assert len(large) == len(wanted) > 12
        assert all(abs(c - w) <= 4 * KIB for c, w in zip(large, wanted, strict=True)), (large, wanted)
        most = max(h - max(b, a) for p in probes for h, b, a in zip(p.highest, p.before, p.after, strict=True))
        assert most <= max(s.workspace_nbytes for s in found.steps)


@pytest.mark.long
@pytest.mark.skipif(find_spec("triton") is None, reason="code for a GPU is Triton's")
def test_code_that_is_generated_for_a_gpu_is_understood() -> None:
    """What it allocates by its text, and outputs of the sizes of the graph's, are in what is read.

    A torch without CUDA cannot look at fake CUDA tensors in a convolution of one dimension.
    """
    for segment in whole_graphs(torch.bfloat16, convolves=False):
        source, examples = inductor_source(segment, "cuda")
        found = source_footprint(source, {}, examples)
        graph = graph_footprint(segment.module)
        sizes = [e.numel() * e.element_size() for e in examples] + list(found.nbytes)
        wanted = [e.numel() * e.element_size() for e in segment.examples] + list(graph.nbytes)
        assert found.is_exact and "triton_" in source
        assert [sizes[n] for n in found.outputs] == [wanted[n] for n in graph.outputs]
        call = source[source.index("def call(") :]
        assert len(found.nbytes) >= call[: call.index("return (")].count("empty_strided_cuda(") > 5
        assert sum(found.nbytes) < sum(graph.nbytes)


def test_segments_without_generated_code_are_planned_operator_by_operator(caplog: pytest.LogCaptureFixture) -> None:
    segment = next(whole_graphs(torch.float32))
    with caplog.at_level("INFO", "chunkc"):
        found = footprint_of(segment, lambda args: args)
    assert not found.is_exact and len(found.outputs) == len(segment.outputs)
    assert "as if its operators ran one by one" in caplog.text
