"""Run a contest: start its systems, give them turns, and ask them for facts and traces.

Whatever a system answers is written to the journal at once. One that fails, or is late, leaves the contest with a
record of why; the others go on.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from children import PYTHON, Child
from gpu_cases import Contest
from journal import Journal

ANSWER = "answer: "
PACKAGES = {"torchao": "torchao", "deepspeed": "deepspeed"}
"""What must be importable for a system beside torch."""
CONTESTANT = Path(__file__).with_name("gpu_contestant.py")
NUM_TRACED = 2  # steps
READY_SHARE = 0.7  # of a contest's time, after which who has not taken its first steps has lost
TRACE_S = 12.0  # that blocks leave for traces
MARGIN_S = 5.0  # that stay free, in which processes end


class LostError(Exception):
    """A system has failed or is late."""


class Runner:
    """One system's process. ``log`` gets what it says beside answers."""

    def __init__(self, command: list[str], env: Mapping[str, str], log: Path) -> None:
        self.child = Child(command, env, log, is_piped=True)
        self._commands, output = self.child.process.stdin, self.child.process.stdout
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, args=(output,), daemon=True).start()

    def tell(self, command: str) -> None:
        """Send a command.

        Raises:
            LostError: the process has ended.
        """
        try:
            self._commands.write(command + "\n")
            self._commands.flush()
        except OSError as error:
            raise LostError(f"failed before {command!r}: {error}\n{self.child.last_words()}") from error

    def answer(self, event: str, limit_s: float) -> dict[str, Any]:
        """The next answer, which is to be ``event``.

        Raises:
            LostError: none came in time, or the process has ended.
        """
        try:
            found = self._answers.get(timeout=max(0.0, limit_s))
        except queue.Empty:
            self.child.end(is_aborted=True)
            raise LostError(f"timed out: no {event!r} in {limit_s:.0f} s\n{self.child.last_words()}") from None
        if found is None:
            code = self.child.process.wait()
            raise LostError(f"failed: exit code {code} before {event!r}\n{self.child.last_words()}")
        if found.pop("event") != event:
            raise LostError(f"failed: answered {found} where {event!r} was asked")
        return found

    def _listen(self, output: IO[str]) -> None:
        with output, self.child.log.open("a") as log:
            for line in output:
                if line.startswith(ANSWER):
                    self._answers.put(json.loads(line.removeprefix(ANSWER)))
                else:
                    log.write(line)
                    log.flush()
        self._answers.put(None)


@dataclass(slots=True)
class Hall:
    """A contest while it is held.

    Attributes:
        end_s: of the monotonic clock, by which everything of it has ended; ready_s: by which it has begun.
        runners: systems that are in the contest, by name.
        seconds: of each one's latest block.
    """

    contest: Contest
    hw: str
    args: argparse.Namespace
    journal: Journal
    end_s: float
    ready_s: float
    runners: dict[str, Runner] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def left_s(self) -> float:
        """Until the end."""
        return self.end_s - time.monotonic()

    def start(self, system: str, stack: ExitStack) -> None:
        """Start one system, which ends with ``stack``."""
        package = PACKAGES.get(system)
        if package is not None and importlib.util.find_spec(package) is None:
            self.write("lost", system, why=f"not importable: {package}")
            return
        flag = ["--stand-in"] if self.args.stand_in else []
        options = ["--contest", self.contest.name, "--system", system, "--hw", self.hw, *flag]
        trace = ["--trace", str(self.trace_path(system))]
        log = self.args.out / "benchmark.log"
        runner = Runner([*PYTHON, str(CONTESTANT), *options, *trace], environment(self.args.stand_in), log)
        stack.callback(runner.child.end)
        self.runners[system] = runner

    @contextmanager
    def losing(self, system: str) -> Iterator[None]:
        """A system that fails inside of the block leaves the contest."""
        try:
            yield
        except LostError as error:
            self.runners.pop(system).child.end()
            self.write("lost", system, why=str(error))

    def write(self, kind: str, system: str, **fields: Any) -> None:
        """Into the journal, and one line for the terminal."""
        self.journal.write(kind, contest=self.contest.name, system=system, **fields)
        said = {"block": "seconds", "ready": "seconds", "trace": "busy_shares", "lost": "why"}.get(kind)
        if said is not None:
            value = fields[said]
            text = f"{value:.2f} s" if isinstance(value, float) else str(value)[-1500:]
            print(f"{self.contest.name}, {system}: {kind} {text}", flush=True)

    def trace_path(self, system: str) -> Path:
        """Where a system's trace goes."""
        model = "".join(c if c.isalnum() else "-" for c in self.contest.name)
        return Path(self.args.out) / f"trace-{model}-{system}.json.gz"


