"""Functions by which a model says what a slice needs of whole sequences."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from chunkc._torch_compat.collectives import ContextLine
from chunkc.capture.attention.in_slices import AttentionOfSlices, attend_across
from chunkc.capture.attention.whole import attend_to_whole, relative_positions, relative_positions_of, see_whole
from chunkc.errors import CaptureError

QUERIES, KEYS = 5, 3


def operands() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 2, QUERIES, 4), (2, 2, KEYS, 4), (2, 2, KEYS, 4), (1, 2, QUERIES, KEYS)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def attend_twice(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """With a bias, then by distance."""
    hidden = attend_to_whole(query, key, value, bias, scale=0.5)
    distances = relative_positions(torch.empty(0), QUERIES, 1)
    return attend_to_whole(hidden, query, query, -distances.abs().float())


def attend_twice_plainly(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    hidden = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=0.5)
    positions = torch.arange(QUERIES)
    distances = (positions.unsqueeze(0) - positions.unsqueeze(1)).abs().float()
    return F.scaled_dot_product_attention(hidden, query, query, attn_mask=-distances)


def test_a_graph_of_a_slice_that_is_the_whole_attends_as_ever(line: ContextLine) -> None:
    """With fewer keys than queries, and gradients of the bias."""
    see_whole()

    def backend(module: torch.fx.GraphModule, _: object) -> object:
        attend_across(module, line, list(module.graph.find_nodes(op="placeholder")))
        return module

    given, others = operands(), operands()
    compiled = torch.compile(attend_twice, backend=backend, fullgraph=True)
    found, wanted = compiled(*given), attend_twice_plainly(*others)
    torch.testing.assert_close(found, wanted)
    found.square().sum().backward()
    wanted.square().sum().backward()
    for tensor, other in zip(given, others, strict=True):
        torch.testing.assert_close(tensor.grad, other.grad)


def test_operator_by_operator_the_slice_is_that_of_the_rank(line: ContextLine) -> None:
    with AttentionOfSlices(line), torch.no_grad():
        found = attend_twice(*operands())
    torch.testing.assert_close(found, attend_twice_plainly(*operands()))


def test_autocast_is_that_of_attention(line: ContextLine) -> None:
    """Also of what is added to scores."""
    with torch.autocast("cpu", torch.bfloat16), AttentionOfSlices(line):
        found = attend_to_whole(*operands())
    with torch.autocast("cpu", torch.bfloat16):
        wanted = F.scaled_dot_product_attention(*operands()[:3], attn_mask=operands()[3])
    assert found.dtype is torch.bfloat16 and torch.equal(found, wanted)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_rows_are_those_of_the_slice(place: int) -> None:
    """Less the position of the query: the first key is as far before it as it is from the beginning."""
    found = relative_positions_of(torch.empty(0), 2, 3, place=place)
    assert found.tolist() == [[key - query for key in range(6)] for query in (2 * place, 2 * place + 1)]


def test_outside_of_a_captured_forward_both_are_refused() -> None:
    with pytest.raises(CaptureError, match="call the compiled model"):
        attend_twice(*operands())
    with pytest.raises(CaptureError, match="call the compiled model"):
        relative_positions(torch.empty(0), QUERIES, 2)
