"""Times of a plan: rates of a machine, the time of an action, and a simulated steady iteration."""

from __future__ import annotations

from chunkc.cost.simulate import simulate, simulate_with
from chunkc.cost.timeline import Timeline

__all__ = ["Timeline", "simulate", "simulate_with"]
