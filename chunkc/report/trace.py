"""A simulated iteration for Perfetto: tracks of the timeline, device memory as counters, arrows.

To `Timeline.trace` come the names of streams that pictures use, a counter track of device bytes by kind, and for every
segment arrows from the copies and collectives that it waits for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from chunkc.cost.timeline import Slice, Timeline
from chunkc.ir.actions import Op, Stream
from chunkc.ir.plan import Plan
from chunkc.report.frame import LANE_NAMES, clock_of
from chunkc.report.memory_curve import memory_curve

_MIB = 1024**2


def trace(plan: Plan, timeline: Timeline) -> dict[str, Any]:
    """Chrome trace events, for ``json.dumps``; times are in microseconds, memory in MiB.

    Raises:
        ChunkcError: when the timeline is one of another plan.
    """
    events = timeline.trace()
    events["traceEvents"] += [*_counters(plan, timeline), *_arrows(plan, timeline, events["traceEvents"])]
    for event in events["traceEvents"]:
        if event["name"] == "thread_name":
            event["args"]["name"] = LANE_NAMES[Stream(event["args"]["name"])]
    return events


def _counters(plan: Plan, timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Device memory by kind through the two iterations; each is laid where its first segment starts."""
    curve, (clock, period) = memory_curve(plan, timeline), clock_of(plan, timeline)
    first = timeline.slices[0]
    origin_ms = first.start_ms - clock[first.label][0]
    for repeat in range(2):
        for i, edge in enumerate(curve.edges[:-1]):
            values = {str(kind): curve.nbytes[kind][i] / _MIB for kind in curve.kinds()}
            time_us = (origin_ms + repeat * period + edge) * 1e3
            yield {"ph": "C", "name": "device memory, MiB", "pid": 0, "ts": time_us, "args": values}


def _arrows(plan: Plan, timeline: Timeline, events: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """From what brings chunks to the segments that wait for it, in the same iteration."""
    tracks = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    segments, latest = list[tuple[str, list[str]]](), dict[str, str]()
    for _, label, action in plan.labelled():
        latest[label.rpartition(":")[2]] = label
        if action.op is Op.RUN:
            segments.append((label, [latest[name] for name in action.waits if name in latest]))
    number = 0
    for slices in (timeline.slices, timeline.next_slices):
        by_label = {s.label: s for s in slices}
        for label, waits in segments:
            for source in (by_label[name] for name in waits if name in by_label):
                if source.stream is not Stream.COMPUTE and source.end_ms <= by_label[label].start_ms:
                    number += 1
                    yield _end("s", number, source, source.end_ms, tracks)
                    yield _end("f", number, by_label[label], by_label[label].start_ms, tracks)


def _end(phase: str, number: int, at: Slice, time_ms: float, tracks: dict[str, int]) -> dict[str, Any]:
    """One end of an arrow; it belongs to the slice that surrounds its time."""
    inside_ms = min(max(time_ms, at.start_ms), at.end_ms)
    event = {"ph": phase, "id": number, "name": "brings", "cat": "waits", "pid": 0, "tid": tracks[str(at.stream)]}
    return event | {"ts": inside_ms * 1e3} | ({"bp": "e"} if phase == "f" else {})
