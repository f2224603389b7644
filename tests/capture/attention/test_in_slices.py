"""Attention over slices: what it computes for a slice that is the whole, and what a graph must not have."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from rank_context import Sliced, sliced
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import checkpoint

from chunkc._torch_compat.collectives import ContextLine
from chunkc.capture.attention import in_slices
from chunkc.capture.attention.in_slices import AttentionOfSlices, attend_across, attention_of_slice
from chunkc.compiler.plan_ahead import capture_ahead
from chunkc.distributed.mesh import RankMesh
from chunkc.errors import CaptureError
from chunkc.scenarios.slicing import sliced_ahead

LENGTH = 7


def operands(num_heads: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 2, LENGTH, 4), (3, num_heads, LENGTH, 4), (3, num_heads, LENGTH, 4)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("mask_nbytes", [1, 3 * LENGTH, 1 << 20])
@pytest.mark.parametrize("options", [{"is_causal": True}, {"is_causal": True, "scale": 0.3}, {}])
def test_a_slice_that_is_the_whole_attends_as_ever(
    options: dict[str, object], mask_nbytes: int, line: ContextLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever number of queries have their mask at a time, without which those of three dimensions are not served."""
    monkeypatch.setattr(in_slices, "MASK_NBYTES", mask_nbytes)
    given, others = ([part.detach().flatten(0, 1).requires_grad_() for part in operands()] for _ in range(2))
    place = {"group_name": line.group_name, "size": line.size, "place": line.place}
    found = attention_of_slice(*given, **place, **options)  # type: ignore[arg-type]
    wanted = F.scaled_dot_product_attention(*others, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(found, wanted)
    found.square().sum().backward()
    wanted.square().sum().backward()
    for tensor, other in zip(given, others, strict=True):
        torch.testing.assert_close(tensor.grad, other.grad)


@pytest.mark.parametrize("is_causal", [True, False])
def test_autocast_is_that_of_attention(is_causal: bool, line: ContextLine) -> None:
    """Of operands in several dtypes, as behind positions that are multiplied in float32."""
    query, key, value = operands()
    place = {"group_name": line.group_name, "size": line.size, "place": line.place}
    with torch.autocast("cpu", torch.bfloat16):
        found = attention_of_slice(query, key, value.bfloat16(), **place, is_causal=is_causal)  # type: ignore[arg-type]
        wanted = F.scaled_dot_product_attention(query, key, value.bfloat16(), is_causal=is_causal)
    assert found.dtype is torch.bfloat16 and torch.equal(found, wanted)


def test_operator_by_operator_attention_is_that_of_slices(line: ContextLine) -> None:
    given = operands(num_heads=1)
    with AttentionOfSlices(line), torch.no_grad():
        found = F.scaled_dot_product_attention(*given, is_causal=True, enable_gqa=True)
        with pytest.raises(CaptureError, match="handed a mask"):
            F.scaled_dot_product_attention(*given, attn_mask=torch.ones(LENGTH, LENGTH))
    torch.testing.assert_close(found, F.scaled_dot_product_attention(*given, is_causal=True, enable_gqa=True))


def graph_of(function: Callable[..., torch.Tensor], *args: torch.Tensor, is_dynamic: bool = False) -> GraphModule:
    """The graph that Dynamo makes of ``function``."""
    graphs: list[GraphModule] = []

    def keep(module: GraphModule, _: object) -> Callable[..., object]:
        graphs.append(module)
        return module.forward

    torch.compile(function, backend=keep, fullgraph=True, dynamic=is_dynamic)(*args)
    return graphs[0]


def inputs_of(module: GraphModule) -> list[Node]:
    return list(module.graph.find_nodes(op="placeholder"))


def test_every_attention_of_a_graph_is_replaced(line: ContextLine) -> None:
    def twice(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        hidden = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return F.scaled_dot_product_attention(hidden, key, value)

    given = operands()
    module = graph_of(twice, *given)
    attend_across(module, line, inputs_of(module))
    targets = [node.target for node in module.graph.nodes if node.op == "call_function"]
    assert targets == [attention_of_slice] * 2
    torch.testing.assert_close(module(*given)[0], twice(*given))


def with_own_positions(x: torch.Tensor) -> torch.Tensor:
    x = x + torch.arange(x.shape[-2]).unsqueeze(1)
    return F.scaled_dot_product_attention(x, x, x, is_causal=True)


def with_longer_positions(x: torch.Tensor) -> torch.Tensor:
    x = x + torch.arange(100)[: x.shape[-2]].unsqueeze(1)
    return F.scaled_dot_product_attention(x, x, x, is_causal=True)


def with_counted_positions(x: torch.Tensor) -> torch.Tensor:
    x = x + torch.ones(x.shape[-2]).cumsum(0).unsqueeze(1)
    return F.scaled_dot_product_attention(x, x, x, is_causal=True)


def with_checkpoint(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(with_longer_positions, x, use_reentrant=False)  # type: ignore[no-any-return]


def with_scores(x: torch.Tensor) -> torch.Tensor:
    scores = (x @ x.mT).softmax(-1)
    return F.scaled_dot_product_attention(scores @ x, x, x)


def with_special_scores(x: torch.Tensor) -> torch.Tensor:
    scores = torch.special.softmax((x @ x.mT).transpose(1, 2), -1).transpose(1, 2)
    return F.scaled_dot_product_attention(scores @ x, x, x)


def with_own_operator(x: torch.Tensor) -> torch.Tensor:
    hidden = torch.ops.aten.scaled_dot_product_attention(x, x, x)
    return F.scaled_dot_product_attention(hidden, x, x)


def with_more_keys(x: torch.Tensor) -> torch.Tensor:
    keys = torch.cat([x, x[..., :1, :]], -2)
    return F.scaled_dot_product_attention(x, keys, keys)


def with_other_softmax(x: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(x.softmax(-1) + torch.arange(4), x, x)


def with_handed_in_slice(x: torch.Tensor) -> torch.Tensor:
    longer = torch.cat([x, x], -2)[..., : x.shape[-2], :]
    return F.scaled_dot_product_attention(longer, x, x)


@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize(
    ("function", "part"),
    [
        (with_own_positions, "of no tensor that is handed in"),
        (with_longer_positions, "of no tensor that is handed in"),
        (with_counted_positions, "of no tensor that is handed in"),
        (with_checkpoint, "of no tensor that is handed in"),
        (with_scores, "computes attention by softmax"),
        (with_special_scores, "computes attention by"),
        (with_own_operator, "computes attention by"),
        (with_more_keys, r"queries and keys of lengths \[7, 8\]"),
        (torch.sin, "calls no scaled_dot_product_attention"),
    ],
)
def test_what_sees_one_slice_is_refused(
    function: Callable[..., torch.Tensor], part: str, is_dynamic: bool, line: ContextLine
) -> None:
    module = graph_of(function, torch.ones(1, 2, LENGTH, 4), is_dynamic=is_dynamic)
    with pytest.raises(CaptureError, match=part):
        attend_across(module, line, inputs_of(module))


def test_a_table_that_is_cut_is_refused(line: ContextLine) -> None:
    """A parameter, too, is no slice: each rank would take its first rows."""

    def with_table(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x + table[: x.shape[-2]], x, x)

    module = graph_of(with_table, torch.ones(1, 2, LENGTH, 4), torch.ones(10, 4))
    with pytest.raises(CaptureError, match="of no tensor that is handed in"):
        attend_across(module, line, inputs_of(module)[:1])


@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("function", [with_other_softmax, with_handed_in_slice])
def test_what_follows_from_slices_is_not(
    function: Callable[..., torch.Tensor], is_dynamic: bool, line: ContextLine
) -> None:
    module = graph_of(function, torch.ones(1, 2, LENGTH, 4), is_dynamic=is_dynamic)
    attend_across(module, line, inputs_of(module))


@pytest.mark.parametrize("num_slices", [2, 4])
@pytest.mark.parametrize("name", ["gpt", "hf_qwen3", "gpt_folded", "hf_t5_even"])
def test_all_ranks_capture_the_same_schedule(name: str, num_slices: int) -> None:
    """Of heads that are grouped or not, and with masks: the ranks plan by it, each for itself."""
    work = Sliced(name)
    model, example = work.case.build(), sliced(work.case.batches()[0], num_slices, 0)
    ranks = RankMesh(1, num_slices, 1, tuple(range(num_slices)), num_context=num_slices)
    schedules = []
    for place in range(num_slices):
        with sliced_ahead(model, ranks):
            line = ContextLine("cp", num_slices, place)
            captured = capture_ahead(model, torch.bfloat16, example, "inductor", context=line)
        schedules.append(captured.schedule)
    assert all(schedule == schedules[0] for schedule in schedules)
