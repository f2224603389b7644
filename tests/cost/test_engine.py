"""The event-driven engine: small cases worked out by hand, and laws that hold whatever runs."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkc.cost.actions import Cost
from chunkc.cost.engine import Engine, Task
from chunkc.cost.sharing import Alone, Capacities, Sharing, Use
from chunkc.errors import PlanError
from chunkc.ir.actions import Stream

RAM = "ram"
ONE_RAM = Capacities({RAM: 1.0})


def cost(stream: Stream, alone_ms: float, demand: float = 0.0, launch_ms: float = 0.0, kernels_ms: float = 0.0) -> Cost:
    return Cost(alone_ms, Use(stream, ((RAM, demand),) if demand else ()), launch_ms, kernels_ms)


def run(engine: Engine) -> list[tuple[float, float]]:
    engine.run_until(range(len(engine.tasks)))
    return [(round(t.start_ms, 6), round(t.end_ms, 6)) for t in engine.tasks]


def test_a_stream_carries_out_its_tasks_in_order_and_streams_run_side_by_side() -> None:
    engine = Engine(Alone())
    for stream, milliseconds in ((Stream.H2D, 2), (Stream.COMPUTE, 3), (Stream.H2D, 4), (Stream.COMPUTE, 0)):
        engine.add("task", cost(stream, milliseconds), ())
    assert run(engine) == [(0, 2), (0, 3), (2, 6), (3, 3)]


def test_a_wait_holds_a_task_and_all_behind_it_on_its_stream() -> None:
    engine = Engine(Alone(), handoff_ms=0.5)
    fetch = engine.add("fetch", cost(Stream.H2D, 2), ())
    engine.add("run", cost(Stream.COMPUTE, 3), (fetch,))
    engine.add("run", cost(Stream.COMPUTE, 1), (fetch,))
    engine.add("fetch", cost(Stream.H2D, 1), (fetch,))
    assert run(engine) == [(0, 2), (2.5, 5.5), (5.5, 6.5), (2, 3)]
    assert [t.cause for t in engine.tasks] == [None, 0, 1, 0]


def test_sharing_changes_when_a_task_starts_and_when_one_ends() -> None:
    """Both want the whole resource: the first alone for 2 ms, both at half speed, the second alone at the end."""
    engine = Engine(ONE_RAM)
    engine.add("fetch", cost(Stream.H2D, 4, demand=1.0), ())
    delay = engine.add("run", cost(Stream.COMPUTE, 2), ())
    engine.add("update", cost(Stream.CPU, 5, demand=1.0), (delay,))
    assert run(engine) == [(0, 6), (0, 2), (2, 9)]


def test_unequal_demands_get_the_same_share() -> None:
    """1.5 wanted of 1: everyone gets two thirds; where demands fit, nobody is slowed."""
    engine = Engine(ONE_RAM)
    engine.add("fetch", cost(Stream.H2D, 2, demand=1.0), ())
    engine.add("evict", cost(Stream.D2H, 2, demand=0.5), ())
    engine.add("run", cost(Stream.COMPUTE, 2), ())
    assert run(engine) == [(0, 3), (0, 3), (0, 2)]
    engine = Engine(ONE_RAM)
    engine.add("fetch", cost(Stream.H2D, 2, demand=0.5), ())
    engine.add("evict", cost(Stream.D2H, 2, demand=0.5), ())
    assert run(engine) == [(0, 2), (0, 2)]


def test_a_host_that_computes_launches_nothing_meanwhile() -> None:
    """The copy behind the first segment is launched when that is done, although nothing holds it."""
    expected = {True: [(1, 6), (6.5, 8.5), (8.5, 13.5)], False: [(1, 6), (1.5, 3.5), (6, 11)]}
    for inline, times in expected.items():
        engine = Engine(Alone(), runs_inline=inline)
        engine.add("run", cost(Stream.COMPUTE, 5, launch_ms=1), ())
        copy = engine.add("fetch", cost(Stream.H2D, 2, launch_ms=0.5), ())
        engine.add("run", cost(Stream.COMPUTE, 5, launch_ms=1), (copy,))
        assert run(engine) == times


def test_an_action_ends_no_earlier_than_the_host_has_launched_its_kernels() -> None:
    engine = Engine(Alone())
    engine.add("run", cost(Stream.COMPUTE, 2, launch_ms=1, kernels_ms=5), ())
    engine.add("run", cost(Stream.COMPUTE, 10, launch_ms=1, kernels_ms=5), ())
    engine.add("run", cost(Stream.COMPUTE, 2, launch_ms=1, kernels_ms=5), ())
    assert run(engine) == [(1, 6), (7, 17), (17, 19)]
    assert engine.tasks[0].worked_ms == pytest.approx(3)


def test_a_task_that_waits_for_one_behind_it_is_refused() -> None:
    engine = Engine(Alone())
    engine.add("s0 update c0", cost(Stream.CPU, 1), (1,))
    engine.add("s1 update c1", cost(Stream.CPU, 1), ())
    with pytest.raises(PlanError, match="s0 update c0 waits for an action that is issued behind it"):
        engine.run_until(range(2))


def test_without_a_wait_an_action_may_end_later_where_resources_are_shared() -> None:
    """Graham's anomaly: what need not wait takes bandwidth from what everything waits for."""

    def end(waits: bool) -> float:
        engine = Engine(ONE_RAM)
        fetch = engine.add("fetch", cost(Stream.H2D, 4, demand=1.0), ())
        segment = engine.add("run", cost(Stream.COMPUTE, 10), (fetch,))
        engine.add("update", cost(Stream.CPU, 4, demand=1.0), (fetch,) if waits else ())
        engine.run_until(range(3))
        return engine.tasks[segment].end_ms

    assert (end(True), end(False)) == (14, 18)


