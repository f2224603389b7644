"""Memory tiers of one rank, declared once, the fastest first: its device's memory, then the host's.

By tier go the homes of chunks (`Layout`), budgets (`Memory`, and `Target` of the passes) and rates of copies
(`CostRates`).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from chunkc.ir.actions import Stream


class Tier(StrEnum):
    """A memory where payloads and optimizer states may be at home, the fastest first."""

    DEVICE = "device"
    HOST = "host"

    @property
    def is_fastest(self) -> bool:
        """Whether operators run on data of this tier, so that what is at home there never moves."""
        return self is Tier.DEVICE


SLOWER_TIERS: Final = tuple(tier for tier in Tier if not tier.is_fastest)

COPIED_TIERS: Final[Mapping[Stream, tuple[Tier, Tier]]] = {
    Stream.H2D: (Tier.HOST, Tier.DEVICE),
    Stream.D2H: (Tier.DEVICE, Tier.HOST),
}
"""Of each stream of copies the tier that it reads and the adjacent one that it writes."""
