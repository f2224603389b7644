"""Report of a simulation: the step time, what bounds it, streams by words, the waits of the device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields

from chunkc import cost
from chunkc.cost.timeline import OVERHEAD, Stall
from chunkc.hardware import Hardware
from chunkc.ir.actions import Stream
from chunkc.ir.plan import Plan
from chunkc.report.cell import cell
from chunkc.report.columns import table, wrapped
from chunkc.report.frame import LANE_NAMES
from chunkc.report.units import percent, plural, printable, unit_for

MAX_STALLS = 8
MEANINGS = {
    "compute": "computing on the device",
    "h2d": "copies to the device",
    "d2h": "copies to the host",
    "comm": "exchange between ranks",
    "cpu": "updates on the host",
    OVERHEAD: "the host's launches, and hand-offs between streams",
}
SHORT_MEANINGS = {
    "compute": "compute",
    "h2d": "to device",
    "d2h": "to host",
    "comm": "collectives",
    "cpu": "updates",
    OVERHEAD: "launches",
}
"""The same for a column of a table."""


class Timeline(cost.Timeline):
    """One steady iteration of a plan, simulated; ``print(timeline)`` shows the numbers."""

    __slots__ = ()

    @classmethod
    def of(cls, timeline: cost.Timeline) -> Timeline:
        """The same timeline with its report."""
        return cls(**{field.name: getattr(timeline, field.name) for field in fields(cost.Timeline)})

    def __str__(self) -> str:
        return render_timeline(self)

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the step, what bounds it, and a table of streams."""
        first, *notes = header(self)
        headings, rows = _stream_table(self)
        return cell(first, headings, rows, notes)

    def __repr__(self) -> str:
        return printable(f"<chunkc timeline of plan {self.plan_digest}: {duration(self.step_ms)} a step on {self.hw}>")


def simulate(plan: Plan, hw: Hardware | str | os.PathLike[str] | None = None) -> Timeline:
    """How long a step of ``plan`` takes when steps repeat, and what bounds it; nothing runs.

    Args:
        plan: as planned or loaded; nothing else of the model is needed.
        hw: the machine whose rates to take: a name, a `Hardware`, or the path of a profile that ``chunkc calibrate``
            wrote. None takes the machine of the plan.

    Raises:
        HardwareError: when the machine's rates are not known; the message says how to get them.
    """
    return Timeline.of(cost.simulate(plan, hw))


def render_timeline(timeline: cost.Timeline) -> str:
    """The numbers of ``timeline`` on one screen."""
    head = (wrapped(printable(line), " " * 14) for line in header(timeline))
    parts = ["\n".join(head), _streams(timeline), _stalls(timeline)]
    return "\n\n".join(part for part in parts if part)


def header(timeline: cost.Timeline) -> Iterator[str]:
    """Lines on the step as a whole: times, rates, what bounds it, and peaks of memory."""
    ranks = f", {timeline.world_size} ranks" if timeline.world_size > 1 else ""
    yield f"{timeline.model} on {timeline.hw}{ranks}, plan {timeline.plan_digest}: simulated, not measured"
    speeds = [(timeline.tokens_per_s, "tokens/s"), (timeline.samples_per_s, "samples/s")]
    known = [f"{speed:,.4g} {name}" if speed < 1000 else f"{speed:,.0f} {name}" for speed, name in speeds if speed]
    yield "  step        " + ", ".join([duration(timeline.step_ms), *known])
    rates = [f"{timeline.model_tflops:.4g} TFLOPS", f"{timeline.hardware_tflops:.4g} with what is computed again"]
    if timeline.patrickstar_tflops is not None:
        rates.append(f"{timeline.patrickstar_tflops:.4g} as PatrickStar counts")
    yield "  each rank   " + ", ".join(rates)
    yield "  bound by    " + "; ".join(bounds(timeline))
    peaks = timeline.peaks
    unit = unit_for(peaks.device_nbytes)
    yield (
        f"  memory      device {unit.named(peaks.device_nbytes)} at {peaks.device_segment}, arena at most "
        f"{unit.named(peaks.arena_used_nbytes)} in use at {peaks.arena_used_segment}, host "
        f"{unit_for(peaks.host_nbytes).named(peaks.host_nbytes)}"
    )
    if not timeline.is_steady:
        yield f"  not steady after {timeline.num_iterations} iterations: times are the mean of the last ones"


def bounds(timeline: cost.Timeline) -> Iterator[str]:
    """Lines on what bounds the step, in words, and on what would bound it next."""
    critical = {str(s.stream): s.critical_ms for s in timeline.streams} | {OVERHEAD: timeline.overhead_ms}
    bound = timeline.bound
    yield f"{MEANINGS[bound]} ({percent(critical[bound], timeline.step_ms)} of the critical path)"
    if timeline.next_bound is not None:
        busy_ms = next(s.busy_ms for s in timeline.streams if str(s.stream) == timeline.next_bound)
        yield f"next {MEANINGS[timeline.next_bound]} (busy {percent(busy_ms, timeline.step_ms)})"


def _streams(timeline: cost.Timeline) -> str:
    headings, rows = _stream_table(timeline)
    return table(headings, rows, "lrrrrrr")


def _stream_table(timeline: cost.Timeline) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    unit = unit_for(max((s.nbytes for s in timeline.streams), default=0))
    rows: list[tuple[str, ...]] = [
        (
            LANE_NAMES[s.stream],
            f"{s.busy_ms:,.3f}",
            percent(s.busy_ms, timeline.step_ms),
            f"{s.alone_ms:,.3f}",
            f"{s.critical_ms:,.3f}",
            f"{s.num_actions:,}",
            unit.of(s.nbytes),
        )
        for s in timeline.streams
    ]
    rows.append((OVERHEAD, "", "", "", f"{timeline.overhead_ms:,.3f}", "", ""))
    return ("stream", "busy ms", "share", "alone ms", "critical ms", "actions", unit.name), rows


def _stalls(timeline: cost.Timeline) -> str:
    if not timeline.stalls:
        return "the device never waits"
    total_ms = sum(s.stall_ms for s in timeline.stalls)
    rows = [
        (
            f"{stall.stall_ms:,.3f}",
            f"{stall.label} {_without_stream(stall.action)}",
            _without_stream(stall.waited_for),
            _meanwhile(stall),
        )
        for stall in timeline.stalls[:MAX_STALLS]
    ]
    shown = "" if len(timeline.stalls) <= MAX_STALLS else f"; the {MAX_STALLS} longest"
    heading = f"the device waits {duration(total_ms)} of a step in {plural(len(timeline.stalls), 'stall')}{shown}\n\n"
    return heading + table(("ms", "before", "waits for", "meanwhile, ms"), rows, "rlll")


def _without_stream(action: str) -> str:
    """Its stream is among those of the column beside it."""
    return action.split(" @")[0]


def _meanwhile(stall: Stall) -> str:
    parts = ((_name(name), ms) for name, ms in stall.path_ms if ms >= stall.stall_ms / 100)
    return ", ".join(f"{name} {ms:,.3f}" for name, ms in parts)


def _name(part: str) -> str:
    """The words for a stream, or `OVERHEAD`, of a path."""
    return part if part == OVERHEAD else LANE_NAMES[Stream(part)]


def duration(elapsed_ms: float) -> str:
    """``12.345 ms``, ``1.234 s``."""
    return f"{elapsed_ms / 1e3:,.3f} s" if elapsed_ms >= 1e3 else f"{elapsed_ms:,.3f} ms"
