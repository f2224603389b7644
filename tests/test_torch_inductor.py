"""Inductor's private names as chunkc uses them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._inductor.fx_passes import pad_mm
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from chunkc._torch_inductor import inductor_joint_passes

ODD = 50


def odd_product() -> GraphModule:
    """A product in bfloat16 whose width is no multiple of 8."""
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
