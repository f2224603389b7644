"""The command line: make a plan without running anything, look at it, simulate it; measure this machine, describe it.

    chunkc plan gpt-10b --hw v100-240g --batch 8 [--save plan.json] [--table | --full | --json]
        [--plot out.png] [--html out.html] [--trace out.json]
    chunkc explain plan.json [--full | --summary]
    chunkc simulate plan.json|MODEL [--hw profile.json] [--json] [--plot out.png] [--html out.html] [--trace out.json]
    chunkc compare gpt-10b --hw 8xv100-240g --batch 8 [--json]
    chunkc frontier --hw 8xv100-240g [--family bert] [--min-tflops 30]
    chunkc calibrate --hw emulated-64m-2g [-o profile.json] [--quick] [--json]
    chunkc env

One module for each command, with ``HELP``, ``add_arguments`` and ``run``. Results go to standard output, log lines and
everything that the user's code prints to standard error. Exit codes: 0 done, 1 the model does not fit the hardware, 2
an error, told in one line.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, Protocol

from chunkc.cli import calibrate, compare, env, explain, frontier, plan, simulate
from chunkc.cli.options import Planner
from chunkc.debug import visible
from chunkc.errors import ChunkcError

__all__ = ["COMMANDS", "Command", "main"]


class Command(Protocol):
    """What a module of a command offers. ``run`` returns the exit code."""

    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


COMMANDS: Final[Mapping[str, Command]] = MappingProxyType(
    {
        "explain": explain,
        "plan": plan,
        "simulate": simulate,
        "compare": compare,
        "frontier": frontier,
        "calibrate": calibrate,
        "env": env,
    }
)


def main(argv: Sequence[str] | None = None, *, planner: Planner | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: arguments without the program's name; ``None`` takes the process's.
        planner: what plans a model given as ``module:function``; ``None`` takes `chunkc.api.plan`.
    """
    args = _parser().parse_args(argv, argparse.Namespace(planner=planner))
    try:
        with visible(logging.getLogger("chunkc")):
            exit_code = COMMANDS[args.command].run(args)
            sys.stdout.flush()
            return exit_code
    except ChunkcError as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, for example head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="chunkc", description="Static chunk plans for training under a memory budget."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        command.add_arguments(commands.add_parser(name, help=command.HELP))
    return parser
