"""A loss that reaches an output on some ranks only: gradients are means over all ranks, with zeros of the others."""

from __future__ import annotations

import pytest
import torch
from job import Pool
from rank_heads import Used, freeze_on_one, train, train_plainly

pytestmark = pytest.mark.distributed

WHOLE: Used = [[("ab", "a")], [("a", "a")], [("a", "b")], [("ab", "ab")], [("a", "a")]]
PARTS: Used = [
    [("ab", "a"), ("a", "a")],
    [("a", "a"), ("a", "a")],
    [("a", "b"), ("a", "ab")],
    [("a", "a"), ("a", "ab")],
]


@pytest.mark.parametrize(("name", "used"), [("heads", WHOLE), ("broken", WHOLE), ("heads", PARTS)])
def test_they_are_those_of_one_process(two_ranks: Pool, name: str, used: Used) -> None:
    """Every element of gradients and parameters after every step, clipped, and the step counts."""
    wanted, counts = train_plainly(name, used)
    for found, found_counts in two_ranks.run(train, name, used):
        assert found_counts == counts
        for step, (here, there) in enumerate(zip(found, wanted, strict=True)):
            assert here.keys() == there.keys(), f"step {step}"
            for key, value in there.items():
                torch.testing.assert_close(here[key], value, rtol=1e-4, atol=1e-6, msg=lambda m, k=key: f"{k}: {m}")


def test_frozen_on_one_rank_is_refused(two_ranks: Pool) -> None:
    for error in two_ranks.run(freeze_on_one):
        assert error.startswith("RankError") and "first.bias is frozen" in error
