"""Borders of pieces: none for small temporaries, aligned, never more than the largest number of them."""

import pytest

from chunkc.capture.rewrites import PieceSize

SIZE = PieceSize(nbytes=100, min_num=4, max_num=8)


@pytest.mark.parametrize(
    ("length", "element_nbytes", "multiple", "cuts"),
    [
        (30, 10, 1, (0, 30)),
        (31, 10, 1, (0, 8, 16, 24, 31)),
        (40, 10, 1, (0, 10, 20, 30, 40)),
        (1000, 10, 1, (0, 125, 250, 375, 500, 625, 750, 875, 1000)),
        (40, 10, 16, (0, 16, 32, 40)),
        (40, 10, 64, (0, 40)),
        (2, 1000, 1, (0, 1, 2)),
    ],
)
def test_cuts(length: int, element_nbytes: int, multiple: int, cuts: tuple[int, ...]) -> None:
    assert SIZE.cuts(length, element_nbytes, multiple) == cuts
