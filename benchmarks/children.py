"""Processes that are ended with all that they started, and say where they were.

A child leads a process group. `end` first aborts the group: Python, started with ``-X faulthandler``, writes the stacks
of its threads into the log then. What is left after a grace period is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

PYTHON = (sys.executable, "-X", "faulthandler")
GRACE_S = 5.0
POLL_S = 0.05


class Child:
    """A command whose errors, and output unless it is piped, are appended to ``log``.

    Args:
        is_piped: its input and output are pipes of text, ``process.stdin`` and ``process.stdout``; who reads the
            output closes it.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path, *, is_piped: bool = False) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        self.log_start = log.stat().st_size if log.exists() else 0
        self.started_s = time.monotonic()
        with log.open("ab") as errors:
            pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": errors}
            if is_piped:
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self.process: subprocess.Popen[Any] = subprocess.Popen(
                command, env=dict(env), stderr=errors, process_group=0, **pipes
            )

    @property
    def seconds(self) -> float:
        """Since its start."""
        return time.monotonic() - self.started_s

    def wait(self, limit_s: float, watch: Callable[[], bool] = lambda: True) -> int | None:
        """Its exit code; None once ``limit_s`` are over or ``watch``, called all the time, returns False."""
        deadline_s = time.monotonic() + limit_s
        while True:
            code = self.process.poll()
            if code is not None:
                return code
            if not watch() or time.monotonic() > deadline_s:
                return None
            time.sleep(POLL_S)

    def end(self, *, is_aborted: bool = False) -> None:
        """End what is left of the group; ``is_aborted``: with stacks first."""
        if is_aborted and self.process.poll() is None:
            self._signal(signal.SIGABRT)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE_S)
        self._signal(signal.SIGKILL)
        self.process.wait()
        if self.process.stdin is not None:
            with suppress(OSError):  # what was not written yet has no reader any more
                self.process.stdin.close()

    def last_words(self, num_chars: int = 4000) -> str:
        """The stack of the thread that failed or was interrupted, from its log; else the log's end."""
        with self.log.open("rb") as file:
            file.seek(self.log_start)
            text = file.read().decode(errors="replace")
        start = text.rfind("Fatal Python error")
        if start < 0:
            return text[-num_chars:]
        error, stacks = text[start:].split("\n", 1)
        return f"{error}\n{stacks[max(0, stacks.find('Current thread')) :]}"[:num_chars]

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # nothing of it is left
            os.killpg(self.process.pid, number)
