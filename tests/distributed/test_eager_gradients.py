"""Gradients from outside of the compiled graph are means over ranks, too, and clipped by the norm of these."""

from __future__ import annotations

import pytest
import torch
from job import Pool
from rank_eager import train, train_plainly

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("assigned", [False, True])
def test_they_are_those_of_one_process(two_ranks: Pool, assigned: bool) -> None:
    """Each rank's own losses, or gradients assigned by hand, at a norm that clips."""
    wanted = train_plainly(4, 0.3, assigned, 2)
    for found in two_ranks.run(train, 4, 0.3, assigned):
        for here, there in zip(found, wanted, strict=True):
            assert here.keys() == there.keys()
            for name, value in there.items():
                assert torch.allclose(here[name], value, rtol=1e-5, atol=1e-6), name
