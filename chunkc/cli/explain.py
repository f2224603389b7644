"""``chunkc explain``: a saved plan as a table, as numbers, or in full."""

from __future__ import annotations

import argparse

from chunkc.cli.options import load_plan
from chunkc.cli.output import show

HELP = "show a saved plan"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="plan.json", help="a file that plan.save() wrote")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--full", action="store_true", help="everything: every action and every moment")
    form.add_argument("--summary", action="store_true", help="the numbers: memory, chunks, bytes moved")


def run(args: argparse.Namespace) -> int:
    plan = load_plan(args.path)
    show(plan.text() if args.full else plan.summary() if args.summary else plan)
    return 0
