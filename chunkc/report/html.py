"""One self-contained page about a plan: timeline to zoom into, numbers, stalls, text, trace.

The page refers to no other resource, and tells the browser to load none. Its text stands in the page as text, so it can
be searched without scripts; scripts add the filter and the timeline. Only a click opens Perfetto's site and hands over
the trace, in the browser.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from chunkc.cost.timeline import OVERHEAD, Stall, Timeline
from chunkc.ir.actions import Stream
from chunkc.ir.plan import Plan
from chunkc.report.colours import BUDGET, DARK, KIND_COLOURS, WORK_COLOURS
from chunkc.report.frame import LANE_NAMES, Frame, Work, frame_of
from chunkc.report.memory_curve import MemoryCurve, memory_curve
from chunkc.report.plot import facts_of, work_name
from chunkc.report.summary import summarize
from chunkc.report.text import full_text
from chunkc.report.timeline import header
from chunkc.report.trace import trace
from chunkc.report.units import percent, plural, unit_for

MAX_STALLS: Final = 30
_TOOLS: Final = (
    '<button id="perfetto">Open in Perfetto</button><button id="download">Download the trace</button>'
    "<span>Perfetto (ui.perfetto.dev) reads the trace inside the browser; it is not uploaded.</span>"
)
_TICKS: Final = 10_000_000
"""Into how many parts the timeline's data divide the period."""


def page(plan: Plan, timeline: Timeline | None) -> str:
    """The page of ``plan``, as the text of an HTML file.

    Args:
        plan: what to show.
        timeline: its simulation. None where rates of the hardware are unknown: time is then the order of actions.

    Raises:
        ChunkcError: the timeline is one of another plan.
    """
    frame, curve = frame_of(plan, timeline), memory_curve(plan, timeline)
    values = {
        "title": _text(f"{plan.model} on {plan.hw}"),
        "facts": _text("   ·   ".join(facts_of(plan, timeline))),
        "kinds": _kinds(curve),
        "works": "".join(_swatch(WORK_COLOURS[w], work_name(w)) for w in Work if w in {b.work for b in frame.bars}),
        "simulation": _simulation(timeline),
        "streams": "" if timeline is None else _streams(timeline),
        "streams_of_actions": ", ".join(f"{stream} is {name}" for stream, name in LANE_NAMES.items()),
        "stalls": "" if timeline is None else "\n".join(_stalls(timeline)),
        "summary": _text(summarize(plan)),
        "plan": _text(full_text(plan)),
        "data": _json(_data(frame, curve)),
        "tools": "" if timeline is None else _TOOLS,
        "trace": "" if timeline is None else _packed(trace(plan, timeline)),
    }
    template = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
    # one pass: a value that looks like a mark stays as it is
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: values[mark[1]], template)


def _text(text: str) -> str:
    return html.escape(text)


def _json(data: Mapping[str, Any]) -> str:
    """JSON that may stand in a script element, whatever names are in it."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _packed(events: Mapping[str, Any]) -> str:
    """JSON, compressed by gzip without the time of day, as base64."""
    return base64.b64encode(gzip.compress(json.dumps(events, separators=(",", ":")).encode(), mtime=0)).decode("ascii")


def _kinds(curve: MemoryCurve) -> str:
    """Legend of the memory panel, from above as it is drawn."""
    unit = unit_for(max(curve.budget_nbytes, curve.peak_nbytes))
    kinds = "".join(_swatch(KIND_COLOURS[kind], str(kind)) for kind in reversed(curve.kinds()))
    return f'<li><i class="line" style="color:{BUDGET}"></i>budget {unit.named(curve.budget_nbytes)}</li>{kinds}'


def _swatch(colour: str, name: str) -> str:
    return f'<li><i style="background:{colour}"></i>{_text(name)}</li>'


def _simulation(timeline: Timeline | None) -> str:
    if timeline is None:
        return "The rates of this hardware are unknown, so nothing says how long a step takes."
    return _text("\n".join(header(timeline)))


def _streams(timeline: Timeline) -> str:
    """Table of the streams' times and bytes."""
    unit = unit_for(max((s.nbytes for s in timeline.streams), default=0))
    heads = ("stream", "busy ms", "share", "alone ms", "critical ms", "actions", unit.name)
    rows = [
        (
            *(LANE_NAMES[s.stream], f"{s.busy_ms:,.3f}", percent(s.busy_ms, timeline.step_ms), f"{s.alone_ms:,.3f}"),
            *(f"{s.critical_ms:,.3f}", f"{s.num_actions:,}", unit.of(s.nbytes)),
        )
        for s in timeline.streams
    ]
    rows.append((OVERHEAD, "", "", "", f"{timeline.overhead_ms:,.3f}", "", ""))
    body = "\n".join(_row(row, "td") for row in rows)
    return f'<table class="streams"><thead>{_row(heads, "th")}</thead><tbody>\n{body}\n</tbody></table>'


