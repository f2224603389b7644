"""An event-driven simulation of streams: queues that carry out tasks in order, after waits.

A *host* issues tasks in order, each at a cost of its own time; a task can start once it is issued, its stream is free,
and the tasks that it waits for are complete (a little later where they are on another stream). Between two events, a
start or an end, every running task progresses at the speed that the sharing law gives the set that runs (the fluid
model of processor sharing): speeds are constant between events, so ends have a closed form.

Where the host carries out compute tasks itself, it issues nothing meanwhile.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from chunkc.cost.actions import Cost
from chunkc.cost.sharing import Sharing, Use
from chunkc.errors import PlanError
from chunkc.ir.actions import Stream

_SLACK_MS = 1e-9


@dataclass(slots=True)
class Task:
    """One execution of an action; times in milliseconds from the start of the simulation.

    ``waits`` and ``issue_after`` are numbers of tasks that must be complete before it starts, and before the host
    issues it. ``issued_ms``: when it could start as far as the host goes; ``issue_done_ms``: when its last kernel was
    launched; ``worked_ms``: when the work itself was done, the rest is the host's. ``cause`` and ``host_cause``: tasks
    whose end let it start (None: the host did), and let the host issue it.
    """

    number: int
    name: str
    cost: Cost
    waits: tuple[int, ...]
    issue_after: tuple[int, ...] = ()
    issued_ms: float = math.inf
    issue_done_ms: float = math.inf
    start_ms: float = math.inf
    worked_ms: float = math.inf
    end_ms: float = math.inf
    cause: int | None = None
    host_cause: int | None = None

    @property
    def stream(self) -> Stream:
        return self.cost.use.stream


@dataclass(slots=True)
class Engine:
    """Simulates tasks as they are added; ``handoff_ms`` is added to waits for another stream's tasks."""

    sharing: Sharing
    handoff_ms: float = 0.0
    runs_inline: bool = False
    tasks: list[Task] = field(default_factory=list)
    _now_ms: float = 0.0
    _host_ms: float = 0.0
    _num_issued: int = 0
    _queues: dict[Stream, deque[Task]] = field(default_factory=lambda: {s: deque() for s in Stream})
    _running: dict[Stream, tuple[Task, float]] = field(default_factory=dict)
    _last: dict[Stream, Task] = field(default_factory=dict)
    _ready_ms: dict[Stream, float] = field(default_factory=dict)  # of the next task, once that is known
    _blocker: dict[Stream, int] = field(default_factory=dict)  # a task that the next one waits for
    _speeds: dict[tuple[int, ...], tuple[float, ...]] = field(default_factory=dict)  # by identities of uses

    def add(self, name: str, cost: Cost, waits: tuple[int, ...], issue_after: tuple[int, ...] = ()) -> int:
        """One more task behind all others; its number."""
        task = Task(len(self.tasks), name, cost, waits, issue_after)
        self.tasks.append(task)
        self._queues[task.stream].append(task)
        return task.number

    def run_until(self, numbers: range) -> None:
        """Go on until all these tasks are complete; PlanError when one waits for a task issued behind it."""
        left = sum(1 for n in numbers if not self._is_done(n))
        while left:
            self._issue()
            self._start()
            left -= sum(1 for task in self._advance() if task.number in numbers)

    def _is_done(self, number: int) -> bool:
        return self.tasks[number].end_ms <= self._now_ms

    def _issue(self) -> None:
        while self._num_issued < len(self.tasks):
            task = self.tasks[self._num_issued]
            before = self.tasks[task.number - 1] if task.number else None
            blockers = task.issue_after
            if self.runs_inline and before is not None and before.stream is Stream.COMPUTE:
                blockers = (*blockers, before.number)
            if blockers and not all(self._is_done(number) for number in blockers):
                return
            task.host_cause = None if before is None else before.host_cause
            for number in blockers:
                if self.tasks[number].end_ms >= self._host_ms:
                    self._host_ms, task.host_cause = self.tasks[number].end_ms, number
            task.issued_ms = self._host_ms + task.cost.launch_ms
            task.issue_done_ms = self._host_ms = task.issued_ms + task.cost.kernels_ms
            self._num_issued += 1

    def _start(self) -> None:
        for stream, queue in self._queues.items():
            if stream not in self._running and queue:
                ready_ms = self._ready(stream, queue[0])
                if ready_ms <= self._now_ms + _SLACK_MS:
                    task = queue.popleft()
                    del self._ready_ms[stream]
                    task.start_ms = self._now_ms
                    self._running[stream] = (task, task.cost.alone_ms)

    def _ready(self, stream: Stream, task: Task) -> float:
        """When ``task``, the next of ``stream``, can start; infinity while that is not known. Notes the cause."""
        known_ms = self._ready_ms.get(stream)
        if known_ms is not None:
            return known_ms
        if stream in self._blocker and not self._is_done(self._blocker[stream]):
            return math.inf
        ready_ms, cause = task.issued_ms, None
        last = self._last.get(stream)
        if last is not None and last.end_ms >= ready_ms:
            ready_ms, cause = last.end_ms, last.number
        for number in task.waits:
            wait = self.tasks[number]
            if wait.end_ms > self._now_ms:
                self._blocker[stream] = number
                return math.inf
            after_ms = wait.end_ms + (self.handoff_ms if wait.stream is not stream else 0.0)
            if after_ms > ready_ms:
                ready_ms, cause = after_ms, number
        task.cause = cause
        if not math.isinf(ready_ms):
            self._ready_ms[stream] = ready_ms
        return ready_ms

    def _advance(self) -> list[Task]:
        """To the next event; the tasks that are complete then."""
        running = list(self._running.items())
        speeds = self._speeds_of([task.cost.use for _, (task, _) in running])
        ends = [self._end(task, left, speed) for (_, (task, left)), speed in zip(running, speeds, strict=True)]
        starts = [self._ready(s, q[0]) for s, q in self._queues.items() if q and s not in self._running]
        next_ms = min((*ends, *starts), default=math.inf)
        if math.isinf(next_ms):
            stuck = next((q[0].name for q in self._queues.values() if q), "nothing")
            raise PlanError(f"the simulation cannot go on: {stuck} waits for an action that is issued behind it")
        elapsed_ms = next_ms - self._now_ms
        self._now_ms = next_ms
        finished = []
        for (stream, (task, left)), speed, end_ms in zip(running, speeds, ends, strict=True):
            left_ms = left - elapsed_ms * speed
            if end_ms <= next_ms + _SLACK_MS and math.isinf(task.worked_ms):
                task.worked_ms, left_ms = next_ms, 0.0
            if not math.isinf(task.worked_ms) and task.issue_done_ms <= next_ms + _SLACK_MS:
                task.end_ms = next_ms
                del self._running[stream]
                self._last[stream] = task
                finished.append(task)
            else:
                self._running[stream] = (task, max(0.0, left_ms))
        return finished

    def _speeds_of(self, uses: list[Use]) -> tuple[float, ...]:
        """Those of the sharing law; of equal uses that are one object, found once."""
        key = tuple(map(id, uses))  # tasks keep their uses, so no other object gets the identity of one
        found = self._speeds.get(key)
        if found is None:
            found = self._speeds[key] = self.sharing.speeds(tuple(uses))
        return found

    def _end(self, task: Task, left_ms: float, speed: float) -> float:
        """When the task's work is done at this speed, or, if it is, when the host has launched all of it."""
        done_ms = self._now_ms + left_ms / speed
        return done_ms if math.isinf(task.worked_ms) else max(done_ms, task.issue_done_ms)
