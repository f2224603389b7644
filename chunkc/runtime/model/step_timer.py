"""How long the steps of one model take by the host's clock, and what they were made of.

A step lasts from the end of one ``optimizer.step()`` to the end of the next, with whatever the user does in between:
that is the time which tokens per second are about. Updates that run beside the next forward count where they are
waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from chunkc.ir.actions import Stream
from chunkc.ir.plan import Plan


@dataclass(frozen=True, slots=True)
class StepWindow:
    """One step: its seconds, the plans of each forward's graphs, and the compute stream's waits."""

    elapsed_s: float
    calls: tuple[tuple[Plan, ...], ...]
    stalled_s: Mapping[Stream, float]


class StepLog:
    """The latest whole step, None before the second has ended, by a ``clock`` in seconds."""

    def __init__(
        self, stalled_s: Callable[[], Mapping[Stream, float]], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.num_steps = 0
        self.latest: StepWindow | None = None
        self._stalled_s = stalled_s
        self._clock = clock
        self._ended_s = 0.0
        self._stalls_before: Mapping[Stream, float] = {}
        self._calls: list[tuple[Plan, ...]] = []

    def forward(self, plans: Sequence[Plan]) -> None:
        self._calls.append(tuple(plans))

    def end(self) -> None:
        now_s, stalls = self._clock(), self._stalled_s()
        if self.num_steps:
            since = {stream: total - self._stalls_before.get(stream, 0.0) for stream, total in stalls.items()}
            self.latest = StepWindow(now_s - self._ended_s, tuple(self._calls), since)
        self._ended_s, self._stalls_before = now_s, stalls
        self._calls.clear()
        self.num_steps += 1
