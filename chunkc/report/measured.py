"""Recorded actions for Perfetto: tracks of a process of their own, beside the planned ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from chunkc.ir.actions import Stream
from chunkc.runtime.devices.throttle import Span

MEASURED_PID = 1
"""Process of the measured tracks; those of a simulated iteration have process 0."""


def measured_trace(spans: Iterable[Span], name: str) -> dict[str, Any]:
    """Chrome trace events of recorded actions for ``json.dumps``, in microseconds from the first start.

    Args:
        spans: complete ones, in any order.
        name: of the process.
    """
    ordered = sorted(spans, key=lambda span: (span.start_s, span.number))
    tracks = {stream: number for number, stream in enumerate(Stream, start=1)}
    used = {span.stream for span in ordered}
    origin_s = ordered[0].start_s if ordered else 0.0
    events = [_label("process_name", 0, name=name)]
    for stream in (s for s in Stream if s in used):
        events.append(_label("thread_name", tracks[stream], name=str(stream)))
        events.append(_label("thread_sort_index", tracks[stream], sort_index=tracks[stream]))
    events += [_event(span, tracks[span.stream], origin_s) for span in ordered]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def joined_trace(measured: dict[str, Any], planned: dict[str, Any]) -> dict[str, Any]:
    """One trace of both, the planned process named so; both begin at time 0."""
    events: Sequence[dict[str, Any]] = planned["traceEvents"]
    named = [
        event | {"args": {"name": f"planned: {event['args']['name']}"}} if event["name"] == "process_name" else event
        for event in events
    ]
    return {**measured, "traceEvents": [*measured["traceEvents"], *named]}


def _label(kind: str, track: int, **values: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": MEASURED_PID, "tid": track, "args": values}


def _event(span: Span, track: int, origin_s: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.label,
        "cat": "measured",
        "pid": MEASURED_PID,
        "tid": track,
        "ts": (span.start_s - origin_s) * 1e6,
        "dur": (span.end_s - span.start_s) * 1e6,
        "args": {"number": span.number, "after": span.cause, "launched_us": (span.launched_s - origin_s) * 1e6},
    }
