"""Bytes that operators move, worked out by hand, one by one and fused."""

import torch
import torch.nn.functional as F
from captures import capture_once
from torch import nn

from chunkc.capture.operators.traffic import Traffic, operator_traffic

ROWS, WIDTH = 8, 16
VALUE = ROWS * WIDTH * 4  # bytes of one activation
WEIGHT = WIDTH * WIDTH * 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.second = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = (x @ self.first).view(2, ROWS // 2, WIDTH)
        hidden = torch.sin(hidden) + torch.cos(hidden)
        return torch.relu(hidden).view(ROWS, WIDTH) @ self.second


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = (x @ self.weight).chunk(2, dim=-1)
        return torch.sin(gate) * torch.cos(gate) * value


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1000, WIDTH))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return F.embedding(rows, self.table)


def forward_traffic(model: nn.Module, x: torch.Tensor, fuses: bool) -> dict[str, Traffic]:
    captured = capture_once(model, x).forward
    found = operator_traffic(captured.bundles, fuses)
    return {bundle.main.name: traffic for bundle, traffic in zip(captured.bundles, found, strict=True)}


def test_operators_one_by_one_read_their_inputs_and_write_their_outputs() -> None:
    found = forward_traffic(Layer(), torch.randn(ROWS, WIDTH), fuses=False)
    assert [t.nbytes for name, t in found.items() if name.startswith("mm")] == [2 * VALUE + WEIGHT] * 2
    assert found["sin"] == found["cos"] == found["relu"] == Traffic(0, 2 * VALUE, 1)
    assert found["add"] == Traffic(0, 3 * VALUE, 1)


def test_views_move_nothing() -> None:
    for fuses in (False, True):
        found = forward_traffic(Layer(), torch.randn(ROWS, WIDTH), fuses)
        assert {name: t for name, t in found.items() if "view" in name} == {
            name: Traffic(0, 0, 0) for name in found if "view" in name
        }
        assert sum("view" in name for name in found) == 2


def test_a_fused_run_reads_what_comes_in_and_writes_what_goes_out() -> None:
    """The first product is needed by backward and by both branches, which are one kernel; relu's result goes out."""
    alone = forward_traffic(Layer(), torch.randn(ROWS, WIDTH), fuses=False)
    found = forward_traffic(Layer(), torch.randn(ROWS, WIDTH), fuses=True)
    between = [t for name, t in found.items() if "mm" not in name and "view" not in name]
    assert sum(t.nbytes for t in between) == 2 * VALUE
    assert sum(t.num_kernels for t in between) == 1
    assert {n: t for n, t in found.items() if "mm" in n} == {n: t for n, t in alone.items() if "mm" in n}


def test_each_part_of_a_tensor_is_read_once() -> None:
    found = forward_traffic(Gated(), torch.randn(ROWS, WIDTH), fuses=True)
    between = [t for name, t in found.items() if "mm" not in name]
    assert sum(t.nbytes for t in between) == 2 * VALUE + VALUE


def test_a_lookup_reads_the_rows_that_it_returns() -> None:
    rows = torch.zeros(4, 5, dtype=torch.long)
    for fuses in (False, True):
        (traffic,) = forward_traffic(Lookup(), rows, fuses).values()
        assert traffic.nbytes == 4 * 5 * 8 + 2 * 4 * 5 * WIDTH * 4


def test_fusing_moves_no_more_and_computes_the_same() -> None:
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    captured = capture_once(nn.Sequential(Layer(), nn.LayerNorm(WIDTH), nn.GELU(), Layer()), x)
    for graph in (captured.forward, captured.backward):
        alone, fused = (operator_traffic(graph.bundles, fuses) for fuses in (False, True))
        assert [t.flops for t in alone] == [t.flops for t in fused]
        assert sum(t.nbytes for t in fused) < sum(t.nbytes for t in alone)
        assert sum(t.num_kernels for t in fused) < sum(t.num_kernels for t in alone)
