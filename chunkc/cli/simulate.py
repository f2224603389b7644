"""``chunkc simulate``: how long a step of a plan takes, and what bounds it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from chunkc.cli.options import load_plan, output_path, write
from chunkc.report.timeline import simulate

HELP = "how long a step of a saved plan takes, and what bounds it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="plan.json", help="a file that plan.save() or `chunkc plan --save` wrote")
    parser.add_argument("--hw", help="whose rates: a profile of `chunkc calibrate`, or a name (default: the plan's)")
    parser.add_argument("--trace", type=output_path, metavar="trace.json", help="write every action, for Perfetto")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(args: argparse.Namespace) -> int:
    timeline = simulate(load_plan(args.path), args.hw)
    if args.trace:
        write(args.trace, lambda: Path(args.trace).write_text(json.dumps(timeline.trace()), encoding="utf-8"))
    print(json.dumps(timeline.to_json()) if args.json else timeline)
    return 0