# --- laws -------------------------------------------------------------------------------------------------------------


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[Cost, tuple[int, ...]]]:
    found: list[tuple[Cost, tuple[int, ...]]] = []
    for number in range(draw(st.integers(1, 25))):
        stream = draw(st.sampled_from(list(Stream)))
        made = cost(stream, draw(st.sampled_from([0, 1, 2, 3.5, 7])), draw(st.sampled_from([0, 0.3, 1.0])))
        waits = draw(st.sets(st.integers(0, number - 1), max_size=2)) if number else set()
        found.append((made, tuple(sorted(waits))))
    return found


def simulated(program: list[tuple[Cost, tuple[int, ...]]], sharing: Sharing, handoff_ms: float = 0.0) -> list[Task]:
    engine = Engine(sharing, handoff_ms)
    for number, (made, waits) in enumerate(program):
        engine.add(str(number), made, waits)
    engine.run_until(range(len(program)))
    return engine.tasks


@given(programs())
def test_work_done_is_speed_times_time(program: list[tuple[Cost, tuple[int, ...]]]) -> None:
    tasks = simulated(program, ONE_RAM)
    times = sorted({t for task in tasks for t in (task.start_ms, task.end_ms)})
    done = [0.0] * len(tasks)
    for begin, end in pairwise(times):
        running = [t for t in tasks if t.start_ms <= begin and t.end_ms >= end]
        for task, speed in zip(running, ONE_RAM.speeds(tuple(t.cost.use for t in running)), strict=True):
            done[task.number] += speed * (end - begin)
    assert done == pytest.approx([t.cost.alone_ms for t in tasks], abs=1e-6)


@given(programs(), st.sampled_from([0.0, 0.25]))
def test_without_sharing_times_are_those_of_the_recurrence(
    program: list[tuple[Cost, tuple[int, ...]]], handoff_ms: float
) -> None:
    """Start = max(end before on the stream, ends waited for), written down without events."""
    ends: list[float] = []
    last: dict[Stream, float] = {}
    for made, waits in program:
        stream = made.use.stream
        handoffs = [0.0 if program[w][0].use.stream is stream else handoff_ms for w in waits]
        start = max([last.get(stream, 0.0), *(ends[w] + h for w, h in zip(waits, handoffs, strict=True))])
        last[stream] = start + made.alone_ms
        ends.append(last[stream])
    assert [t.end_ms for t in simulated(program, Alone(), handoff_ms)] == pytest.approx(ends, abs=1e-6)


@given(programs(), st.integers(0, 2**32))
def test_without_sharing_less_work_and_fewer_waits_never_delay_anything(
    program: list[tuple[Cost, tuple[int, ...]]], seed: int
) -> None:
    chosen = random.Random(seed)
    lighter = [
        (
            Cost(made.alone_ms * chosen.choice([0, 0.5, 1]), made.use, made.launch_ms),
            tuple(w for w in waits if chosen.random() < 0.7),
        )
        for made, waits in program
    ]
    before, after = simulated(program, Alone()), simulated(lighter, Alone())
    assert all(b.end_ms <= a.end_ms + 1e-6 for a, b in zip(before, after, strict=True))


@given(programs())
def test_sharing_delays_and_never_speeds_up(program: list[tuple[Cost, tuple[int, ...]]]) -> None:
    shared, alone = simulated(program, ONE_RAM), simulated(program, Alone())
    assert all(s.end_ms >= a.end_ms - 1e-6 for s, a in zip(shared, alone, strict=True))


@given(programs(), st.sampled_from([0.5, 3.0]))
def test_times_scale_with_all_rates_together(program: list[tuple[Cost, tuple[int, ...]]], factor: float) -> None:
    slower = [(Cost(made.alone_ms * factor, made.use, 0.0), waits) for made, waits in program]
    before, after = simulated(program, ONE_RAM), simulated(slower, ONE_RAM)
    assert [t.end_ms for t in after] == pytest.approx([t.end_ms * factor for t in before], abs=1e-6)
