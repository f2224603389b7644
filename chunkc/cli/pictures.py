"""Options of several commands that write pictures: ``--plot``, ``--html`` and ``--trace``."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path

from chunkc.cli.options import output_path, write
from chunkc.cli.output import one_line, tell
from chunkc.errors import ChunkcError
from chunkc.files import save_text
from chunkc.report import Plan
from chunkc.report.html import page
from chunkc.report.plot import MISSING, SUFFIXES, plot
from chunkc.report.timeline import Timeline
from chunkc.report.trace import trace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pictures = parser.add_argument_group("pictures")
    pictures.add_argument(
        "--plot",
        type=_picture_path,
        metavar="out.png",
        help="draw memory and streams through one iteration (or .svg, .pdf)",
    )
    pictures.add_argument(
        "--html",
        type=output_path,
        metavar="out.html",
        help="one page with a timeline to zoom, all text, and the trace for Perfetto",
    )
    pictures.add_argument("--trace", type=output_path, metavar="out.json", help="write every action, for Perfetto")


def wished(args: argparse.Namespace) -> list[str]:
    """The options of `add_arguments` that are given."""
    return [f"--{name}" for name in ("plot", "html", "trace") if getattr(args, name)]


def write_pictures(args: argparse.Namespace, plan: Plan, timeline: Timeline | None, unpriced: str = "") -> None:
    """Write the files asked for; without a timeline they show the order of actions, and stderr says why.

    Raises:
        ChunkcError: a file cannot be written, or a trace is asked for and there is no timeline.
    """
    if timeline is None and args.trace:
        raise ChunkcError(f"cannot write {args.trace}, since a trace has times: {unpriced}")
    if timeline is None and (args.plot or args.html):
        tell(one_line(f"pictures show the order of actions, not times: {unpriced}"))
    if args.plot:
        write(args.plot, lambda: plot(plan, timeline, args.plot))
    if args.html:
        write(args.html, lambda: save_text(args.html, page(plan, timeline)))
    if args.trace and timeline is not None:
        write(args.trace, lambda: save_text(args.trace, json.dumps(trace(plan, timeline))))


def _picture_path(text: str) -> str:
    """Refused before anything is planned, since planning takes a while."""
    if Path(text).suffix.lower() not in SUFFIXES:
        raise argparse.ArgumentTypeError(f"{text!r} does not end in {', '.join(SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError(MISSING)
    return output_path(text)