def hold(contest: Contest, hw: str, args: argparse.Namespace, journal: Journal, deadline_s: float) -> None:
    """Hold one contest, if there is time.

    Args:
        hw: the machine, by name or as a profile's path.
        deadline_s: of the monotonic clock.
    """
    left_s = min(contest.limit_s, deadline_s - time.monotonic() - MARGIN_S)
    if left_s < contest.least_s:
        journal.write("not run", contest=contest.name, why=f"{left_s:.0f} s were left, it takes {contest.least_s:.0f}")
        print(f"{contest.name}: not run, {left_s:.0f} s are left", flush=True)
        return
    now_s = time.monotonic()
    hall = Hall(contest, hw, args, journal, now_s + left_s, now_s + READY_SHARE * left_s)
    with ExitStack() as stack:
        _gather(hall, stack)
        for number in range(contest.num_rounds):
            _round(hall, number)
            if number == 0:
                _ask(hall, "facts", "facts")
        _ask(hall, f"trace {NUM_TRACED}", "trace")
        if not contest.is_trace_kept:
            for system in contest.systems:
                hall.trace_path(system).unlink(missing_ok=True)


def _gather(hall: Hall, stack: ExitStack) -> None:
    """Start all, chunkc first since it reads what is free of the GPU, and wait for their first steps."""
    device_s: dict[str, float] = {}

    def wait(system: str, event: str) -> dict[str, Any]:
        return hall.runners[system].answer(event, hall.ready_s - time.monotonic())

    first, *others = hall.contest.systems
    hall.start(first, stack)
    with hall.losing(first):
        device_s[first] = wait(first, "device")["seconds"]
    for system in others:
        hall.start(system, stack)
    for system in list(hall.runners):
        with hall.losing(system):
            if system not in device_s:
                device_s[system] = wait(system, "device")["seconds"]
            hall.write("ready", system, **wait(system, "ready"), device_seconds=device_s[system])


def _round(hall: Hall, number: int) -> None:
    """A block of each system for which there is time."""
    for system in list(hall.runners):
        if hall.left_s < TRACE_S + 1.2 * hall.seconds.get(system, 0.0):
            continue
        with hall.losing(system):
            hall.runners[system].tell(f"block {hall.contest.block}")
            found = hall.runners[system].answer("block", hall.left_s)
            hall.seconds[system] = found["seconds"]
            hall.write("block", system, round=number, load_1_min=round(os.getloadavg()[0], 2), **found)


def _ask(hall: Hall, command: str, event: str) -> None:
    """Send a command to each system, and write what it answers."""
    for system in list(hall.runners):
        with hall.losing(system):
            hall.runners[system].tell(command)
            hall.write(event, system, **hall.runners[system].answer(event, hall.left_s))


def environment(is_stand_in: bool) -> dict[str, str]:
    """Variables of every process: passive OpenMP threads, and an allocator that wastes least."""
    extra = {"OMP_WAIT_POLICY": "passive", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    if is_stand_in:
        extra["TRITON_INTERPRET"] = "1"
    return {**os.environ, **extra}
