"""What norms take on the device is within what plans state for it, however parameters are packed."""

import pytest
import torch
from torch import nn

import chunkc
from chunkc.capture.graphs import Captured
from chunkc.compiler.compiled_model import compiled_of
from chunkc.compiler.memory.decisions import NORM_TILE_NUMEL, norms_nbytes, with_decisions
from chunkc.compiler.plan_ahead import capture_ahead
from chunkc.ir.schedule import ParamInfo
from chunkc.runtime.execution.grad_norm import GradNormTable
from chunkc.triton_kernels.grad_norm import TILE_NUMEL, make_norm_tiles

SIZES = ((1,), (53,), (13, 7), (0,), (64, 1024), (1025,), (300, 700), (1,), (2, 40_000))


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(size) for size in SIZES)
        self.frozen = nn.Parameter(torch.randn(5000), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = self.frozen.sum()
        for weight in self.weights:
            total = total + weight.square().sum()
        return x * total


def taken_nbytes(chunk_size: int | str) -> tuple[int, int]:
    """Device bytes of tables, rows and working memory of one packing, and what is stated for them."""
    model = chunkc.compile(Odd(), "emulated-64m-64m", dtype=torch.float32, backend="eager", chunk_size=chunk_size)
    model(torch.ones(3)).sum().backward()
    runtime = compiled_of(model).runtime
    layout, store = runtime.layout, runtime.parameters.store
    pieces = [[(p.start, p.end, p.param) for p in store.pieces(c.index)] for c in layout.owned() if c.os_home]
    tables = [make_norm_tiles(found, "cpu") for found in pieces]
    assert sum(int((t[:, 1] - t[:, 0]).sum()) for t in tables) == sum(i.numel for i in layout.params if i.trainable)
    norm_table = GradNormTable(len(layout.chunks), torch.device("cpu"))
    rows = sum(t.numel() * t.element_size() for t in (norm_table.table, norm_table.control))
    scratch = max(8 * t.shape[0] for t in tables)
    return sum(t.numel() * t.element_size() for t in tables) + rows + scratch, norms_nbytes(layout.params)


@pytest.mark.parametrize("chunk_size", ["auto", 4096, 10_240, 32_832, 200_000])
def test_tables_are_within_what_is_stated(chunk_size: int | str) -> None:
    taken, stated = taken_nbytes(chunk_size)
    assert taken <= stated <= taken + 16 * 1024


def test_of_large_parameters_little_is_stated_beside_their_tables() -> None:
    params = [ParamInfo(f"p{i}", (), (1024, 1 << 20), (1 << 20, 1), "float16", True) for i in range(8)]
    table = sum(20 * make_norm_tiles([(0, 1 << 30, 0)], "cpu").shape[0] for _ in params)
    assert table <= norms_nbytes(params) <= table + 64 * 1024


def test_tiles_are_the_kernels() -> None:
    assert NORM_TILE_NUMEL == TILE_NUMEL


def captured() -> Captured:
    return capture_ahead(Odd().half(), None, (torch.ones(3000, dtype=torch.float16),), "eager")


class Last(nn.Module):
    """Gives a slice, whose tangent is a view of a tensor as large as the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)[:, -1]


def test_the_product_of_a_view_has_its_elements_alone() -> None:
    found = capture_ahead(Last().half(), None, (torch.ones(4, 50, 8, dtype=torch.float16),), "eager")
    assert max(op.tangents_nbytes for op in found.schedule.backward.operators) == 4 * 100 * 2


def test_norms_count_all_the_while_and_scaled_tangents_as_long_as_tangents_live() -> None:
    found = captured()
    operators = found.schedule.backward.operators
    last = max(i for i, node in enumerate(operators) if node.tangents_nbytes)
    assert [op.tangents_nbytes for op in operators] == [6000] * (last + 1) + [0] * (len(operators) - last - 1)
    assert last < len(operators) - 1, "the tangent is not needed to the end"
    assert with_decisions(found, tracks_grad_norm=False, scales=False) is found
    for tracks_grad_norm, scales in ((True, False), (False, True), (True, True)):
        beside = with_decisions(found, tracks_grad_norm=tracks_grad_norm, scales=scales)
        norms = norms_nbytes(found.schedule.params) if tracks_grad_norm else 0
        assert (beside.concurrent_nbytes, beside.scales) == (found.concurrent_nbytes + norms, scales)
        for graph, before in zip(beside.schedule.graphs, found.schedule.graphs, strict=True):
            for index, (old, new) in enumerate(zip(before.operators, graph.operators, strict=True)):
                copies = 6000 if scales and graph.kind == "backward" else 0
                during, after = (copies * (i <= last) for i in (index, index + 1))
                assert new.live_nbytes == old.live_nbytes + norms + during
                assert new.live_after_nbytes == old.live_after_nbytes + norms + after
