"""Scenarios planned in processes of their own, as many at once as this process has cores.

Captures cost most, and a process keeps them: scenarios with equal captures go to the same one, which waits between
questions. Where there is one core, or one capture, this process plans everything itself.

    asks, by captures ── a thread each, one for each core ──> process of these captures ── estimate, answer or error
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from threading import Event
from typing import IO, Final, Protocol

from chunkc._torch_compat.fake_job import fake_job
from chunkc.cli.subjects import quietly
from chunkc.errors import ChunkcError
from chunkc.progress import Counted, within
from chunkc.runtime.devices.cpu_affinity import usable_cores
from chunkc.scenarios.scenario import Answer, Estimate, Scenario, Scenarios, Tell

Outcome = Estimate | Answer | ChunkcError
PROGRAM: Final = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.path[:] = {path!r}; "
    "from chunkc.cli.workers import serve; serve()"
)


@dataclass(frozen=True, slots=True)
class Ask:
    """One question: ``scenario`` planned in full, or a first look at it."""

    scenario: Scenario
    in_full: bool = False

    @property
    def captures(self) -> str:
        """A key that is equal where captures are."""
        return repr(self.scenario.subject.key)

    def outcome(self, scenarios: Scenarios) -> Outcome:
        """The outcome by ``scenarios``; errors that users can mend are outcomes."""
        try:
            return scenarios.answer(self.scenario) if self.in_full else scenarios.estimate(self.scenario)
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
    num_captures = len({Ask(choice).captures for choice in choices})
    if min(num_cores, num_captures) == 1:
        yield Here(here)
        return
    processes = Processes(here.tell, num_cores)
    try:
        yield processes
    finally:
        processes.stop()


@dataclass(slots=True)
class Processes:
    """A process for all scenarios with equal captures, of which ``num_cores`` work at a time."""

    tell: Tell
    num_cores: int
    _by_captures: dict[str, _Worker] = field(default_factory=dict)
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
                worker = self._worker(key, asks[by_captures[key][0]].scenario.num_ranks)
                for number in by_captures[key]:
                    replies.put(worker.reply(number, asks[number]))
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

    def _worker(self, key: str, num_ranks: int) -> _Worker:
        if self._stopped.is_set():
            raise ChunkcError("the processes have been stopped")
        worker = self._by_captures.get(key) or _Worker.started(num_ranks)
        self._by_captures[key] = worker
        if self._stopped.is_set():
            worker.stop()
        return worker

    def stop(self) -> None:
        """End all processes, whatever they do."""
        self._stopped.set()
        for worker in list(self._by_captures.values()):
            worker.stop()


def _raise(error: Exception) -> _Reply:
    if isinstance(error, OSError):  # no memory or no process is left
        raise ChunkcError(f"no process could be started to plan in: {error}") from error
    raise error


_Reply = tuple[int, Outcome, list[str]]


@dataclass(frozen=True, slots=True)
class _Worker:
    """One process, its standard input and output."""

    process: subprocess.Popen[bytes]
    asks: IO[bytes]
    replies: IO[bytes]

    @classmethod
    def started(cls, num_ranks: int) -> _Worker:
        """A process that stands for the first of ``num_ranks``, and leaves an interrupt to this one."""
        command = [sys.executable, "-c", PROGRAM.format(path=sys.path)]
        environ = {**os.environ, "CHUNKC_PROGRESS": "0"}
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, env=environ, stdin=pipe, stdout=pipe)
        if process.stdin is None or process.stdout is None:
            raise OSError("a process with pipes has none")
        pickle.dump(num_ranks, process.stdin)
        return cls(process, process.stdin, process.stdout)

    def reply(self, number: int, ask: Ask) -> Callable[[], _Reply]:
        """Ask, and wait; what is returned gives the reply, or raises why there is none."""
        try:
            pickle.dump(ask, self.asks)
            self.asks.flush()
            outcome, lines = pickle.load(self.replies)
        except (EOFError, OSError, ValueError, pickle.UnpicklingError):  # it has ended, or its pipes are closed
            return lambda: self._missed(ask)
        return lambda: (number, outcome, lines)

    def stop(self) -> None:
        """End the process, and close its pipes."""
        self.process.kill()
        with suppress(BrokenPipeError), self.process:
            pass

    def _missed(self, ask: Ask) -> _Reply:
        code = self.process.wait()
        if code >= 0:
            raise RuntimeError(f"a process that planned {ask.scenario} ended with exit code {code}, as it says above")
        raise ChunkcError(
            f"a process that planned {ask.scenario} ended by signal {-code}. If memory was short, plan the meshes one "
            "by one: --mesh names one"
        )


def serve() -> None:
    """Answer what comes on standard input until it ends; nothing else is written to standard output."""
    asks, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    lines = list[str]()
    scenarios = Scenarios(lines.append)
    with quietly(), fake_job(pickle.load(asks)):
        while True:
            try:
                ask = pickle.load(asks)
            except EOFError:
                return
            pickle.dump((ask.outcome(scenarios), lines), replies)
            try:
                replies.flush()
            except BrokenPipeError:  # nobody is there any more
                return
            lines.clear()
