"""The times at which actions of an emulated device happen: paced by a profile, and recorded.

A throttled device does the real work of every action and then waits until the action is due. An action *starts* when
the host has launched it, its stream is free, and all that it waits for is complete. It *ends* when it is due by the law
of paces (`PaceLaw`), or when its work is done if that takes longer. A late waking of a thread delays nothing: the next
action counts from the end, and launches are dated without the host's latest late waking.

Between two starts or ends everything under way goes on at constant speeds (the fluid model of `chunkc.cost.engine`).
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from chunkc.ir.actions import Stream
from chunkc.ir.plan import Plan

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Pace:
    """How long an action takes with nothing beside it, and its use of the machine, for `PaceLaw.speeds`."""

    alone_ms: float
    use: Any


@dataclass(frozen=True, slots=True)
class PaceLaw:
    """The law of a throttled device.

    Attributes:
        paces: the pace of every action of a plan, by its text.
        speeds: for actions that run together, by their use: the share of its full speed, in (0, 1], that each gets.
    """

    paces: Callable[[Plan], Mapping[str, Pace]]
    speeds: Callable[[tuple[Any, ...]], tuple[float, ...]]


@dataclass(slots=True)
class Span:
    """One execution of an action; times in seconds of ``time.perf_counter``, ``inf`` until they are known.

    Attributes:
        number: in the order of launching.
        is_inline: whether the launching thread carries it out.
        pace: None where it takes as long as its work.
        cause: number of the action whose end let it start, or None where the host's launch did.
        host_cause: number of the last action that the host carried out itself before it launched this one, if any.
    """

    number: int
    stream: Stream
    label: str
    is_inline: bool
    launched_s: float
    pace: Pace | None
    host_cause: int | None
    waits: tuple[Span, ...]
    cause: int | None = None
    start_s: float = math.inf
    due_s: float = math.inf
    work_s: float = math.inf
    end_s: float = math.inf

    @property
    def is_paced(self) -> bool:
        return self.pace is not None and self.pace.alone_ms > 0


class _Fluid:
    """The actions under way on all streams, and when each of them is due."""

    def __init__(self, speeds: Callable[[tuple[Any, ...]], tuple[float, ...]], clock: Clock) -> None:
        self._speeds = speeds
        self._clock = clock
        self._changed = threading.Condition()
        self._left: dict[int, tuple[Span, float]] = {}  # seconds at full speed
        self._now_s = 0.0

    def begin(self, span: Span, alone_s: float) -> None:
        """Add ``span``, under way since ``span.start_s``, which is past by the lateness of its thread."""
        with self._changed:
            self._advance(self._clock())
            self._left[span.number] = (span, alone_s)
            speed = self._speeds_now()[-1]
            self._left[span.number] = (span, alone_s - (self._now_s - span.start_s) * speed)
            self._changed.notify_all()

    def wait(self, span: Span) -> None:
        with self._changed:
            while True:
                self._advance(self._clock())
                if span.number not in self._left:
                    return
                dues = dict(zip(self._left, self._dues(), strict=True))
                self._changed.wait(dues[span.number] - self._now_s)

    def _speeds_now(self) -> tuple[float, ...]:
        return self._speeds(tuple(span.pace.use for span, _ in self._left.values() if span.pace is not None))

    def _dues(self) -> list[float]:
        pairs = zip(self._left.values(), self._speeds_now(), strict=True)
        return [self._now_s + left_s / speed for (_, left_s), speed in pairs]

    def _advance(self, to_s: float) -> None:
        while self._left:
            due_s, number = min(zip(self._dues(), self._left, strict=True))
            if due_s > to_s:
                break
            self._pass(max(due_s, self._now_s))
            span, _ = self._left.pop(number)
            span.due_s = due_s
            self._changed.notify_all()
        self._pass(max(to_s, self._now_s))

    def _pass(self, to_s: float) -> None:
        elapsed_s = to_s - self._now_s
        pairs = zip(self._left.items(), self._speeds_now(), strict=True)
        self._left = {n: (span, left_s - elapsed_s * speed) for (n, (span, left_s)), speed in pairs}
        self._now_s = to_s


class Timekeeper:
    """Paces by a law, and records: ``records``, set to a list, keeps the spans that end from then on."""

    def __init__(self, law: PaceLaw | None = None, clock: Clock = time.perf_counter) -> None:
        self.records: list[Span] | None = None
        self._clock = clock
        self._fluid = None if law is None else _Fluid(law.speeds, clock)
        self._numbers = itertools.count()
        self._last: dict[Stream, Span] = {}
        self._last_inline: Span | None = None
        self._late_s = 0.0

    def launch(
        self, stream: Stream, label: str, waits: Iterable[Span | None], pace: Pace | None, is_inline: bool
    ) -> Span | None:
        """Make the span of an action that is launched now; None where nobody wants to know."""
        if self._fluid is None and self.records is None:
            return None
        inline = self._last_inline
        return Span(
            number=next(self._numbers),
            stream=stream,
            label=label,
            is_inline=is_inline,
            launched_s=self._clock() - self._late_s,
            pace=pace,
            host_cause=None if inline is None else inline.number,
            waits=tuple(span for span in waits if span is not None),
        )

    def begin(self, span: Span) -> None:
        """Start ``span``, when all that it waits for is complete and its thread is about to carry it out."""
        now_s = self._clock()
        before = self._last.get(span.stream)
        ends = [(other.end_s, other.number) for other in (before, *span.waits) if other is not None]
        ready_s, span.cause = max(ends, default=(-math.inf, None))
        if span.launched_s >= ready_s:
            ready_s, span.cause = span.launched_s, None
        span.waits = ()
        self._last[span.stream] = span
        if self._fluid is None or span.pace is None:
            span.start_s = span.due_s = now_s
        elif span.pace.alone_ms <= 0:
            span.start_s = span.due_s = ready_s
        else:
            span.start_s = ready_s
            self._fluid.begin(span, span.pace.alone_ms * 1e-3)

    def end(self, span: Span, work_s: float) -> None:
        """Wait until ``span`` is due, whose work took ``work_s``."""
        if self._fluid is not None:
            self._fluid.wait(span)
        self.settle(span, work_s)

    def settle(self, span: Span, work_s: float) -> None:
        """Complete ``span`` without waiting, as for work that failed."""
        span.work_s = work_s
        due_s = span.due_s if math.isfinite(span.due_s) else span.start_s
        span.end_s = max(due_s, span.start_s + work_s)
        if span.is_inline:
            self._last_inline = span
            self._late_s = 0.0 if span.pace is None else max(0.0, self._clock() - span.end_s)
        if self.records is not None:
            self.records.append(span)
