"""Scenarios planned in processes of their own, as many at once as this process has cores.

Captures cost most, and a process keeps them: scenarios with equal captures go to the same one, which waits between
questions (`chunkc.cli.serving`). Where there is one core, or one capture, this process plans everything itself.

    asks, by captures ── a thread each, one for each core ──> process of these captures ── estimate, answer or error
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from queue import SimpleQueue
from threading import Event
from typing import IO, Any, Final, Protocol

from chunkc.cli.serving import Ended, Start
from chunkc.errors import ChunkcError
from chunkc.progress import Counted, within
from chunkc.runtime.devices.cpu_affinity import usable_cores
from chunkc.scenarios.scenario import Answer, Estimate, Scenario, Scenarios, Tell

Outcome = Estimate | Answer | ChunkcError
PROGRAM: Final = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.path[:] = {path!r}; "
    "from chunkc.cli.serving import serve_all; serve_all()"
)


class Effort(Enum):
    """How long to search: a first look, all shares of layers that are computed again, or for a plan."""

    LOOK = 1
    SHARES = 2
    PLAN = 3


@dataclass(frozen=True, slots=True)
class Ask:
    """One question: the best plan of ``scenario``, or an estimate."""

    scenario: Scenario
    effort: Effort = Effort.LOOK

    @property
    def captures(self) -> str:
        """A key that is equal where captures are."""
        return repr(self.scenario.subject.key)

    def outcome(self, scenarios: Scenarios) -> Outcome:
        """The outcome by ``scenarios``; errors that users can mend are outcomes."""
        try:
            if self.effort is Effort.PLAN:
                return scenarios.answer(self.scenario)
            return scenarios.estimate(self.scenario, tries_all=self.effort is Effort.SHARES)
        except ChunkcError as error:
            return error


class Workers(Protocol):
    """Interface of what plans several scenarios."""

    def outcomes(self, asks: Sequence[Ask], text: str) -> list[Outcome]:
        """Plan all of ``asks``; lines of progress begin with ``text``."""
        ...


@dataclass(frozen=True, slots=True)
class Here:
    """Plans one scenario after another in this process."""

    scenarios: Scenarios

    def outcomes(self, asks: Sequence[Ask], text: str) -> list[Outcome]:
        found = list[Outcome]()
        for number, ask in enumerate(asks, 1):
            with within(f"{text} {number}/{len(asks)}"):
                found.append(ask.outcome(self.scenarios))
        return found


@contextmanager
def workers(choices: Sequence[Scenario], here: Scenarios, num_cores: int | None = None) -> Iterator[Workers]:
    """Give what plans ``choices`` on ``num_cores`` (default: those of this process) within the block.

    ``here`` plans them where one process is enough, and has the ``tell`` of all.
    """
    num_cores = num_cores or len(usable_cores())
    captures = list(dict.fromkeys(Ask(choice).captures for choice in choices))
    if min(num_cores, len(captures)) == 1:
        yield Here(here)
        return
    processes = Processes(here.tell, num_cores, _Family.of(choices[0], captures))
    try:
        yield processes
    finally:
        processes.stop()


@dataclass(slots=True)
class Processes:
    """A process for all scenarios with equal captures, of which ``num_cores`` work at a time."""

    tell: Tell
    num_cores: int
    _family: _Family
    _stopped: Event = field(default_factory=Event)

    def outcomes(self, asks: Sequence[Ask], text: str) -> list[Outcome]:
        by_captures: dict[str, list[int]] = {}
        for number, ask in enumerate(asks):
            by_captures.setdefault(ask.captures, []).append(number)
        if not asks:
            return []
        num_at_once = min(self.num_cores, len(by_captures))
        counted = Counted(text, len(asks), "meshes", f"{num_at_once} at a time")
        replies, found = SimpleQueue[Callable[[], _Reply]](), dict[int, Outcome]()

        def ask_all(key: str) -> None:
            try:
                for number in by_captures[key]:
                    if self._stopped.is_set():
                        raise ChunkcError("the processes have been stopped")
                    replies.put(self._family.reply(key, number, asks[number]))
            except Exception as error:  # whatever it is: somebody waits for the reply
                replies.put(partial(_raise, error))

        with ThreadPoolExecutor(num_at_once) as threads:
            try:
                for key in by_captures:
                    threads.submit(ask_all, key)
                while len(found) < len(asks):
                    number, outcome, lines = replies.get()()
                    found[number] = outcome
                    for line in lines:
                        self.tell(line)
                    counted.advance()
            except BaseException:
                self.stop()  # threads wait for replies that nobody needs
                raise
        return [found[number] for number in range(len(asks))]

    def stop(self) -> None:
        """End all processes, whatever they do."""
        self._stopped.set()
        self._family.stop()


def _raise(error: Exception) -> _Reply:
    raise error


_Reply = tuple[int, Outcome, list[str]]


@dataclass(frozen=True, slots=True)
class _Pipes:
    """Pipes to one process: for asks, from replies, and from what says how it ended."""

    asks: IO[bytes]
    replies: IO[bytes]
    end: IO[bytes]


@dataclass(frozen=True, slots=True)
class _Family:
    """The process that forks all others, and pipes to them by what they capture."""

    process: subprocess.Popen[bytes]
    pipes: dict[str, _Pipes]

    @classmethod
    def of(cls, first: Scenario, captures: Sequence[str]) -> _Family:
        """Processes that stand for the first rank of ``first``, and leave an interrupt to this one.

        ChunkcError when there is no memory or process left.
        """
        command = [sys.executable, "-c", PROGRAM.format(path=sys.path)]
        environ = {**os.environ, "CHUNKC_PROGRESS": "0"}
        with ExitStack() as undo:
            with ExitStack() as theirs:
                try:
                    pairs = {key: [_pipe(theirs, undo, mode) for mode in ("wb", "rb", "rb")] for key in captures}
                    pipes = {key: _Pipes(*(file for _, file in pair)) for key, pair in pairs.items()}
                    passed = [(asks, replies, end) for (asks, _), (replies, _), (end, _) in pairs.values()]
                    start = pickle.dumps(Start(first.model, first.num_ranks, passed))
                    fds, stdin = [fd for group in passed for fd in group], subprocess.PIPE
                    process = subprocess.Popen(command, env=environ, stdin=stdin, pass_fds=fds, start_new_session=True)
                except OSError as error:
                    raise ChunkcError(f"no process could be started to plan in: {error}") from error
            family = cls(process, pipes)
            undo.callback(family.stop)
            if process.stdin is not None:
                with suppress(BrokenPipeError), process.stdin:  # where it has ended, whoever asks is told
                    process.stdin.write(start)
            undo.pop_all()
        return family

    def reply(self, key: str, number: int, ask: Ask) -> Callable[[], _Reply]:
        """Ask, and wait; what is returned gives the reply, or raises why there is none."""
        pipes = self.pipes[key]
        with suppress(OSError, ValueError):  # it has ended, as its end says, or the pipe is closed
            pickle.dump(ask, pipes.asks)
            pipes.asks.flush()
        try:
            outcome, lines = pickle.load(pipes.replies)
        except (EOFError, OSError, ValueError, pickle.UnpicklingError):  # there is none, or a part
            ended = self._end_of(pipes)
            return lambda: _missed(ask, ended)
        return lambda: (number, outcome, lines)

    def _end_of(self, pipes: _Pipes) -> Ended:
        """How the process of ``pipes`` ended, or the one that forked it."""
        try:
            ended: Ended = pickle.load(pipes.end)
        except (EOFError, OSError, ValueError, pickle.UnpicklingError):
            return Ended(self.process.wait())
        return ended

    def stop(self) -> None:
        """End all processes, and close their pipes."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipes in self.pipes.values():
            for pipe in (pipes.asks, pipes.replies, pipes.end):
                with suppress(BrokenPipeError):
                    pipe.close()


def _pipe(theirs: ExitStack, undo: ExitStack, mode: str) -> tuple[int, IO[Any]]:
    """A pipe's end of another process, which ``theirs`` closes, and this one's, opened in ``mode``."""
    read, write = os.pipe()
    other, own = (read, write) if mode == "wb" else (write, read)
    theirs.callback(os.close, other)
    file = os.fdopen(own, mode)
    undo.callback(file.close)
    return other, file


def _missed(ask: Ask, ended: Ended) -> _Reply:
    if ended.refusal:
        raise ChunkcError(f"no process could be started to plan in: {ended.refusal}")
    if ended.exit_code >= 0:
        raise RuntimeError(
            f"a process that planned {ask.scenario} ended with exit code {ended.exit_code}, as it says above"
        )
    raise ChunkcError(
        f"a process that planned {ask.scenario} ended by signal {-ended.exit_code}. If memory was short, plan the "
        "meshes one by one: --mesh names one"
    )
