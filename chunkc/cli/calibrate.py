"""``chunkc calibrate``: measure this machine's copies, updates and arithmetic into a profile."""

from __future__ import annotations

import argparse
import importlib
import json

from chunkc.cli.options import profile_path, save
from chunkc.cli.output import show, tell

HELP = "measure this machine's copies, updates and arithmetic"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hw", default="auto", help="this machine, or an emulated device such as emulated-64m-2g (default: auto)"
    )
    parser.add_argument(
        "-o", "--output", type=profile_path, metavar="profile.json", help="write the profile, which hw= takes"
    )
    parser.add_argument("--quick", action="store_true", help="a few seconds only; the spread is larger")
    parser.add_argument("--json", action="store_true", help="print the profile as one JSON object instead of tables")


def run(args: argparse.Namespace) -> int:
    """The package is imported when it is needed: the other commands start without it."""
    calibration = importlib.import_module("chunkc.calibrate")
    effort = calibration.QUICK if args.quick else calibration.THOROUGH
    hw = calibration.calibrate(args.hw, effort, tell)
    if args.output:
        save(hw, args.output)
    show(json.dumps(hw.profile()) if args.json else calibration.tables(hw, hw.rates))
    return 0
