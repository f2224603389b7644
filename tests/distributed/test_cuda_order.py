"""Ranks on the CUDA device: what one of them sends is behind what was written to it, on every stream."""

from __future__ import annotations

import pytest
from job import Pool
from rank_cuda import order_around_writes

pytestmark = pytest.mark.distributed


def test_exchanges_are_behind_parameters_that_were_written_between_steps(two_ranks: Pool) -> None:
    """Writes go to the compute stream and are no launches; the next program gathers at once."""
    for streams, missing in two_ranks.run(order_around_writes):
        assert {"comm", "compute"} <= streams
        assert missing == []
