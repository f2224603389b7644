"""Other systems, modelled in the simulator of plans.

Each policy is a model of a published system at the level that its paper describes: what stands where, what moves when,
what waits for what. They get the same operators, layer by layer, and the same rates as a plan, and time goes through
the same engine. Nothing here was measured: every result says *modelled*.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from chunkc.baselines.dos import dos
from chunkc.baselines.l2l import l2l
from chunkc.baselines.machine import Machine
from chunkc.baselines.outcome import Outcome
from chunkc.baselines.patrickstar import PatrickStar
from chunkc.baselines.stretches import Course
from chunkc.baselines.zero3_offload import zero3_offload
from chunkc.baselines.zero_offload import zero_offload

__all__ = ["POLICIES", "Course", "Machine", "Outcome", "PatrickStar", "Policy"]

Policy = Callable[[Course, Machine], Outcome]

POLICIES: Final[Mapping[str, Policy]] = MappingProxyType(
    {
        "static": PatrickStar("static", traced=False, os_on_device=False),
        "patrickstar": PatrickStar(),
        "zero-offload": zero_offload,
        "zero3-offload": zero3_offload,
        "l2l": l2l,
        "dos": dos,
    }
)
"""Modelled systems by name."""