def _row(cells: Iterable[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{_text(cell)}</{tag}>' for cell in cells)}</tr>"


def _stalls(timeline: Timeline) -> Iterator[str]:
    """Rows of a table, the longest stalls first; a last row says what is left out."""
    for stall in timeline.stalls[:MAX_STALLS]:
        yield _row(_cells(stall), "td")
    left = timeline.stalls[MAX_STALLS:]
    if left:
        total_ms = sum(stall.stall_ms for stall in left)
        yield f'<tr><td>{total_ms:,.3f}</td><td colspan="3">{plural(len(left), "shorter one")}</td></tr>'


def _cells(stall: Stall) -> tuple[str, str, str, str]:
    names = {str(stream): name for stream, name in LANE_NAMES.items()}
    long = [(names.get(name, name), ms) for name, ms in stall.path_ms if ms >= stall.stall_ms / 100]
    meanwhile = ", ".join(f"{name} {ms:,.3f}" for name, ms in long)
    return f"{stall.stall_ms:,.3f}", f"{stall.label} {stall.action}", stall.waited_for, meanwhile


def _data(frame: Frame, curve: MemoryCurve) -> dict[str, Any]:
    """Data that the script draws; times are whole ticks, each list's as differences."""
    unit = unit_for(max(curve.budget_nbytes, curve.peak_nbytes))
    return {
        "period": frame.period,
        "inMs": frame.in_ms,
        "ticks": _TICKS,
        "unit": unit.name,
        "unitBytes": unit.nbytes,
        "budget": curve.budget_nbytes,
        "phases": [[phase.name, _tick(phase.start, frame), _tick(phase.end, frame)] for phase in frame.phases],
        "works": [[str(work), WORK_COLOURS[work], work in DARK] for work in Work],
        "lanes": [[LANE_NAMES[stream], *_lane(frame, stream)] for stream in frame.streams],
        "memory": _memory(curve, frame),
    }


def _tick(time: float, frame: Frame) -> int:
    return round(time / frame.period * _TICKS)


def _lane(frame: Frame, stream: Stream) -> tuple[list[int], list[int], list[int], list[str]]:
    """Starts (as differences), durations, works, labels of a stream's bars; a bar past the end is two."""
    order = {work: number for number, work in enumerate(Work)}
    parts = sorted(
        (_tick(start, frame), _tick(end, frame) - _tick(start, frame), order[bar.work], bar.label)
        for bar in frame.lane(stream)
        for start, end in frame.pieces(bar)
    )
    starts = _differences(start for start, *_ in parts)
    return starts, [width for _, width, *_ in parts], [work for *_, work, _ in parts], [part[-1] for part in parts]


def _memory(curve: MemoryCurve, frame: Frame) -> dict[str, Any]:
    """Edges as differences; of each kind its name, colour and changes: pieces and new bytes by turns."""
    kinds = [[str(kind), KIND_COLOURS[kind], *_changes(curve.nbytes[kind])] for kind in curve.kinds()]
    return {"edges": _differences(_tick(edge, frame) for edge in curve.edges), "kinds": kinds}


def _changes(values: Sequence[int]) -> tuple[list[int], list[int]]:
    """At which positions a new value stands (as differences), and which."""
    positions = [i for i, value in enumerate(values) if i == 0 or value != values[i - 1]]
    return _differences(positions), [values[i] for i in positions]


def _differences(numbers: Iterable[int]) -> list[int]:
    """The first number, then what each is more than the one before."""
    differences, last = [], 0
    for number in numbers:
        differences.append(number - last)
        last = number
    return differences
