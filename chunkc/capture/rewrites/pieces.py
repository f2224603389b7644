"""How large pieces of a temporary are, and where one ends and the next begins."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PieceSize:
    """Rule for cutting a temporary into pieces.

    Attributes:
        nbytes: bytes of one piece, counted in fp32, as long as ``max_num`` pieces are enough.
        min_num: a temporary of fewer pieces stays whole.
        max_num: of more than that, pieces grow: each one costs operators, and products need rows to be fast.
    """

    nbytes: int = 64 << 20
    min_num: int = 4
    max_num: int = 32

    def cuts(self, length: int, element_nbytes: int, multiple: int = 1) -> tuple[int, ...]:
        """Return ``0, ..., length``, the borders of pieces of a dimension; one piece where it stays whole.

        ``element_nbytes`` is what one of ``length`` elements takes; inner borders are multiples of ``multiple``.
        """
        num = math.ceil(length * element_nbytes / self.nbytes)
        if num < self.min_num:
            return (0, length)
        width = math.ceil(length / min(num, self.max_num))
        width = math.ceil(width / multiple) * multiple
        return (*range(0, length, width), length)
