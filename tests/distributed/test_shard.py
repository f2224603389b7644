"""Model data divided within nodes: four ranks as two nodes of two train as one process does, and both nodes alike."""

from __future__ import annotations

import pytest
from accumulating import train_large
from job import Pool
from models import CASES
from rank_training import QUICK, Done, Work, check_semantics, train

pytestmark = pytest.mark.distributed
TWO_NODES = "2x2xemulated-64m-1g"
WISHES = {"chunk_numel": 4096}


def check(found: list[Done]) -> None:
    """Every number equals that of one process; all ranks have the same bits; and what moved is what was planned."""
    check_semantics([done.trained for done in found], train_large(CASES["odd"], QUICK, 4))
    for done in found:
        assert done.stats["comm_nbytes"] == done.stats["planned_comm_nbytes"] > 0


@pytest.mark.parametrize("hw", [None, pytest.param(TWO_NODES, marks=pytest.mark.slow)], ids=["smallest", "resident"])
def test_two_nodes_of_two_ranks_train_as_one_process(hw: str | None, four_ranks: Pool) -> None:
    check(four_ranks.run(train, Work("odd", hw=hw, wishes=WISHES, num_nodes=2)))
