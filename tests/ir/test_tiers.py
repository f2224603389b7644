"""The list of tiers, fastest first, and the streams that copy between neighbours."""

from __future__ import annotations

from itertools import pairwise

from chunkc.ir.tiers import COPIED_TIERS, Tier


def test_a_stream_copies_between_every_two_neighbours_in_each_direction() -> None:
    towards_slower = set(pairwise(Tier))
    assert set(COPIED_TIERS.values()) == towards_slower | {(slow, fast) for fast, slow in towards_slower}
    assert [tier.is_fastest for tier in Tier] == [True] + [False] * (len(Tier) - 1)
