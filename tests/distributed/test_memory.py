"""What ranks take of their devices: no more than was planned, and not much less."""

from __future__ import annotations

import pytest
from job import Pool
from rank_memory import peaks

pytestmark = pytest.mark.distributed


@pytest.mark.slow
def test_four_ranks_take_what_was_planned(four_ranks: Pool) -> None:
    """Within 5 %, of 16 layers of 4 MiB each with activations of 2 MiB, in less than all takes."""
    for of_rank in four_ranks.run(peaks, "4xemulated-64m-1g", 16, 1024, 512, 4, timeout_s=500):
        highest = max(measured for _, _, measured in of_rank)
        for budget, planned, measured in of_rank:
            assert measured <= planned <= budget, of_rank
        assert highest >= 0.95 * planned, of_rank
