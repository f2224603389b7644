"""One system of a contest in a process of its own: blocks of steps, facts, a trace on demand.

    python benchmarks/gpu_contestant.py --contest NAME --system SYSTEM --hw HW [--stand-in] [--trace PATH]

Commands come as lines on standard input: ``block N``, ``facts``, ``trace N``; the process ends with its input. Answers
go to standard output as lines of JSON behind `ANSWER`, among whatever libraries print: ``device`` when the model stands
and what is free of the GPU has been read, ``ready`` after the first steps, then one for each command.

A block ends when nothing is pending, updates included. torch's allocator is told the contest's limit.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_cases import Contest, contest_named
from gpu_contest import ANSWER
from gpu_models import Batch, batches
from gpu_systems import SYSTEMS, System
from gpu_trace import trace

import chunkc

NUM_WARM_UP = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Set up, answer until the input ends, and return the exit code."""
    args = parse(argv)
    contest = contest_named(args.contest, is_stand_in=args.stand_in)
    contestant = Contestant(contest, args.system, machine(contest, args.hw))
    for line in sys.stdin:
        command, *numbers = line.split()
        if command == "block":
            answer(command, **contestant.block(int(numbers[0])))
        elif command == "facts":
            answer(command, **contestant.facts())
        elif command == "trace":
            answer(command, **contestant.trace(int(numbers[0]), args.trace))
        else:
            raise ValueError(f"no such command: {line!r}")
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One system of a contest of the benchmark of the GPU.")
    parser.add_argument("--contest", required=True)
    parser.add_argument("--system", required=True, choices=sorted(SYSTEMS))
    parser.add_argument("--hw", required=True, help="the machine whose memory the contest limits: a name or a profile")
    parser.add_argument("--stand-in", action="store_true")
    parser.add_argument("--trace", type=Path, help="file of the trace, .json.gz")
    return parser.parse_args(argv)


def machine(contest: Contest, hw: str) -> chunkc.Hardware:
    """``hw`` with the contest's memory."""
    found = chunkc.Hardware.of(hw)
    sizes = {"gpu_memory_nbytes": contest.device_nbytes, "host_memory_nbytes": contest.host_nbytes}
    return replace(found, name=f"{found}, {contest.name}", **sizes)


def answer(event: str, **fields: Any) -> None:
    """One line for whoever started this."""
    print(ANSWER + json.dumps({"event": event, **fields}), flush=True)


class Contestant:
    """A system that has taken its first steps, and its batches."""

    def __init__(self, contest: Contest, name: str, hw: chunkc.Hardware) -> None:
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self._device.type == "cuda":
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, contest.device_nbytes / total))
        started_s = time.perf_counter()
        torch.manual_seed(0)
        self._system: System = SYSTEMS[name](contest.shape, self._device, hw)
        answer("device", seconds=round(time.perf_counter() - started_s, 2))
        self._batches: list[Batch] = batches(contest.shape, 4, self._device)
        self._first_loss = float(self._system.step(self._batches[0]))
        for batch in self._batches[1:NUM_WARM_UP]:
            self._system.step(batch)
        self._system.finish()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        answer("ready", seconds=round(time.perf_counter() - started_s, 2), settings=self._system.settings)

    def block(self, num_steps: int) -> dict[str, Any]:
        """So many steps until nothing is pending."""
        started_s = time.perf_counter()
        self._steps(num_steps)
        return {"num_steps": num_steps, "seconds": time.perf_counter() - started_s}

    def facts(self) -> dict[str, Any]:
        """Losses, memory, and what the system tells of itself."""
        losses = {"first": self._first_loss, "last": float(self._system.step(self._batches[0]))}
        self._system.finish()
        return {"losses": losses, **self._memory(), **self._system.facts()}

    def trace(self, num_steps: int, path: Path) -> dict[str, Any]:
        """Shares of so many steps in which each resource was busy; the trace stands in ``path``."""
        self._steps(1)
        return {"busy_shares": trace(partial(self._steps, num_steps), path), "num_steps": num_steps}

    def _steps(self, num_steps: int) -> None:
        for number in range(num_steps):
            self._system.step(self._batches[number % len(self._batches)])
        self._system.finish()

    def _memory(self) -> dict[str, int]:
        if self._device.type != "cuda":
            return {}
        free, total = torch.cuda.mem_get_info()
        return {
            "peak_reserved_nbytes": torch.cuda.max_memory_reserved(),
            "peak_allocated_nbytes": torch.cuda.max_memory_allocated(),
            "used_nbytes_of_all_processes": total - free,
        }


if __name__ == "__main__":
    sys.exit(main())
