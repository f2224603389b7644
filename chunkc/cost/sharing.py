"""Speeds of actions that run together: as fast as alone, or slower where memory or a link is shared.

Speeds change whenever an action starts or ends, and depend on nothing but what runs. No speed is above 1, and one more
action never makes another faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from chunkc.hardware.profile import Rates
from chunkc.ir.actions import Stream

HOST_DRAM = "host DRAM"
TO_DEVICE = "host link to the device"
FROM_DEVICE = "host link from the device"
COPY_RESOURCES = {Stream.H2D: (HOST_DRAM, TO_DEVICE), Stream.D2H: (HOST_DRAM, FROM_DEVICE)}
MEASURED_STREAMS = (Stream.COMPUTE, Stream.H2D, Stream.D2H, Stream.CPU)


@dataclass(frozen=True, slots=True)
class Use:
    """Demands of an action at full speed: its stream, and shared resources in 1e9 bytes per second."""

    stream: Stream
    demands: tuple[tuple[str, float], ...] = ()


class Sharing(Protocol):
    """A law of slow-downs."""

    def speeds(self, uses: tuple[Use, ...]) -> tuple[float, ...]:
        """For actions that run together, one a stream: the share of its full speed, in (0, 1], that each gets."""
        ...


@dataclass(frozen=True, slots=True)
class Alone:
    """Nothing is shared."""

    def speeds(self, uses: tuple[Use, ...]) -> tuple[float, ...]:
        return (1.0,) * len(uses)


@dataclass(frozen=True, slots=True)
class Capacities:
    """Resources of a fixed capacity (1e9 bytes per second); one that is not named has enough for all.

    Where the demands on one exceed it, all who use it get the same share of their demand, as requests are served in
    turn; an action goes as fast as its scarcest resource lets it.
    """

    gb_per_s: Mapping[str, float]

    def speeds(self, uses: tuple[Use, ...]) -> tuple[float, ...]:
        total: dict[str, float] = {}
        for use in uses:
            for resource, demand in use.demands:
                total[resource] = total.get(resource, 0.0) + demand
        share = {r: min(1.0, cap / total[r]) for r, cap in self.gb_per_s.items() if total.get(r, 0.0) > 0}
        return tuple(min((share.get(resource, 1.0) for resource, _ in use.demands), default=1.0) for use in uses)


@dataclass(slots=True)
class Measured:
    """The slow-downs that a calibration found for every set of streams; collectives have none."""

    rates: Rates
    _factors: dict[tuple[Stream, frozenset[Stream]], float] = field(default_factory=dict)

    def speeds(self, uses: tuple[Use, ...]) -> tuple[float, ...]:
        running = frozenset(use.stream for use in uses if use.stream in MEASURED_STREAMS)
        return tuple(1.0 / self._factor(use.stream, running - {use.stream}) for use in uses)

    def _factor(self, of: Stream, by: frozenset[Stream]) -> float:
        if not by or of not in MEASURED_STREAMS:
            return 1.0
        if (of, by) not in self._factors:
            measured = self.rates.slowdown(of, by).median
            self._factors[of, by] = max(measured, *(self._factor(of, by - {other}) for other in by))
        return self._factors[of, by]
