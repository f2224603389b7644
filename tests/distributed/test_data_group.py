"""Gradients of ranks, added up in float32 where the backend would add them up in their own dtype."""

from __future__ import annotations

import pytest
import torch
from job import Pool
from rank_replicas import reduced

from chunkc.distributed.data_group import STAGING_NBYTES

pytestmark = pytest.mark.distributed
SEVERAL_PIECES = STAGING_NBYTES // 20 + 1001


def parts(found: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """What every rank contributed to each: [from, to, element]."""
    return torch.stack([before for before, _ in found]).view(len(found), len(found), -1)


@pytest.mark.long(but="1678722-torch.bfloat16-True")
@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize(
    ("numel", "dtype"), [(128, torch.float16), (100, torch.bfloat16), (SEVERAL_PIECES, torch.bfloat16)], ids=str
)
def test_contributions_in_16_bits_are_rounded_once(
    numel: int, dtype: torch.dtype, mean: bool, four_ranks: Pool
) -> None:
    """The owner has the sum in float32, in the order of ranks; what it holds for the others is as it was."""
    found = four_ranks.run(reduced, numel, dtype, True, mean)
    sent = parts(found)
    for rank, (before, after) in enumerate(found):
        wanted = sent[:, rank].sum(0, dtype=torch.float32) / (4 if mean else 1)
        assert torch.equal(after.view(4, -1)[rank], wanted.to(dtype))
        for other in range(4):
            assert other == rank or torch.equal(after.view(4, -1)[other], before.view(4, -1)[other])


def test_the_backend_alone_rounds_more_often(four_ranks: Pool) -> None:
    """So the test above would notice; in float32 itself there is nothing to choose."""
    plain = four_ranks.run(reduced, 4096, torch.bfloat16, False, True)
    wide = four_ranks.run(reduced, 4096, torch.bfloat16, True, True)
    exact = parts(plain)[:, 0].double().mean(0)
    errors = [(found[0][1][:4096].double() - exact).abs().sum() for found in (plain, wide)]
    assert errors[0] > 1.2 * errors[1]
