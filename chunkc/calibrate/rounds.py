"""Rounds: every subject once, in turn, over memory of its own.

Another program that runs for five seconds then spoils one round of each subject, rather than all of one. Every round
takes memory anew, because a figure depends on the pages it got.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import combinations, product
from typing import Final

from chunkc.calibrate import activities
from chunkc.calibrate.activities import Activity
from chunkc.calibrate.memory import Regions, Scale, Shares, regions
from chunkc.calibrate.timing import Length, Timer
from chunkc.hardware.profile import of_8bit_states
from chunkc.ir.actions import Stream
from chunkc.runtime.update.rules import ADAM, ADAM_8BIT

TOGETHER: Final = (Stream.COMPUTE, Stream.CPU, Stream.D2H, Stream.H2D)


@dataclass(frozen=True, slots=True)
class Subject:
    """One thing that is measured, with the `amount` (bytes, parameters, operations) of a piece.

    Its `size` is in bytes, elements, rows or tokens, as the name implies; 0 where there is none.
    """

    name: str
    size: int = 0
    unit: str = "us"
    amount: float = 0.0


Samples = dict[Subject, list[float]]


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure.

    Attributes:
        num_rounds: rounds over which medians and spreads are taken.
        num_batches: batches of one subject in a round, of which the fastest counts.
        max_s: seconds after which no further round begins, once there are `min_rounds`.
    """

    num_rounds: int = 15
    num_batches: int = 8
    batch_ms: float = 2.0
    max_s: float = 50.0
    min_rounds: int = 7


THOROUGH: Final = Effort()
QUICK: Final = Effort(num_rounds=7, num_batches=3, batch_ms=1.0)


@dataclass(slots=True)
class Sampler:
    """Measures rounds and keeps their values by subject, in microseconds or as factors.

    The length of an activity is settled when it is first met.
    """

    timer: Timer
    scale: Scale
    shares: Shares
    samples: Samples = field(default_factory=dict)
    _lengths: dict[Subject, Length] = field(default_factory=dict)

    def warm_up(self) -> None:
        """A round that does not count: libraries start, threads are made, batches get their length."""
        self.round()
        self.samples.clear()

    def round(self) -> None:
        device = self.timer.device
        with regions(device, self.shares) as memory:
            for subject, activity in self._alone(memory):
                self._note(subject, self.timer.time_us(activity, self._length(subject, activity)))
            for stream in (Stream.COMPUTE, Stream.H2D):
                self._note(Subject(f"launch {stream}"), self.timer.launch_us(stream))
            self._note(Subject("handoff"), self.timer.handoff_us())
            self._together(memory)

    def _note(self, subject: Subject, value: float) -> None:
        self.samples.setdefault(subject, []).append(value)

    def _length(self, subject: Subject, activity: Activity) -> Length:
        if subject not in self._lengths:
            self._lengths[subject] = self.timer.length(activity)
        return self._lengths[subject]

    def _alone(self, memory: Regions) -> Iterator[tuple[Subject, Activity]]:
        for stream in (Stream.H2D, Stream.D2H):
            for nbytes in activities.copy_sizes(memory):
                yield Subject(f"copy {stream}", nbytes, amount=nbytes), activities.copy(memory, stream, nbytes)
        for dtype in self.scale.dtypes:
            name = str(dtype).removeprefix("torch.")
            for stream, rule in product((Stream.CPU, Stream.COMPUTE), (ADAM, ADAM_8BIT)):
                activity, numel = activities.update(self.timer.device, memory, self.scale, stream, dtype, rule)
                rate_name = of_8bit_states(name) if rule is ADAM_8BIT else name
                yield Subject(f"update {stream} {rate_name}", numel, amount=numel), activity
            for rows in activities.matmul_sizes(memory, self.scale):
                subject = Subject(f"matmul {name}", rows, amount=2 * rows**3)
                yield subject, activities.matmul(memory, dtype, rows)
            for tokens in activities.attention_tokens(memory, self.scale):
                num_operations = 2 * tokens**2 * activities.NUM_HEADS * activities.HEAD_NUMEL
                subject = Subject(f"attention {name}", tokens, amount=num_operations)
                yield subject, activities.attention(memory, dtype, tokens)
        device_copy, nbytes = activities.device_copy(memory)
        yield Subject("copy within device", nbytes // 2, amount=nbytes), device_copy

    def _together(self, memory: Regions) -> None:
        """Each activity beside each set of the others, as a multiple of its time alone just before."""
        activity_of = self._concurrent(memory)
        for of in TOGETHER:
            length = self._length(Subject(f"beside others {of}"), activity_of[of])
            alone_us = self.timer.time_us(activity_of[of], length)
            for by in subsets(stream for stream in TOGETHER if stream is not of):
                others = [activity_of[stream] for stream in by]
                under_us = self.timer.time_under_us(activity_of[of], others, length)
                self._note(slowdown_subject(of, by), under_us / alone_us)

    def _concurrent(self, memory: Regions) -> dict[Stream, Activity]:
        """The activity that runs on each stream beside the others, in the models' compute dtype."""
        dtype = self.scale.dtypes[-1]
        nbytes = min(self.scale.together_copy_nbytes, activities.copy_sizes(memory)[-1])
        rows = min(self.scale.together_rows, activities.matmul_sizes(memory, self.scale)[-1])
        return {
            Stream.COMPUTE: activities.matmul(memory, dtype, rows),
            Stream.CPU: activities.update(self.timer.device, memory, self.scale, Stream.CPU, dtype, ADAM)[0],
            Stream.D2H: activities.copy(memory, Stream.D2H, nbytes),
            Stream.H2D: activities.copy(memory, Stream.H2D, nbytes),
        }


def subsets(streams: Iterator[Stream]) -> Iterator[tuple[Stream, ...]]:
    members = tuple(streams)
    for count in range(1, len(members) + 1):
        yield from combinations(members, count)


def slowdown_subject(of: Stream, by: tuple[Stream, ...]) -> Subject:
    """The subject of a slow-down, named as the table shows it."""
    return Subject(f"slow-down {of} by {'+'.join(by)}", unit="times")


def run_rounds(sampler: Sampler, effort: Effort, progress: Callable[[str], None]) -> Samples:
    """Warm up, then as many rounds as the effort says; ``progress`` hears of each."""
    start_s = time.monotonic()
    progress("warming up")
    sampler.warm_up()
    for index in range(effort.num_rounds):
        if index >= effort.min_rounds and time.monotonic() - start_s > effort.max_s:
            progress(f"{effort.max_s:.0f} s are over")
            break
        progress(f"round {index + 1} of {effort.num_rounds}")
        sampler.round()
    return sampler.samples
