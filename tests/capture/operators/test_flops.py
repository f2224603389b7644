"""Floating-point operations: attention in every form against its products written out, and a whole GPT-2."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from captures import capture_once
from models import CASES
from torch import nn
from torch._prims import rng_prims
from torch.fx import Graph, Node
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from chunkc._torch_compat.core import OpOverload
from chunkc.capture.graphs import Captured
from chunkc.capture.operators.flops import operator_flops
from chunkc.capture.operators.workspace import BASE_NBYTES, workspace_nbytes
from chunkc.compiler.plan_ahead import capture_ahead
from chunkc.ir.work import Kind, work_of

aten = torch.ops.aten


class Attention(nn.Module):
    def __init__(self, *, is_causal: bool = False, masked: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.is_causal, self.masked = is_causal, masked

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril() if self.masked else None
        return F.scaled_dot_product_attention(
            query * self.scale, key * self.scale, value * self.scale, attn_mask=mask, is_causal=self.is_causal
        ).sum()


def attention_flops(captured: Captured) -> list[int]:
    operators = [op for graph in captured.schedule.graphs for op in graph.operators]
    return [op.flops for op in operators if "scaled_dot_product" in op.target]


def with_states(graph: Graph, node: Node) -> list[Node]:
    """``node`` as it runs where its random state is saved, and where that is replayed."""
    state = graph.placeholder("state")
    state.meta["val"] = torch.get_rng_state()
    saving = graph.call_function(rng_prims.run_and_save_rng_state, (node.target, *node.args), dict(node.kwargs))
    saving.meta["val"] = state.meta["val"], node.meta["val"]
    replaying = graph.call_function(rng_prims.run_with_rng_state, (state, node.target, *node.args), dict(node.kwargs))
    replaying.meta["val"] = node.meta["val"]
    return [saving, replaying]


@pytest.mark.parametrize("op", [aten._scaled_dot_product_flash_attention_for_cpu.default, aten.bmm.default])
def test_an_operator_with_a_random_state_counts_as_it_does_alone(op: OpOverload) -> None:
    shapes = [(2, 3, 8, 16)] * 3 if "attention" in str(op) else [(2, 8, 16), (2, 16, 8)]
    graph, values = Graph(), [torch.randn(shape, dtype=torch.bfloat16) for shape in shapes]
    inputs = [graph.placeholder(f"x{i}") for i in range(len(values))]
    for node, value in zip(inputs, values, strict=True):
        node.meta["val"] = value
    plain = graph.call_function(op, tuple(inputs))
    plain.meta["val"] = op(*values)
    assert operator_flops(plain) > 0 and workspace_nbytes(plain) > BASE_NBYTES
    for node in with_states(graph, plain):
        assert operator_flops(node) == operator_flops(plain)
        assert workspace_nbytes(node) == workspace_nbytes(plain)


BATCH, HEADS, WIDTH = 2, 3, 16


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(8, 8), (4, 12), (12, 4)])
def test_attention_that_is_not_causal_counts_every_pair(queries: int, keys: int, masked: bool) -> None:
    q, k = torch.randn(BATCH, HEADS, queries, WIDTH), torch.randn(BATCH, HEADS, keys, WIDTH)
    product = 2 * BATCH * HEADS * queries * keys * WIDTH
    assert attention_flops(capture_once(Attention(masked=masked), q, k, k)) == [2 * product, 5 * product]


@pytest.mark.parametrize(("queries", "keys"), [(8, 8), (4, 12), (12, 4), (1, 1)])
def test_causal_attention_counts_the_pairs_that_are_not_masked(queries: int, keys: int) -> None:
    q, k = torch.randn(BATCH, HEADS, queries, WIDTH), torch.randn(BATCH, HEADS, keys, WIDTH)
    pairs = int(torch.ones(queries, keys).tril().sum())
    product = 2 * BATCH * HEADS * pairs * WIDTH
    assert attention_flops(capture_once(Attention(is_causal=True), q, k, k)) == [2 * product, 5 * product]


def test_queries_that_share_keys_count_for_each_head_of_queries() -> None:
    """Grouped-query attention: six heads of queries over two of keys and values."""
    q, k = torch.randn(BATCH, 6, 8, WIDTH), torch.randn(BATCH, 2, 8, WIDTH)

    class Grouped(Attention):
        def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            found = F.scaled_dot_product_attention(query * self.scale, key, value, is_causal=True, enable_gqa=True)
            return found.sum()

    product = 2 * BATCH * 6 * (8 * 9 // 2) * WIDTH
    assert attention_flops(capture_once(Grouped(), q, k, k)) == [2 * product, 5 * product]


@pytest.mark.parametrize(
    "kind", ["flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu"]
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_every_fused_attention_counts_the_same(kind: str, is_causal: bool) -> None:
    """Whatever the operator's arguments are called; widths of keys and of values differ here."""
    graph = Graph()
    shapes = {"query": (2, 6, 4, 16), "key": (2, 2, 8, 16), "value": (2, 2, 8, 32)}
    given: dict[str, Any] = {name: graph.placeholder(name) for name in shapes}
    for name, shape in shapes.items():
        given[name].meta["val"] = torch.empty(shape, device="meta")
    name = f"_scaled_dot_product_{kind}"
    forward, backward = getattr(torch.ops.aten, name).default, getattr(torch.ops.aten, f"{name}_backward").default
    pairs = 2 * 6 * (1 + 2 + 3 + 4 if is_causal else 4 * 8)
    found = [
        operator_flops(graph.call_function(t, kwargs={**given, "is_causal": is_causal})) for t in (forward, backward)
    ]
    assert found == [2 * pairs * (16 + 32), 2 * pairs * (3 * 16 + 2 * 32)]


