"""Plans that change between steps: ranks move to another layout together, and train as one process does."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from job import Pool
from rank_shapes import train_changing, train_plainly

pytestmark = pytest.mark.distributed
TIGHT = "2xemulated-900k-32m"


def check(pool: Pool, name: str, hw: str, steps: Sequence[Sequence[int]], *, moves: bool) -> list[int]:
    """Compare all elements on all ranks with plain PyTorch's; return how many layouts there were."""
    found = pool.run(train_changing, name, hw, steps, timeout_s=200)
    wanted = train_plainly(name, steps, pool.num_ranks)
    for values, _, moved_nbytes in found:
        assert values.keys() == wanted.keys()
        for key, value in wanted.items():
            torch.testing.assert_close(values[key], value, rtol=0, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}")
        assert (moved_nbytes > 0) == moves
    return [num_layouts for _, num_layouts, _ in found]


def test_lengths_that_grow_move_all_ranks_to_another_layout(two_ranks: Pool) -> None:
    assert check(two_ranks, "tower", TIGHT, [[4], [4], [36], [4], [36]], moves=True) == [2, 2]


@pytest.mark.long
def test_forwards_of_one_loss_are_planned_together(two_ranks: Pool) -> None:
    check(two_ranks, "tower", TIGHT, [[12, 12], [12, 12], [12, 8]], moves=True)


@pytest.mark.long
@pytest.mark.parametrize(
    ("hw", "moves"),
    [pytest.param("2xemulated-16m-64m", False, marks=pytest.mark.slow), ("2xemulated-160k-64m", True)],
)
def test_each_rank_meets_sizes_of_its_own(hw: str, moves: bool, two_ranks: Pool) -> None:
    """Data tell how many rows are picked, so ranks plan what others do not."""
    check(two_ranks, "masked", hw, [[12], [12], [14], [12]], moves=moves)


@pytest.mark.long
def test_new_lengths_are_planned_from_one_capture(two_ranks: Pool) -> None:
    check(two_ranks, "tower", "2xemulated-420k-32m", [[12], [8], [10], [7], [9], [7], [3], [12]], moves=True)


@pytest.mark.long
def test_each_rank_meets_lengths_of_its_own(two_ranks: Pool) -> None:
    """One captures for any length while the other does not, or has captured before."""
    lengths = [[12, 10], [8, 10], [10, 9], [7, 12], [9, 9], [12, 8], [6, 5]]
    check(two_ranks, "ragged", "2xemulated-16m-64m", lengths, moves=False)
