"""A picture of one iteration: device memory by kind above a lane of actions for each stream.

It is drawn on a figure of its own, without pyplot and its process-wide state. matplotlib is imported when a picture is
drawn: it is an extra of the package, ``chunkc[plot]``.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from chunkc.cost.timeline import Timeline
from chunkc.errors import ChunkcError
from chunkc.files import save_bytes
from chunkc.ir.actions import Stream
from chunkc.ir.plan import Plan
from chunkc.report.colours import BUDGET, DARK, KIND_COLOURS, WORK_COLOURS
from chunkc.report.columns import shorten
from chunkc.report.frame import LANE_NAMES, Bar, Frame, Work, frame_of
from chunkc.report.lanes import Array, Block, Lane, lane_of, thinned, without_seams
from chunkc.report.memory_curve import Kind, memory_curve
from chunkc.report.timeline import MEANINGS
from chunkc.report.units import percent, plural, replicas_of, unit_for

SIZE: Final = (1920, 1080)
SUFFIXES: Final = (".png", ".svg", ".pdf")
MISSING: Final = "pictures are drawn by matplotlib, which is not installed: pip install 'chunkc[plot]'"
_INK, _FAINT, _GRID, _HATCH = "#222222", "#666666", "#D8D8D8", "#AAAAAA"
_WIDTH_INCHES: Final = 16.0
_IN_SECONDS_MS: Final = 1e4
_MIN_COLUMNS: Final = 4.0
_CELL_COLUMNS: Final = 8
_EDGED_COLUMNS: Final = 10.0
_BAR_HEIGHT: Final = 0.78
_MERGED: Final = "; where merged,\nheight is their share"
_LEFT, _RIGHT = 0.075, 0.845


def plot(plan: Plan, timeline: Timeline | None, path: str | Path, *, size: tuple[int, int] = SIZE) -> None:
    """Draw one steady iteration of ``plan`` to a file, a .png, .svg or .pdf by its name.

    Args:
        plan: what to draw.
        timeline: its simulation. None where rates of the hardware are unknown: the axis is then the order of actions.
        path: of the picture.
        size: width and height in pixels; where the form has none, their proportion.

    Raises:
        ChunkcError: matplotlib is not installed, the name ends otherwise, the timeline is one of another plan, or the
            file cannot be written; what it held, it holds.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise ChunkcError(f"a picture is one of {', '.join(SUFFIXES)}, not {Path(path).name!r}: change the file's name")
    save_bytes(path, picture(plan, timeline, suffix.removeprefix("."), size=size))


def picture(plan: Plan, timeline: Timeline | None, form: str = "png", *, size: tuple[int, int] = SIZE) -> bytes:
    """Contents of the file that `plot` writes; ``form`` is png, svg or pdf; letters grow with width."""
    buffer = io.BytesIO()
    # nothing of the day or the version: equal plans make equal PNG files
    metadata = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
    drawn(plan, timeline, size).savefig(buffer, format=form, metadata=metadata.get(form))
    return buffer.getvalue()


def drawn(plan: Plan, timeline: Timeline | None, size: tuple[int, int] = SIZE) -> Any:
    """The picture as a figure of matplotlib, to be changed or saved by its means."""
    dpi = size[0] / _WIDTH_INCHES
    figure = _figure()(figsize=(_WIDTH_INCHES, size[1] / dpi), dpi=dpi, facecolor="white")
    _Drawing(figure, plan, timeline, frame_of(plan, timeline), size[0]).draw()
    return figure


def _figure() -> Any:
    """matplotlib's class of figures."""
    try:
        return importlib.import_module("matplotlib.figure").Figure
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "matplotlib":
            raise
        raise ChunkcError(MISSING) from error


