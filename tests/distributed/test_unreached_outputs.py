"""A loss that reaches an output on some ranks only: gradients are means over all ranks, with zeros of the others."""

from __future__ import annotations

import pytest
import torch
from job import Pool
from rank_heads import Used, freeze_on_one, reach_other_graphs, train, train_plainly

pytestmark = pytest.mark.distributed

WHOLE: Used = [[("ab", "a")], [("a", "a")], [("a", "b")], [("ab", "ab")], [("a", "a")]]
PARTS: Used = [
    [("ab", "a"), ("a", "a")],
    [("a", "a"), ("a", "a")],
    [("a", "b"), ("a", "ab")],
    [("a", "a"), ("a", "ab")],
]


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.parametrize("num_steps", [0, 2], ids=["without a plan", "planned"])
def test_losses_that_reach_other_graphs_of_a_broken_forward_are_refused_by_graph(
    two_ranks: Pool, num_steps: int
) -> None:
    """Rank 0's backward has nothing to do in the second graph, whose gradients rank 1 would exchange."""
    for error in two_ranks.run(reach_other_graphs, num_steps, ("a", "ab")):
        assert "rank 0: the backward goes on with graph 1 of the 2 graphs of the forward; rank 1: " in error
        assert "with graph 2 of the 2" in error and "same graphs of a forward that breaks" in error
        assert "0 * output.sum()" in error and "pad the batches" not in error


@pytest.mark.long
def test_outputs_times_zero_make_a_loss_reach_their_graphs(two_ranks: Pool) -> None:
    assert two_ranks.run(reach_other_graphs, 2, ("aB", "ab")) == ["", ""]
