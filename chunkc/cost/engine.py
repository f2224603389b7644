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
    stream: Stream
    waits: tuple[int, ...]
    issue_after: tuple[int, ...] = ()
    issued_ms: float = math.inf
    issue_done_ms: float = math.inf
    start_ms: float = math.inf
    worked_ms: float = math.inf
    end_ms: float = math.inf
    cause: int | None = None
    host_cause: int | None = None


@dataclass(slots=True)
class _Lane:
    """One stream: its next tasks, the one that runs, with ``left_ms`` of its time, and the last one.

    ``ready_ms``: of the next task, once that is known. ``blocker``: a task that the next one waits for.
    """

    queue: deque[Task] = field(default_factory=deque)
    task: Task | None = None
    left_ms: float = 0.0
    last: Task | None = None
    ready_ms: float | None = None
    blocker: Task | None = None


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
    _lanes: dict[Stream, _Lane] = field(default_factory=lambda: {stream: _Lane() for stream in Stream})
    _running: list[tuple[_Lane, Task]] = field(default_factory=list)  # in the order of their starts
    _speeds: dict[tuple[int, ...], tuple[float, ...]] = field(default_factory=dict)  # by identities of uses

    def add(self, name: str, cost: Cost, waits: tuple[int, ...], issue_after: tuple[int, ...] = ()) -> int:
        """One more task behind all others; its number."""
        number, stream = len(self.tasks), cost.use.stream
        task = Task(number, name, cost, stream, waits, issue_after)
        self.tasks.append(task)
        self._lanes[stream].queue.append(task)
        return number

    def run_until(self, numbers: range) -> None:
        """Go on until all these tasks are complete; PlanError when one waits for a task issued behind it."""
        left = sum(1 for number in numbers if not self._is_done(number))
        while left:
            if self._num_issued < len(self.tasks):
                self._issue()
            for task in self._advance(self._start()):
                if task.number in numbers:
                    left -= 1

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

    def _start(self) -> float:
        """Start what can start now; when the next task can that does not, as far as it is known."""
        now_ms, next_ms = self._now_ms, math.inf
        for lane in self._lanes.values():
            if lane.task is not None or not lane.queue:
                continue
            ready_ms = lane.ready_ms
            if ready_ms is None:
                if lane.blocker is not None and lane.blocker.end_ms > now_ms:
                    continue
                ready_ms = self._ready(lane, lane.queue[0])
            if ready_ms <= now_ms + _SLACK_MS:
                task = lane.task = lane.queue.popleft()
                task.start_ms, lane.left_ms, lane.ready_ms = now_ms, task.cost.alone_ms, None
                self._running.append((lane, task))
            elif ready_ms < next_ms:
                next_ms = ready_ms
        return next_ms

    def _ready(self, lane: _Lane, task: Task) -> float:
        """When ``task``, the next of ``lane``, can start; infinity while that is not known. Notes the cause."""
        ready_ms, cause, now_ms = task.issued_ms, None, self._now_ms
        if lane.last is not None and lane.last.end_ms >= ready_ms:
            ready_ms, cause = lane.last.end_ms, lane.last.number
        for number in task.waits:
            wait = self.tasks[number]
            end_ms = wait.end_ms
            if end_ms > now_ms:
                lane.blocker = wait
                return math.inf
            if wait.stream is not task.stream:
                end_ms += self.handoff_ms
            if end_ms > ready_ms:
                ready_ms, cause = end_ms, number
        task.cause = cause
        if ready_ms != math.inf:
            lane.ready_ms = ready_ms
        return ready_ms

    def _advance(self, next_ms: float) -> list[Task]:
        """To the next event, a start at ``next_ms`` or an end; the tasks that are complete then."""
        running, now_ms, ends = self._running, self._now_ms, list[float]()
        speeds = self._speeds_of([task.cost.use for _, task in running])
        for (lane, task), speed in zip(running, speeds, strict=True):
            end_ms = now_ms + lane.left_ms / speed
            if task.worked_ms != math.inf:  # the host has not launched all of it yet
                end_ms = max(end_ms, task.issue_done_ms)
            ends.append(end_ms)
            if end_ms < next_ms:
                next_ms = end_ms
        if next_ms == math.inf:
            stuck = next((lane.queue[0].name for lane in self._lanes.values() if lane.queue), "nothing")
            raise PlanError(f"the simulation cannot go on: {stuck} waits for an action that is issued behind it")
        elapsed_ms, self._now_ms, limit_ms = next_ms - now_ms, next_ms, next_ms + _SLACK_MS
        finished = list[Task]()
        for (lane, task), speed, end_ms in zip(running, speeds, ends, strict=True):
            if end_ms <= limit_ms and task.worked_ms == math.inf:
                task.worked_ms, lane.left_ms = next_ms, 0.0
            else:
                lane.left_ms = max(0.0, lane.left_ms - elapsed_ms * speed)
            if task.worked_ms != math.inf and task.issue_done_ms <= limit_ms:
                task.end_ms, lane.last, lane.task = next_ms, task, None
                finished.append(task)
        if finished:
            self._running = [(lane, task) for lane, task in running if lane.task is not None]
        return finished

    def _speeds_of(self, uses: list[Use]) -> tuple[float, ...]:
        """Those of the sharing law; of equal uses that are one object, found once."""
        key = tuple(map(id, uses))  # tasks keep their uses, so no other object gets the identity of one
        found = self._speeds.get(key)
        if found is None:
            found = self._speeds[key] = self.sharing.speeds(tuple(uses))
        return found
