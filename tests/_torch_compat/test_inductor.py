"""Inductor's private names as chunkc uses them."""

from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
import torch._inductor.config
from torch._inductor import cpu_vec_isa
from torch._inductor.fx_passes import pad_mm
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from chunkc._torch_compat.inductor import (
    _forget_vectors,
    _with_any_vectors,
    inductor_compile,
    inductor_joint_passes,
    inductor_loop,
    named_vectors,
)

ODD = 50


def odd_product() -> GraphModule:
    with FakeTensorMode():
        examples = [torch.empty(64, 64, dtype=torch.bfloat16), torch.empty(64, ODD, dtype=torch.bfloat16)]
    return make_fx(torch.mm)(*examples)


def targets_after(passes: Callable[[GraphModule], object]) -> list[str]:
    graph = odd_product()
    passes(graph)
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


def test_no_benchmark_of_one_rank_decides_on_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU where the padded product was the faster one: every rank measures that by itself."""
    for name, answer in (("check_device", True), ("has_triton", True), ("_should_pad", True)):
        monkeypatch.setattr(pad_mm, name, lambda *args, answer=answer: answer)
    assert any("slice" in target for target in targets_after(joint_graph_passes)), "or the test sees no padding"
    assert targets_after(inductor_joint_passes) == ["aten.mm.default"]


def halved(x: torch.Tensor) -> list[torch.Tensor]:
    return [x * 0.5]


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    tried: list[str] = []

    def check(isa: cpu_vec_isa.VecISA, code: str) -> bool:
        tried.extend([str(isa)] if code == cpu_vec_isa.VecISA._avx_code else [])
        return True

    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", check)
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", cache(cpu_vec_isa.valid_vec_isa_list.__wrapped__))
    monkeypatch.setattr(cpu_vec_isa.VecISA, "_VecISA__bool__impl", cpu_vec_isa.VecISA._VecISA__bool__impl.__wrapped__)
    _forget_vectors()
    yield tried
    _forget_vectors()


def test_a_loop_is_compiled_without_trying_vector_instructions(probes: list[str]) -> None:
    """What is taken for granted is forgotten: the user's next compilation tries them."""
    inductor_loop(halved, [torch.ones(4096)], is_parallel=False)
    assert not probes and not cpu_vec_isa.valid_vec_isa_list.cache_info().currsize
    assert cpu_vec_isa.valid_vec_isa_list() and probes


def test_a_segment_is_compiled_without_trying_vector_instructions(probes: list[str]) -> None:
    graph = make_fx(lambda x: (x.sin() + 1,), tracing_mode="fake")(torch.ones(64))
    examples = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    compiled = inductor_compile(graph, examples)
    assert torch.equal(compiled([torch.zeros(64)])[0], torch.ones(64))
    assert not probes and not cpu_vec_isa.valid_vec_isa_list.cache_info().currsize


def test_segments_in_one_block_ask_the_processor_once(probes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked, list_once = list[str](), cpu_vec_isa.valid_vec_isa_list.__wrapped__

    def noted() -> list[cpu_vec_isa.VecISA]:
        asked.append("list")
        return list(list_once())

    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", cache(noted))
    with named_vectors():
        for size in (64, 65):
            graph = make_fx(lambda x: (x.cos() + 1,), tracing_mode="fake")(torch.ones(size))
            inductor_compile(graph, [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")])
    assert asked == ["list"] and not probes and not cpu_vec_isa.valid_vec_isa_list.cache_info().currsize


def test_vector_instructions_are_tried_where_a_compilation_fails(probes: list[str]) -> None:
    seen: list[bool | None] = []

    def compile_once() -> str:
        seen.append(torch._inductor.config.cpp.vec_isa_ok)
        cpu_vec_isa.valid_vec_isa_list()
        if len(seen) == 1:
            raise RuntimeError("the compiler does not know these instructions")
        return "compiled"

    with torch._inductor.config.patch({"cpp.vec_isa_ok": None}):
        assert _with_any_vectors(compile_once) == "compiled"
    assert seen == [True, None]


def test_what_inductor_has_tried_is_not_tried_again(probes: list[str]) -> None:
    known = cpu_vec_isa.valid_vec_isa_list()
    assert _with_any_vectors(lambda: torch._inductor.config.cpp.vec_isa_ok) is None
    assert cpu_vec_isa.valid_vec_isa_list() is known
