"""``chunkc env``: what a bug report should say of this machine."""

from __future__ import annotations

import argparse

from chunkc.cli.output import show
from chunkc.report.columns import wrapped
from chunkc.report.environment import environment

HELP = "versions, processor, memory, GPUs and variables, for a bug report"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It takes none."""


def run(args: argparse.Namespace) -> int:
    rows = environment()
    width = max(len(name) for name, _ in rows)
    show("\n".join(wrapped(f"{name:<{width}}  {value}", " " * (width + 2)) for name, value in rows))
    return 0
