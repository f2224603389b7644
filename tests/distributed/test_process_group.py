"""The mesh of a job's ranks: coordinates, and groups of each model's own along its dimensions."""

from __future__ import annotations

from datetime import timedelta

import pytest
from job import GROUP_TIMEOUT_S, Pool
from rank_replicas import data_groups

pytestmark = pytest.mark.distributed
TIMEOUT = timedelta(seconds=GROUP_TIMEOUT_S)


def test_ranks_that_all_divide_the_model_data_have_one_dimension(two_ranks: Pool) -> None:
    for rank, models in enumerate(two_ranks.run(data_groups, 2)):
        assert models == [((0, rank), {"dp_shard": ([0, 1], TIMEOUT)})] * 2


@pytest.mark.slow
def test_nodes_with_all_of_the_model_data_are_replicas(four_ranks: Pool) -> None:
    """Two nodes of two ranks; both models have groups of their own, with the job's timeout, until they are closed."""
    for rank, models in enumerate(four_ranks.run(data_groups, 2)):
        replica, shard_rank = divmod(rank, 2)
        node, owners = [2 * replica, 2 * replica + 1], [shard_rank, shard_rank + 2]
        groups = {"dp_replicate": (owners, TIMEOUT), "dp_shard": (node, TIMEOUT)}
        assert models == [((replica, shard_rank), groups)] * 2
