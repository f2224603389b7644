"""Case 16 over case 6: an overflow on one rank is one on all, and scales stay those of torch.amp.GradScaler."""

from __future__ import annotations

import pytest
import torch
from job import Pool
from rank_scaling import Scaled, other_scales, train_plain, train_scaled

pytestmark = pytest.mark.distributed
PLACES = {"resident": "emulated-64m-1g", "moving": "emulated-640k-64m"}
TOLERANCE = 2**-7


def check(found: list[Scaled], num_ranks: int) -> None:
    """Scales, skipped steps and counts as torch's; first moments within fp16; ranks equal to the bit."""
    wanted = train_plain(num_ranks)
    assert len(set(wanted.scales)) > 2, "the scale never grew or never fell"
    for rank in found:
        assert rank.scales == wanted.scales
        assert rank.unchanged == wanted.unchanged
        assert rank.counts == wanted.counts
        assert all(torch.equal(rank.params[n], value) for n, value in found[0].params.items())
        largest = max(float(m.abs().max()) for m in wanted.exp_avg)
        for ours, plain in zip(rank.exp_avg, wanted.exp_avg, strict=True):
            torch.testing.assert_close(ours, plain, rtol=0, atol=TOLERANCE * largest)


@pytest.mark.long
@pytest.mark.parametrize(
    "by_scaler", [pytest.param(False, marks=pytest.mark.slow), True], ids=["built in", "GradScaler"]
)
@pytest.mark.parametrize("place", [pytest.param("resident", marks=pytest.mark.slow), "moving"])
def test_an_overflow_on_one_rank_is_skipped_on_all(place: str, by_scaler: bool, two_ranks: Pool) -> None:
    check(two_ranks.run(train_scaled, PLACES[place], by_scaler), 2)


@pytest.mark.long
@pytest.mark.parametrize(
    "by_scaler", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["built in", "GradScaler"]
)
@pytest.mark.parametrize("place", ["resident", pytest.param("moving", marks=pytest.mark.slow)])
def test_an_overflow_in_a_micro_batch_is_one_of_its_step(place: str, by_scaler: bool, two_ranks: Pool) -> None:
    check(two_ranks.run(train_scaled, PLACES[place], by_scaler, 2), 2)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_an_overflow_on_one_of_four_ranks_is_skipped_on_all(place: str, four_ranks: Pool) -> None:
    check(four_ranks.run(train_scaled, PLACES[place]), 4)


def test_ranks_that_scale_by_different_numbers_are_refused(two_ranks: Pool) -> None:
    """Also where one of them sets its scale later; equal ones train."""
    for apart, alike, set_apart in two_ranks.run(other_scales, PLACES["moving"]):
        assert apart is not None and apart.kind == "RankError"
        assert "'scale': 256.0" in apart.text and "'scale': 512.0" in apart.text
        assert alike is None
        assert set_apart is not None and "512.0" in set_apart.text
