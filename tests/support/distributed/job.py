"""Jobs of several gloo ranks on this machine, one process each.

`Pool` keeps its processes for many calls, because importing torch and transformers costs each of them seconds:

    pool.run(function, *args)         what the function gave on every rank; raises when it raised on any
    pool.outcomes(function, *args)    what it gave or raised, rank by rank

Functions are importable by name from the folders on ``sys.path``, results can be pickled. After a call that raised on
a rank, or came to no end within its deadline, the processes are thrown away and the next call begins with new ones. At
a deadline the stacks of the ranks that hang are part of the message.

`only_call` starts processes for one call that may kill, end or hang them, and `Job.ends` tells how they ended.

Processes are forked from one that has imported what they need (`job_preload`).
"""

import os
import pickle
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from job_rank import Call, Failure, Place, RankOutcome, main

START_TIMEOUT_S = 120.0
CALL_TIMEOUT_S = 180.0
GROUP_TIMEOUT_S = 60.0
GRACE_S = 30.0
"""How long a call may still take after it raised on one rank: the others should notice."""
_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1"} | (
    {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
)


class JobError(AssertionError):
    """Ranks raised, ended or hang; the message says which and where."""


@cache
def _context() -> ForkServerContext:
    """Starts processes by forking one that has imported `job_preload`, with the environment and paths of now."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["job_preload"])
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    os.environ.update(_ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return context


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How the process of a rank ended, ``after_s`` seconds behind the latest `Job.kill` or report.

    ``exit_code`` is None if it had to be killed; ``log`` is what it wrote to stdout and stderr.
    """

    exit_code: int | None
    after_s: float
    log: str


