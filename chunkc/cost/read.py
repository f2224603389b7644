"""Reading a simulation: streams' times, stalls, the critical path, and peaks of memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from chunkc.cost.engine import Engine, Task
from chunkc.cost.timeline import OVERHEAD, Peaks, Slice, Stall, StreamTime
from chunkc.ir.actions import Op, Stream
from chunkc.ir.occupancy import Occupancy
from chunkc.ir.plan import Plan, Program

_SHORTEST_STALL_MS = 1e-6
Names = Sequence[tuple[str, str, str]]


def slices_of(tasks: Sequence[Task], names: Names, base_ms: float) -> tuple[Slice, ...]:
    """The actions of one iteration, by stream and start; ``names``: label, program and text of each."""
    order = {stream: number for number, stream in enumerate(Stream)}
    slices = [
        Slice(*name[:3], t.stream, t.start_ms - base_ms, t.end_ms - base_ms, t.cost.alone_ms, t.cost.nbytes)
        for t, name in zip(tasks, names, strict=True)
    ]
    return tuple(sorted(slices, key=lambda s: order[s.stream]))  # each stream is in order already


def stream_times(tasks: Sequence[Task], path_ms: dict[str, float]) -> tuple[StreamTime, ...]:
    times = []
    for stream in Stream:
        on_stream = [t for t in tasks if t.stream is stream]
        if on_stream:
            busy_ms = sum(t.end_ms - t.start_ms for t in on_stream)
            alone_ms, nbytes = sum(t.cost.alone_ms for t in on_stream), sum(t.cost.nbytes for t in on_stream)
            times.append(StreamTime(stream, busy_ms, alone_ms, path_ms.get(str(stream), 0.0), len(on_stream), nbytes))
    return tuple(times)


def stalls_of(engine: Engine, tasks: Sequence[Task], names: Names) -> tuple[Stall, ...]:
    """Idle times of the compute stream before the actions of one iteration, the longest first."""
    stalls = []
    last = _before(engine, tasks)
    for task, (label, _, text) in zip(tasks, names, strict=True):
        if task.stream is not Stream.COMPUTE:
            continue
        stall_ms = task.start_ms - (last.end_ms if last is not None else task.start_ms)
        last = task
        if stall_ms > _SHORTEST_STALL_MS:
            cause = _cause(engine, task, task.start_ms - stall_ms)
            path = _sums(walk_back(engine, task, task.start_ms, task.start_ms - stall_ms))
            stalls.append(
                Stall(label, text, stall_ms, cause, tuple(sorted(path.items(), key=lambda p: (-round(p[1], 9), p[0]))))
            )
    return tuple(sorted(stalls, key=lambda s: -round(s.stall_ms, 9)))


def _cause(engine: Engine, task: Task, since_ms: float) -> str:
    """The name of what ``task`` waited for; ``host`` where only launching was left from ``since_ms`` on."""
    cause = task.cause if task.cause is not None else task.host_cause
    if cause is None or (task.cause is None and engine.tasks[cause].end_ms <= since_ms):
        return "host"
    return engine.tasks[cause].name


def _before(engine: Engine, tasks: Sequence[Task]) -> Task | None:
    first = tasks[0].number if tasks else 0
    return next((t for t in reversed(engine.tasks[:first]) if t.stream is Stream.COMPUTE), None)


def critical_path(engine: Engine, tasks: Sequence[Task], length_ms: float, counted_ms: float) -> dict[str, float]:
    """Milliseconds by stream on the critical path that ends with the last compute task of ``tasks``.

    The path is followed for ``length_ms``, and its earlier end of ``counted_ms`` counts: behind that, it has found its
    way to what really bounds the iterations.
    """
    computing = [t for t in tasks if t.stream is Stream.COMPUTE] or list(tasks)
    if not computing or counted_ms <= 0:
        return {}
    last = computing[-1]
    end_ms = last.end_ms - length_ms + counted_ms
    parts = walk_back(engine, last, last.end_ms, last.end_ms - length_ms)
    return _sums((name, start_ms, min(stop_ms, end_ms)) for name, start_ms, stop_ms in parts if start_ms < end_ms)


def walk_back(engine: Engine, task: Task, from_ms: float, to_ms: float) -> Iterator[tuple[str, float, float]]:
    """The critical path from ``from_ms``, where ``task`` is at work, back to ``to_ms``."""
    now_ms, current = from_ms, task
    while now_ms > to_ms:
        if current.worked_ms < now_ms:  # done, but the host had not launched all of it
            yield OVERHEAD, max(current.worked_ms, to_ms), now_ms
            now_ms = max(current.worked_ms, to_ms)
        if current.start_ms < now_ms:
            yield str(current.stream), max(current.start_ms, to_ms), now_ms
            now_ms = max(current.start_ms, to_ms)
        cause = current.cause if current.cause is not None else current.host_cause
        if now_ms <= to_ms:
            return
        before_ms = to_ms if cause is None else max(to_ms, engine.tasks[cause].end_ms)
        if before_ms < now_ms:
            yield OVERHEAD, before_ms, now_ms
            now_ms = before_ms
        if cause is None:
            return
        current = engine.tasks[cause]


def _sums(parts: Iterator[tuple[str, float, float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for name, start_ms, end_ms in parts:
        sums[name] = sums.get(name, 0.0) + end_ms - start_ms
    return sums


def peaks_of(plan: Plan) -> Peaks:
    """Most bytes at any segment of an iteration, in program order."""
    device, used = (0, ""), (0, "")
    for program in (p for p in plan.programs if p.is_repeated):
        for segment, used_nbytes, total_nbytes in _moments(plan, program):
            device = max(device, (total_nbytes, segment), key=lambda peak: peak[0])
            used = max(used, (used_nbytes, segment), key=lambda peak: peak[0])
    return Peaks(*device, *used, plan.memory.host_nbytes)


def _moments(plan: Plan, program: Program) -> Iterator[tuple[str, int, int]]:
    """Of every segment: its name, bytes of occupied slots, bytes of the device."""
    nonmodel = {s.name: s.nonmodel_nbytes for s in plan.segments}
    occupancy = Occupancy.of(plan.layout, program.entry.resident)
    for action in program.actions:
        occupancy.apply(action)
        if action.op is Op.RUN:
            yield action.target, occupancy.used_nbytes, plan.layout.arena_nbytes + nonmodel[action.target]
