"""The command line: make, show and simulate plans without running them; measure this machine.

    chunkc plan gpt-10b --hw v100-240g --batch 8 [--save plan.json] [--table | --full | --json]
        [--plot out.png] [--html out.html] [--trace out.json]
    chunkc explain plan.json [--full | --summary]
    chunkc simulate plan.json|MODEL [--hw profile.json] [--json] [--plot out.png] [--html out.html] [--trace out.json]
    chunkc compare gpt-10b --hw 8xv100-240g --batch 8 [--json]
    chunkc frontier --hw 8xv100-240g [--family bert] [--min-tflops 30]
    chunkc calibrate --hw emulated-64m-2g [-o profile.json] [--quick] [--json]
    chunkc env
    chunkc --version

One module for each command, with ``HELP``, ``add_arguments`` and ``run``. Results go to standard output, log lines and
everything that the user's code prints to standard error. Exit codes: 0 done, 1 the model does not fit the hardware, 2
an error, told in one line (a result that cannot be written is one), 3 a mistake in chunkc, told with its traceback, 130
interrupted.
"""

from __future__ import annotations

import argparse
import logging
import traceback
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, NoReturn, Protocol

import chunkc
from chunkc.cli import calibrate, compare, env, explain, frontier, plan, simulate
from chunkc.cli.options import Planner
from chunkc.cli.output import one_line, show, tell
from chunkc.compiler.debug import visible
from chunkc.distributed.job import is_first_rank
from chunkc.errors import ChunkcError
from chunkc.progress import shown

__all__ = ["COMMANDS", "Command", "main"]


class Command(Protocol):
    """Interface of the module of a command; ``run`` returns the exit code."""

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
    try:
        args = _parser().parse_args(argv, argparse.Namespace(planner=planner))
        with visible(logging.getLogger("chunkc")), shown(is_first_rank=is_first_rank()):
            return COMMANDS[args.command].run(args)
    except ChunkcError as error:
        tell(one_line(f"error: {error}"))
        return 2
    except KeyboardInterrupt:
        tell("interrupted")
        return 130
    except Exception:  # Python's own exit status for it, 1, says that a model does not fit
        tell(traceback.format_exc().rstrip())
        tell("error: this is a mistake in chunkc; please report it with the lines above and what `chunkc env` prints")
        return 3


class _Parser(argparse.ArgumentParser):
    """A parser whose help is a result, and whose complaints are written as all others are."""

    def print_help(self, file: object = None) -> None:
        show(self.format_help().rstrip("\n"))

    def error(self, message: str) -> NoReturn:
        tell(f"{self.format_usage()}{self.prog}: error: {message}")
        raise SystemExit(2)


class _ShowVersion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        show(f"chunkc {chunkc.__version__}")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="chunkc", description="Static chunk plans for training under a memory budget.")
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        command.add_arguments(commands.add_parser(name, help=command.HELP))
    return parser