class Job:
    """Processes of one job that have joined their process group; ``store`` "tcp" is gone when rank 0 ends."""

    def __init__(self, num_ranks: int, group_timeout_s: float = GROUP_TIMEOUT_S, store: str = "file") -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="chunkc-job-")
        self._started_s = time.monotonic()
        self._told: list[str] = [""] * num_ranks
        self._connections: list[Connection] = []
        self._processes: list[BaseProcess] = []
        url = f"tcp://127.0.0.1:{_free_port()}" if store == "tcp" else f"file://{self._directory.name}/store"
        for rank in range(num_ranks):
            self._start(Place(rank, num_ranks, url, group_timeout_s, str(self._log_of(rank))))
        try:
            if any(answer != b"joined" for answer in self._answers(START_TIMEOUT_S)):
                raise JobError(f"ranks did not come up:\n{self._logs()}")
        except BaseException:
            self.close()
            raise

    def _start(self, place: Place) -> None:
        context = _context()
        ours, theirs = context.Pipe()
        process = context.Process(target=main, args=(theirs, place), daemon=True)
        process.start()
        theirs.close()
        self._processes.append(process)
        self._connections.append(ours)

    def _log_of(self, rank: int) -> Path:
        return Path(self._directory.name) / f"rank{rank}.log"

    def log(self, rank: int, most: int = 6000) -> str:
        path = self._log_of(rank)
        return path.read_text(errors="replace")[-most:] if path.exists() else ""

    def _logs(self) -> str:
        return "\n".join(f"--- rank {rank} wrote:\n{self.log(rank)}" for rank in range(len(self._processes)))

    # Calls of a pool.

    def outcomes(self, call: Call, timeout_s: float) -> list[RankOutcome]:
        """Carry out ``call`` on all ranks.

        Raises:
            JobError: when one comes to no end, with its stacks.
        """
        self._send(call)
        answers = self._answers(timeout_s)
        return [self._ended(rank) if a is None else pickle.loads(a) for rank, a in enumerate(answers)]

    def _send(self, call: Call) -> None:
        data = pickle.dumps(call)
        for connection in self._connections:
            try:
                connection.send_bytes(data)
            except OSError:
                continue  # its process has ended; reading finds that

    def _answers(self, timeout_s: float) -> list[bytes | None]:
        found: dict[int, bytes | None] = {}
        until = time.monotonic() + timeout_s
        while len(found) < len(self._connections):
            waiting = [c for rank, c in enumerate(self._connections) if rank not in found]
            ready = wait(waiting, max(0.0, until - time.monotonic()))
            if not ready:
                hanging = [rank for rank in range(len(self._connections)) if rank not in found]
                raise JobError(self._hang_message(hanging, found))
            for connection in ready:
                rank = self._connections.index(connection)  # type: ignore[arg-type]
                found[rank] = _received(self._connections[rank])
                if _is_error(found[rank]):
                    until = min(until, time.monotonic() + GRACE_S)
        return [found[rank] for rank in range(len(self._connections))]

    def _hang_message(self, hanging: list[int], found: dict[int, bytes | None]) -> str:
        for rank in hanging:
            self._ask_for_stacks(rank)
        time.sleep(1)
        texts = [f"ranks {hanging} came to no end; their stacks:"]
        texts += [f"--- rank {rank}:\n{self.log(rank)}" for rank in hanging]
        for rank, answer in sorted(found.items()):
            if answer is None:
                texts.append(f"--- {self._ended(rank).error}")
            elif _is_error(answer):
                texts.append(f"--- rank {rank} raised:\n{pickle.loads(answer).error.trace}")
        return "\n".join(texts)

    def _ended(self, rank: int) -> RankOutcome:
        process = self._processes[rank]
        process.join(START_TIMEOUT_S)
        text = f"rank {rank} ended with exit code {process.exitcode}"
        return RankOutcome(error=Failure("Ended", text, self.log(rank)))

    def _ask_for_stacks(self, rank: int) -> None:
        process = self._processes[rank]
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, signal.SIGUSR1)

    # The only call of a job.

    def begin(self, function: Callable[..., Any], *args: Any) -> None:
        self._send(Call(function, args, is_only=True))
        self._started_s = time.monotonic()

    def wait_for(self, rank: int, text: str, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        while text not in self._told[rank]:
            if not self._connections[rank].poll(max(0.0, until - time.monotonic())):
                raise JobError(f"rank {rank} never reported {text!r}:\n{self._logs()}")
            message = _received(self._connections[rank])
            if message is None:
                raise JobError(f"rank {rank} ended before it reported {text!r}:\n{self._logs()}")
            self._told[rank] += message.decode() + "\n"
            self._started_s = time.monotonic()

    def told(self, rank: int) -> str:
        return self._told[rank]

    def has_ended(self, rank: int) -> bool:
        return self._processes[rank].exitcode is not None

    def kill(self, rank: int) -> None:
        self._processes[rank].kill()
        self._started_s = time.monotonic()

    def ends(self, timeout_s: float) -> list[RankEnd]:
        ended_s: dict[int, float] = {}
        until = time.monotonic() + timeout_s
        while len(ended_s) < len(self._processes) and time.monotonic() < until:
            for rank, process in enumerate(self._processes):
                if rank not in ended_s and process.exitcode is not None:
                    ended_s[rank] = time.monotonic() - self._started_s
            time.sleep(0.02)
        codes = [process.exitcode for process in self._processes]
        for rank in range(len(codes)):
            self._ask_for_stacks(rank)
        if None in codes:
            time.sleep(1)
        after_s = [ended_s.get(rank, float("inf")) for rank in range(len(codes))]
        return [RankEnd(code, after_s[rank], self.log(rank, 30_000)) for rank, code in enumerate(codes)]

    def close(self, patience_s: float = 10.0) -> None:
        """End all processes, by force those that do not end within ``patience_s``; idempotent."""
        for connection in self._connections:
            connection.close()
        until = time.monotonic() + patience_s
        for process in self._processes:
            process.join(max(0.0, until - time.monotonic()))
            if process.exitcode is None:
                process.kill()
                process.join()
        self._directory.cleanup()


class Pool:
    """See the module's text. Processes start with the first call."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.num_started = 0
        self._job: Job | None = None

    def outcomes(
        self, function: Callable[..., Any], *args: Any, timeout_s: float = CALL_TIMEOUT_S
    ) -> list[RankOutcome]:
        """What ``function(*args)`` gave or raised, rank by rank.

        Raises:
            JobError: when a rank comes to no end.
        """
        if self._job is None:
            self._job = Job(self.num_ranks)
            self.num_started += 1
        try:
            found = self._job.outcomes(Call(function, args), timeout_s)
        except BaseException:
            self.discard(patience_s=0.0)
            raise
        if any(outcome.error is not None for outcome in found):
            self.discard(patience_s=0.0)
        return found

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = CALL_TIMEOUT_S) -> list[Any]:
        """What ``function(*args)`` gave, rank by rank.

        Raises:
            JobError: when it raised on any rank, or a rank comes to no end.
        """
        found = self.outcomes(function, *args, timeout_s=timeout_s)
        failed = [(rank, outcome.error) for rank, outcome in enumerate(found) if outcome.error is not None]
        if failed:
            raise JobError("\n".join(f"--- rank {rank} raised {e.kind}: {e.text}\n{e.trace}" for rank, e in failed))
        return [outcome.value for outcome in found]

    def discard(self, patience_s: float = 10.0) -> None:
        if self._job is not None:
            self._job.close(patience_s)
            self._job = None


@contextmanager
def only_call(
    num_ranks: int, function: Callable[..., Any], *args: Any, group_timeout_s: float, store: str = "file"
) -> Iterator[Job]:
    """A job of its own that carries out ``function(report, *args)`` and ends."""
    job = Job(num_ranks, group_timeout_s, store)
    try:
        job.begin(function, *args)
        yield job
    finally:
        job.close(patience_s=0.0)


def _received(connection: Connection) -> bytes | None:
    try:
        return connection.recv_bytes()
    except (EOFError, ConnectionError):
        return None


def _is_error(answer: bytes | None) -> bool:
    if answer is None:
        return True
    return answer != b"joined" and pickle.loads(answer).error is not None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
