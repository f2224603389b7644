"""Processes that answer asks, forked from one that has imported what captures need.

Imports take as long as a capture of a few layers. So one process does them and then forks itself, once for each set of
pipes, before anything runs in it. When a process has ended, the one that forked it writes how, to a pipe of its own:
a reply may have been cut short.

    process that plans ── Start ──> this one ── fork ──> one for each set of pipes: ask ──> reply, until asks end
                       <─────────────── Ended ──────────────┘
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from chunkc._torch_compat.fake_job import fake_job
from chunkc._torch_compat.inductor import import_capture
from chunkc.cli.subjects import quietly
from chunkc.errors import ChunkcError
from chunkc.scenarios.models import Transformer
from chunkc.scenarios.scenario import Scenarios

Pipes = Sequence[tuple[int, int, int]]
"""File descriptors of each process: to read asks, to write replies, and to write how it ended."""


@dataclass(frozen=True, slots=True)
class Start:
    """The first message: each process stands for rank 0 of ``num_ranks``, and captures ``model``."""

    model: Transformer
    num_ranks: int
    pipes: Pipes


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended: an exit code as of `subprocess.Popen`, or the system's ``refusal`` to start it."""

    exit_code: int = 0
    refusal: str = ""


def serve_all() -> None:
    """Fork the processes that standard input asks for, and wait for their ends."""
    start: Start = pickle.load(sys.stdin.buffer)
    os.dup2(2, 1)  # replies have pipes of their own
    with quietly():
        import_capture()
        with suppress(ChunkcError):  # which is the outcome of asks
            start.model.build()  # imports its library
        fork_each(start.pipes, lambda asks, replies: serve(asks, replies, start.num_ranks))


def fork_each(pipes: Pipes, serve: Callable[[IO[bytes], IO[bytes]], None]) -> None:
    """Call ``serve`` in a process for each of ``pipes``, and write how each ended."""
    left, running = list(pipes), dict[int, int]()
    while left:
        asks, replies, end = left.pop(0)
        try:
            process = os.fork()
        except OSError as error:  # no memory or no process is left
            _write_end(end, Ended(refusal=str(error)))
        else:
            if process == 0:
                for other in (end, *(fd for fds in left for fd in fds), *running.values()):
                    os.close(other)  # their readers wait until all who could write have ended
                _serve_and_exit(serve, asks, replies)
            running[process] = end
        os.close(asks)
        os.close(replies)
    while running:
        process, status = os.wait()
        _write_end(running.pop(process), Ended(os.waitstatus_to_exitcode(status)))


def _write_end(end: int, ended: Ended) -> None:
    with suppress(BrokenPipeError), os.fdopen(end, "wb") as file:
        pickle.dump(ended, file)


def _serve_and_exit(serve: Callable[[IO[bytes], IO[bytes]], None], asks: int, replies: int) -> None:
    """Never return: what stands behind a fork is the other process's."""
    exit_code = 1
    try:
        serve(os.fdopen(asks, "rb"), os.fdopen(replies, "wb"))
        exit_code = 0
    except BaseException:  # whatever it is: the process ends here, and says why
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(exit_code)


def serve(asks: IO[bytes], replies: IO[bytes], num_ranks: int) -> None:
    """Answer ``asks`` until they end."""
    lines = list[str]()
    scenarios = Scenarios(lines.append)
    with fake_job(num_ranks):
        while True:
            try:
                ask = pickle.load(asks)
            except EOFError:
                return
            outcome = ask.outcome(scenarios)
            try:
                pickle.dump((outcome, lines), replies)
                replies.flush()
            except BrokenPipeError:  # nobody is there any more
                return
            lines.clear()
