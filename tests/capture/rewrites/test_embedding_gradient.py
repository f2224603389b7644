"""The gradient of an embedding by columns has the bits of the whole one, in every dtype and with its options."""

from typing import Any

import pytest
import torch

from chunkc._torch_compat.inductor import inductor_decompositions
from chunkc.capture.rewrites import PieceSize, rewritten_decompositions

OPERATOR = torch.ops.aten.embedding_dense_backward.default
ROWS, WIDTH = 50, 200
SIZE = PieceSize(nbytes=ROWS * 4 * 40, min_num=2)


class Counting:
    """A decomposition that counts its calls."""

    def __init__(self) -> None:
        self.whole, self.num_calls = inductor_decompositions()[OPERATOR], 0

    def __call__(self, *args: Any) -> torch.Tensor:
        self.num_calls += 1
        gradient: torch.Tensor = self.whole(*args)
        return gradient


@pytest.mark.parametrize(
    ("dtype", "num_calls"), [(torch.bfloat16, 4), (torch.float16, 4), (torch.float32, 1)], ids=["bf16", "fp16", "fp32"]
)
@pytest.mark.parametrize(("padding", "by_frequency"), [(-1, False), (3, False), (3, True)])
def test_pieces_have_the_bits_of_the_whole(
    dtype: torch.dtype, num_calls: int, padding: int, by_frequency: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(4, 30, WIDTH, generator=generator).to(dtype)
    tokens = torch.randint(0, ROWS, (4, 30), generator=generator)
    table = {OPERATOR: Counting()}
    in_pieces = rewritten_decompositions(table, SIZE)[OPERATOR]
    args = (gradient, tokens, ROWS, padding, by_frequency)
    found = in_pieces(*args)
    assert table[OPERATOR].num_calls == num_calls
    assert torch.equal(found, inductor_decompositions()[OPERATOR](*args))
    assert found.dtype is dtype


def test_a_small_table_stays_whole() -> None:
    table = {OPERATOR: Counting()}
    rewritten_decompositions(table, PieceSize())[OPERATOR](
        torch.randn(2, WIDTH).bfloat16(), torch.tensor([0, 1]), ROWS, -1, False
    )
    assert table[OPERATOR].num_calls == 1