@dataclass(slots=True)
class _Drawing:
    """One figure on its way."""

    figure: Any
    plan: Plan
    timeline: Timeline | None
    frame: Frame
    width_px: int

    @property
    def num_columns(self) -> int:
        """Pixels across the panels."""
        return max(1, round(self.width_px * (_RIGHT - _LEFT)))

    @property
    def letter_unit(self) -> float:
        """The part of the window that takes a 1920th of the picture's width: letters take some of these."""
        return self.frame.period / (SIZE[0] * (_RIGHT - _LEFT))

    def draw(self) -> None:
        streams = self.frame.streams
        bottom, top = 0.085, 0.855
        lanes_height = min(0.47, 0.085 * max(2, len(streams)) + 0.02)
        strip = 0.032
        gap = 0.03
        low = self.figure.add_axes((_LEFT, bottom, _RIGHT - _LEFT, lanes_height))
        high_bottom = bottom + lanes_height + gap
        high = self.figure.add_axes((_LEFT, high_bottom, _RIGHT - _LEFT, top - high_bottom), sharex=low)
        phases = self.figure.add_axes((_LEFT, top + 0.006, _RIGHT - _LEFT, strip), sharex=low)
        low.set_xlim(0, self.frame.period)
        self._memory(high)
        self._lanes(low)
        self._phases(phases, (high, low))
        self._titles()
        self._time_axis(low)

    # --- memory -----------------------------------------------------------------------------------------------------
    def _memory(self, axes: Any) -> None:
        curve = memory_curve(self.plan, self.timeline)
        unit = unit_for(max(curve.budget_nbytes, curve.peak_nbytes))
        few = len(curve.edges) <= self.num_columns
        num_cells = self.num_columns if few else self.num_columns // _CELL_COLUMNS
        edges, nbytes = thinned(curve, self.frame.phases, num_cells)
        base = 0.0 * edges[:-1]
        handles = []
        for kind, values in nbytes.items():
            above = base + values / unit.nbytes
            hatch = {"hatch": "....", "edgecolor": "#DADADA"} if kind is Kind.UNUSED else {}
            style = {"facecolor": KIND_COLOURS[kind], "linewidth": 0.0, "antialiased": False, "label": str(kind)}
            handles.append(axes.fill_between(edges, _closed(base), _closed(above), step="post", **style, **hatch))
            base = above
        axes.step(edges, _closed(base), where="post", color="#46545F", linewidth=0.7)
        budget = curve.budget_nbytes / unit.nbytes
        label = f"budget {unit.named(curve.budget_nbytes)}"
        line = axes.axhline(budget, color=BUDGET, linewidth=1.6, linestyle=(0, (6, 3)), label=label)
        axes.set_ylim(0, 1.06 * max(budget, curve.peak_nbytes / unit.nbytes))
        axes.set_ylabel(f"device memory, {unit.name}", fontsize=11, color=_INK)
        _plain(axes, grid="y")
        axes.tick_params(labelbottom=False, labelsize=10, colors=_INK)
        self._legend(axes, [line, *reversed(handles)], "memory")

    # --- lanes ------------------------------------------------------------------------------------------------------
    def _lanes(self, axes: Any) -> None:
        lanes = [lane_of(self.frame, stream, self.num_columns, _MIN_COLUMNS) for stream in self.frame.streams]
        for row, lane in enumerate(lanes):
            self._lane(axes, lane, len(lanes) - 1 - row)
        axes.set_ylim(-0.55, len(lanes) - 0.45)
        axes.set_yticks([len(lanes) - 1 - row for row in range(len(lanes))], [self._lane_name(lane) for lane in lanes])
        _plain(axes, grid="x")
        axes.tick_params(axis="y", length=0, labelsize=10, colors=_INK)
        patch = importlib.import_module("matplotlib.patches").Patch
        used = {bar.work for bar in self.frame.bars if bar.duration > 0}
        handles = [patch(facecolor=WORK_COLOURS[work], label=work_name(work)) for work in Work if work in used]
        if self.frame.waits:
            handles.append(
                patch(facecolor="white", edgecolor=_HATCH, hatch="/////", label="device waits", linewidth=0.4)
            )
        is_merged = any(lane.shares for lane in lanes)
        self._legend(axes, handles, f"actions{_MERGED if is_merged else ''}")

    def _lane(self, axes: Any, lane: Lane, row: int) -> None:
        low = row - _BAR_HEIGHT / 2
        column = self.frame.period / self.num_columns
        least = _EDGED_COLUMNS * column if lane.is_counted else self.frame.period
        spans: dict[tuple[Work, bool], list[tuple[float, float]]] = {}
        axes.axhspan(low, low + _BAR_HEIGHT, color="#F6F6F6", linewidth=0, zorder=0.5)
        if lane.stream is Stream.COMPUTE and self.frame.waits:  # under the bars, so it shows where there are none
            style = {"facecolor": "white", "edgecolor": _HATCH, "hatch": "/////", "linewidth": 0.0}
            axes.broken_barh([(0.0, self.frame.period)], (low, _BAR_HEIGHT), zorder=0.8, **style)
        for block in without_seams(lane.blocks, column):
            spans.setdefault((block.work, block.width >= least), []).append((block.start, block.width))
        for (work, is_wide), extents in spans.items():
            style = {"facecolor": WORK_COLOURS[work], "edgecolor": "white", "linewidth": 0.6 if is_wide else 0.0}
            axes.broken_barh(extents, (low, _BAR_HEIGHT), zorder=2, **style)
        self._density(axes, lane, low)
        self._names(axes, lane, row)

    def _density(self, axes: Any, lane: Lane, low: float) -> None:
        """Bars too narrow to tell apart: as high as the share of the time that they take."""
        edges = np.linspace(0.0, self.frame.period, self.num_columns + 1)
        base = np.full(self.num_columns, low)
        for work, shares in lane.shares.items():
            above = base + _BAR_HEIGHT * shares
            style = {"facecolor": WORK_COLOURS[work], "linewidth": 0.0, "antialiased": False, "zorder": 2}
            axes.fill_between(edges, _closed(base), _closed(above), step="post", **style)
            base = above

    def _names(self, axes: Any, lane: Lane, row: int) -> None:
        """Write what a bar acts on inside it, where there is room, or how many segments a phase has.

        A number stands alone only where all bars of the lane are drawn one by one, so that the others can be counted.
        """
        named = [block for block in lane.blocks if self._name(axes, block, row, lane.is_counted)]
        if lane.stream is not Stream.COMPUTE:
            return
        for phase in self.frame.phases:
            if any(phase.start <= block.start < phase.end for block in named):
                continue
            inside = [bar for bar in self.frame.lane(lane.stream) if phase.start <= bar.start < phase.end]
            segments = [bar for bar in inside if bar.work in (Work.FORWARD, Work.BACKWARD)]
            text = plural(len(segments), "segment")
            if segments and (phase.end - phase.start) / self.letter_unit >= 8.0 * len(text) + 16.0:
                self._write(axes, text, (phase.start + phase.end) / 2, row, segments[0].work)

    def _name(self, axes: Any, block: Block, row: int, is_counted: bool) -> bool:
        """Write the longest name of a block's bar that fits it; whether one does."""
        target = "" if block.bar is None else _target(block.bar)
        for name in (target, target.rpartition(".")[2] if is_counted else ""):
            if name and block.width / self.letter_unit >= 8.0 * len(name) + 4.0:
                self._write(axes, name, (block.start + block.end) / 2, row, block.work)
                return True
        return False

    def _write(self, axes: Any, text: str, middle: float, row: int, work: Work) -> None:
        colour = "white" if work in DARK else _INK
        axes.text(middle, row, text, fontsize=8, color=colour, ha="center", va="center", zorder=3)

    def _lane_name(self, lane: Lane) -> str:
        load = f"{percent(lane.busy, self.frame.period)} busy" if self.frame.in_ms else plural(lane.num_bars, "action")
        return f"{LANE_NAMES[lane.stream]}\n{load}"

    # --- around -----------------------------------------------------------------------------------------------------
    def _phases(self, strip: Any, panels: Sequence[Any]) -> None:
        """A strip that names the phases, and lines between them through both panels."""
        strip.set_axis_off()
        strip.set_ylim(0, 1)
        for phase in self.frame.phases:
            width = phase.end - phase.start
            strip.broken_barh([(phase.start, width)], (0, 1), facecolor="#E4E9EE", edgecolor="white", linewidth=2)
            length = _duration(width, self.frame.period) if self.frame.in_ms else f"{width:,.0f} actions"
            text = f"{phase.name}  {length}"
            fits = [name for name in (text, phase.name) if width / self.letter_unit >= 9.5 * len(name) + 10]
            is_last = phase is self.frame.phases[-1]
            style = {"fontsize": 11, "color": _INK, "va": "center", "clip_on": False}
            if fits:
                strip.text(phase.start + width / 2, 0.45, fits[0], ha="center", **style)
            elif is_last:
                strip.text(phase.end + 6 * self.letter_unit, 0.45, text, ha="left", **style)
            if phase.start > 0:
                for axes in panels:
                    axes.axvline(phase.start, color=_INK, linewidth=0.9, linestyle=(0, (2, 3)), zorder=4)

    def _legend(self, axes: Any, handles: Sequence[Any], title: str) -> None:
        legend = axes.legend(
            handles=handles, title=title, loc="upper left", bbox_to_anchor=(1.008, 1.0), fontsize=10, title_fontsize=10,
            frameon=False, borderaxespad=0.0, handlelength=1.4, labelspacing=0.45, alignment="left",
        )  # fmt: skip
        legend.get_title().set_color(_FAINT)

    def _titles(self) -> None:
        title = shorten(f"{self.plan.model} on {self.plan.hw}", 100)
        style = {"ha": "left", "va": "center", "parse_math": False}
        self.figure.text(_LEFT, 0.962, title, fontsize=16, fontweight="bold", color=_INK, **style)
        self.figure.text(
            _LEFT, 0.922, "   ·   ".join(facts_of(self.plan, self.timeline)), fontsize=11.5, color=_FAINT, **style
        )

    def _time_axis(self, axes: Any) -> None:
        ticker = importlib.import_module("matplotlib.ticker")
        axes.tick_params(axis="x", labelsize=10, colors=_INK)
        if self.frame.in_ms:
            scale = 1e-3 if self.frame.period >= _IN_SECONDS_MS else 1.0
            name = "seconds" if scale != 1.0 else "milliseconds"
            text = f"{name} of one steady iteration; what passes its end goes on at its beginning"
            axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value * scale:,.6g}"))
            axes.xaxis.set_major_locator(ticker.MaxNLocator(12, steps=[1, 2, 2.5, 5, 10]))
        else:
            axes.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
            text = "actions in the order of the plan; the rates of this hardware are unknown, so widths are no times"
        axes.set_xlabel(text, fontsize=11, color=_INK, labelpad=7)