@pytest.mark.parametrize("kind", ["flash_attention", "efficient_attention", "cudnn_attention"])
def test_attention_of_gpus_counts_as_torch_counts_it_without_a_mask(kind: str) -> None:
    graph = Graph()
    shapes = {"grad_out": (2, 6, 4, 32), "query": (2, 6, 4, 16), "key": (2, 6, 8, 16), "value": (2, 6, 8, 32)}
    given: dict[str, Any] = {name: graph.placeholder(name) for name in shapes}
    for name, shape in shapes.items():
        given[name].meta["val"] = torch.empty(shape, device="meta")
    for suffix, names in (("", list(shapes)[1:]), ("_backward", list(shapes))):
        packet = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}{suffix}")
        node = graph.call_function(packet.default, tuple(given[name] for name in names))
        expected = flop_registry[packet](*(given[name].meta["val"] for name in names), out_val=None)
        assert operator_flops(node) == expected > 0


def test_convolutions_and_matrix_products_are_as_torch_counts_them() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
    x = torch.randn(2, 3, 8, 8)
    captured = capture_once(model, x)
    with FlopCounterMode(display=False) as counted:
        model(x).sum().backward()
    assert sum(op.flops for g in captured.schedule.graphs for op in g.operators) == counted.get_total_flops() > 0


def test_a_gpt2_has_the_operations_of_its_formula() -> None:
    model, batch = CASES["gpt2"].build(), CASES["gpt2"].batches()[0]
    captured = capture_ahead(model, torch.bfloat16, batch, "eager")
    samples, tokens = batch["input_ids"].shape
    config = model.config
    weights = config.n_layer * 12 * config.n_embd**2 + config.vocab_size * config.n_embd
    forward = work_of(captured.schedule.forward.operators)
    by_kind = {work.kind: work for work in forward}
    assert by_kind[Kind.MATMUL].flops == 2 * weights * samples * tokens
    every, causal = tokens**2, tokens * (tokens + 1) // 2
    pair_flops = 4 * samples * config.n_layer * config.n_embd
    assert by_kind[Kind.ATTENTION].flops in (pair_flops * every, pair_flops * causal)
    assert {work.dtype for work in forward if work.flops} == {"bfloat16"}
    backward = {work.kind: work for work in work_of(captured.schedule.backward.operators)}
    assert math.isclose(backward[Kind.MATMUL].flops, 2 * by_kind[Kind.MATMUL].flops)
    assert backward[Kind.ATTENTION].flops * 2 == by_kind[Kind.ATTENTION].flops * 5


@pytest.mark.long(but="vit")
@pytest.mark.parametrize("name", [*(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt2", "llama")), "t5", "vit"])
def test_tokens_and_samples_are_those_of_the_inputs(name: str) -> None:
    batch = CASES[name].batches()[0]
    captured = capture_ahead(CASES[name].build(), None, batch, "eager").schedule
    whole = [t for t in batch.values() if isinstance(t, torch.Tensor) and t.dtype is torch.int64 and t.dim() > 1]
    assert captured.num_tokens == max((t.numel() for t in whole), default=0)
    assert captured.num_samples == next(iter(batch.values())).shape[0]
