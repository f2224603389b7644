"""Case 16 over case 4: micro-batches of all ranks together equal one large batch."""

from __future__ import annotations

import pytest
from accumulating import train_large
from job import Pool
from models import CASES
from rank_training import QUICK, ROOMY, Work, check_semantics, train_in_micro_batches
from training import SEMANTICS

pytestmark = pytest.mark.distributed
WISHES = {"chunk_numel": 4096, "num_second_homes": 4}


@pytest.mark.parametrize("hw", [None, ROOMY], ids=["smallest", "resident"])
def test_two_micro_batches_on_each_of_two_ranks_equal_one_large_batch(hw: str | None, two_ranks: Pool) -> None:
    found = two_ranks.run(train_in_micro_batches, Work("odd", hw=hw, wishes=WISHES, accumulate=2))
    check_semantics(found, train_large(CASES["odd"], QUICK, 4))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["odd", "llama"])
def test_micro_batches_on_four_ranks_equal_one_large_batch(name: str, four_ranks: Pool) -> None:
    work = Work(name, SEMANTICS, hw=None, wishes=WISHES, accumulate=2)
    check_semantics(four_ranks.run(train_in_micro_batches, work, timeout_s=400), train_large(CASES[name], SEMANTICS, 8))