def facts_of(plan: Plan, timeline: Timeline | None) -> Iterator[str]:
    """Facts of a plan for the head of a picture."""
    if timeline is None:
        yield "step time unknown"
    else:
        yield f"step {_duration(timeline.step_ms, timeline.step_ms)}, simulated"
        speed = timeline.tokens_per_s
        if speed:
            yield f"{speed:,.0f} tokens/s" if speed >= 1e3 else f"{speed:.4g} tokens/s"
        yield f"bound by {MEANINGS[timeline.bound]}"
    unit = unit_for(plan.memory.device_peak_nbytes)
    yield f"device peak {unit.named(plan.memory.device_peak_nbytes)}"
    if plan.layout.world_size > 1:
        yield f"rank {plan.layout.rank} of {plan.layout.world_size}{replicas_of(plan)}"
    yield f"plan {plan.digest()}"


def _closed(values: Array) -> Array:
    """One value more, for steps that end at the last edge."""
    return np.append(values, values[-1])


def _plain(axes: Any, grid: str) -> None:
    axes.grid(visible=True, axis=grid, color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_FAINT)


def _target(bar: Bar) -> str:
    """``c12`` of ``fetch c12 -> d3 @h2d``."""
    words = bar.text.split(" @")[0].split()
    return words[1] if len(words) > 1 else words[0]


def _duration(milliseconds: float, period_ms: float) -> str:
    """In the unit of an axis that is ``period_ms`` long."""
    value, unit = (milliseconds * 1e-3, "s") if period_ms >= _IN_SECONDS_MS else (milliseconds, "ms")
    return f"{value:,.0f} {unit}" if value >= 1e3 else f"{value:.3g} {unit}"


def work_name(work: Work) -> str:
    """A kind of work as legends name it."""
    return {
        Work.PARAMETERS: "parameters to device",
        Work.GRADIENTS: "gradients copied",
        Work.STATES: "optimizer states",
        Work.OTHER: "other (stash, ...)",
    }.get(work, str(work))
