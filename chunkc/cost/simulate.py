"""The simulator: times of a plan's iterations when they repeat, by the rates of a machine.

The actions of one iteration (a `Script`) are replayed again and again as the executor launches them: each stream is a
queue, waits are those of the plan, a label means its latest run, and programs do not join. The host launches in program
order. On a device that computes on the host's thread it goes on when a segment is done. Else it runs ahead, with two
limits: work on the compute stream that needs what an update on the host makes is launched when that update is done,
since a GPU never waits for the host; and no iteration is launched before the compute stream has finished the one before
the last, as in a loop that looks at the last step's loss.

Iterations are added until they repeat, action by action and to a millionth of the period, alone or in a cycle of
several. The user's own code between the programs, and eager operators, take no time here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final

from chunkc.cost.actions import ActionCosts, Cost
from chunkc.cost.engine import Engine, Task
from chunkc.cost.rates import CostRates, cost_rates
from chunkc.cost.read import critical_path, peaks_of, slices_of, stalls_of, stream_times
from chunkc.cost.timeline import OVERHEAD, Flops, Peaks, Timeline
from chunkc.distributed.mesh import CP
from chunkc.errors import HardwareError
from chunkc.hardware import Hardware
from chunkc.ir.actions import Stream
from chunkc.ir.plan import TRANSITIONS, Plan

_CALIBRATED: Final = " (calibrated)"
_MAX_ITERATIONS: Final = 32
_MAX_CYCLE: Final = 4
_TOLERANCE: Final = 1e-6
_LOOK_AHEAD: Final = 2
_PRICED_MICRO_BATCHES: Final = 3


def simulate(plan: Plan, hw: Hardware | str | os.PathLike[str] | None = None) -> Timeline:
    """Simulate the steady iteration of ``plan``: all micro-batches and the step, or an evaluation.

    ``hw``: whose rates to take (also a spelling, or the path of a profile of ``chunkc calibrate``); None: the plan's.
    Raises HardwareError when these are not known; the message says how to get them.
    """
    if hw is None and plan.hw.endswith(_CALIBRATED):
        raise HardwareError(
            f"the plan was made for a calibrated machine, {plan.hw}; its rates stand in the profile, not in the plan: "
            "name the profile's path as the hardware"
        )
    return simulate_with(plan, cost_rates(Hardware.of(plan.hw if hw is None else hw)))


def simulate_with(plan: Plan, rates: CostRates) -> Timeline:
    return simulate_script(script_of(plan, rates), facts_of(plan), rates)


@dataclass(frozen=True, slots=True)
class Script:
    """The actions of one iteration in the order of launch.

    ``names``: label (as `Plan.labelled` has it), program and text of each. ``waits``: labels that each waits for; one
    of an action behind it means that of the iteration before. ``joins_streams``: whether an iteration starts when the
    one before it is complete on all streams.
    """

    names: tuple[tuple[str, str, str], ...]
    costs: tuple[Cost, ...]
    waits: tuple[tuple[str, ...], ...]
    joins_streams: bool = False


@dataclass(frozen=True, slots=True)
class Facts:
    """Fields of a `Timeline` that do not come from timing; as in `Timeline`."""

    plan_digest: str
    model: str
    num_samples: int
    num_tokens: int
    world_size: int
    flops: Flops
    peaks: Peaks


def script_of(plan: Plan, rates: CostRates) -> Script:
    costs = ActionCosts(plan, rates)
    actions = list(plan.labelled())
    return Script(
        names=tuple((label, p.name, str(a)) for p, label, a in actions),
        costs=tuple(costs.of(a) for _, _, a in actions),
        waits=_waits(plan),
        joins_streams=plan.is_evaluation,
    )


def _waits(plan: Plan) -> tuple[tuple[str, ...], ...]:
    """Labels that each action waits for: the plan's, and behind a join the last of all streams."""
    waits, labels = list[tuple[str, ...]](), iter(plan.labelled())
    last = dict[Stream, str]()
    joined: tuple[str, ...] = ()
    joining = set[Stream]()  # whose next action is the first behind a join
    for program in plan.iteration():
        if program.role in ("resume", "reduce_all"):
            joined, joining = tuple(last.values()), set(Stream)
        for _, label, action in islice(labels, len(program.actions)):
            waits.append((*action.waits, *joined) if action.stream in joining else action.waits)
            joining.discard(action.stream)
            last[action.stream] = label.rpartition(":")[2]
        if program.role in TRANSITIONS:
            joined, joining = tuple(last.values()), set(Stream)
    return tuple(waits)


def facts_of(plan: Plan) -> Facts:
    ranks, times = plan.layout.num_ranks, plan.accumulate
    num_slices = dict(plan.mesh).get(CP, 1)
    return Facts(
        plan_digest=plan.digest(),
        model=plan.model,
        num_samples=plan.num_samples * ranks // num_slices * times,
        num_tokens=plan.num_tokens * ranks * times,
        world_size=ranks,
        flops=_repeated(flops_of(plan), times),
        peaks=peaks_of(plan),
    )


def simulate_script(script: Script, facts: Facts, rates: CostRates) -> Timeline:
    return _timeline(_steady(script, rates), facts)


@dataclass(frozen=True, slots=True)
class Price:
    """Step time and critical path of a `Timeline`.

    ``compute_ms``: the compute stream's actions alone. ``critical_ms``: by stream, that of launches and hand-offs
    besides. ``num_actions``: simulated.
    """

    step_ms: float
    compute_ms: float
    critical_ms: Mapping[str, float]
    num_actions: int

    @property
    def bound(self) -> str:
        """The stream with most of the critical path."""
        return str(max(self.critical_ms, key=self.critical_ms.__getitem__))


def price(plan: Plan, rates: CostRates) -> Price:
    """The price of ``plan``; `simulate_with` finds the same, and more, in twice the time.

    Of many micro-batches the first ones are simulated: those behind them take as long as the last of these. Of many in
    flight, two are.
    """
    if plan.accumulate <= _PRICED_MICRO_BATCHES:
        return _price(plan, rates)
    plan = replace(plan, in_flight=min(plan.in_flight, _PRICED_MICRO_BATCHES - 1))
    most, fewer = (_price(replace(plan, accumulate=_PRICED_MICRO_BATCHES - less), rates) for less in (0, 1))
    more = plan.accumulate - _PRICED_MICRO_BATCHES
    return Price(
        step_ms=most.step_ms + more * (most.step_ms - fewer.step_ms),
        compute_ms=most.compute_ms + more * (most.compute_ms - fewer.compute_ms),
        critical_ms=most.critical_ms,
        num_actions=most.num_actions + fewer.num_actions,
    )


def _price(plan: Plan, rates: CostRates) -> Price:
    run = _steady(script_of(plan, rates), rates)
    step_ms, _ = _period(run)
    path = critical_path(run.engine, run.tasks(run.num_done - 1), 2 * step_ms, step_ms)
    compute_ms = sum(c.alone_ms for c in run.script.costs if c.use.stream is Stream.COMPUTE)
    return Price(step_ms, compute_ms, path, len(run.engine.tasks))


def _steady(script: Script, rates: CostRates) -> Run:
    run = Run(script, rates)
    while run.num_done < _MAX_ITERATIONS and not run.cycle():
        run.iterate()
    return run


@dataclass(slots=True)
class Run:
    """Iterations on their way: ``num_done`` are complete, some more are issued beyond them."""

    script: Script
    rates: CostRates
    num_done: int = 0
    engine: Engine = field(init=False)
    _num_issued: int = 0
    _waits: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(init=False)
    _last_compute: list[int] = field(default_factory=list)
    _updates: dict[int, int] = field(default_factory=dict)  # task -> the update on the host that it needs in the end
    _tails: dict[Stream, int] = field(default_factory=dict)
    _names: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self._names = [f"{label} {text}" for label, _, text in self.script.names]
        self._waits, rates = _positions(self.script), self.rates
        self.engine = Engine(rates.sharing, rates.handoff_us * 1e-3, rates.runs_inline)

    def iterate(self) -> None:
        """Complete one more iteration; those behind it are issued, since they run beside its end."""
        while self._num_issued <= self.num_done + _LOOK_AHEAD:
            self._issue()
        self.engine.run_until(self._numbers(self.num_done))
        self.num_done += 1

    def _issue(self) -> None:
        first, size = len(self.engine.tasks), len(self.script.costs)
        before = tuple(self._last_compute[-2:-1])
        if self.script.joins_streams:
            before = tuple(range(max(0, first - size), first))
        last_compute = None
        facts = zip(self._names, self.script.costs, self._waits, strict=True)
        for number, (name, cost, (earlier, here)) in enumerate(facts, start=first):
            waits = (*[first - size + position for position in earlier], *[first + position for position in here])
            waits = waits if first else waits[len(earlier) :]
            stream = cost.use.stream
            self.engine.add(name, cost, waits, (*before, *self._held_back(number, stream, waits)))
            before = ()
            last_compute = number if stream is Stream.COMPUTE else last_compute
        if last_compute is not None:
            self._last_compute.append(last_compute)
        self._num_issued += 1

    def _held_back(self, number: int, stream: Stream, waits: tuple[int, ...]) -> tuple[int, ...]:
        """The last update that must end before the host launches task ``number``, as in ``cuda_streams``.

        A copy that waits for an update is held back on the host, and all copies of its stream behind it; whatever else
        waits for what is held back, the worker's own work too, is launched when that is.
        """
        if self.rates.runs_inline:
            return ()
        updates = [wait for wait in waits if self.engine.tasks[wait].stream is Stream.CPU]
        held = [self._updates[wait] for wait in waits if wait in self._updates and wait not in updates]
        if stream is Stream.CPU:
            self._updates[number] = number
            return (max(held),) if held else ()
        if stream is not Stream.COMPUTE:
            tail, self._tails[stream] = self._tails.get(stream), number
            behind = [self._updates[tail]] if tail in self._updates else []
            if updates or behind:
                self._updates[number] = max(updates + held + behind)
                return ()
        needs = updates + held
        return (max(needs),) if needs else ()

    def _numbers(self, iteration: int) -> range:
        size = len(self.script.costs)
        return range(iteration * size, (iteration + 1) * size)

    def tasks(self, iteration: int) -> list[Task]:
        """Of a complete iteration, in program order."""
        return [self.engine.tasks[n] for n in self._numbers(iteration)]

    def began_ms(self, iteration: int) -> float:
        """When the first action of an iteration started."""
        return min((t.start_ms for t in self.tasks(iteration)), default=0.0)

    def cycle(self) -> int:
        """How many of the latest iterations make up the cycle that repeats; 0 if none does yet."""
        # an iteration follows from the two before it: one more than a cycle that repeats goes on to do so
        for length in range(1, _MAX_CYCLE + 1):
            if self.num_done >= 2 * length + 2 and all(
                self._repeats(self.num_done - 1 - i, length) for i in range(length + 1)
            ):
                return length
        return 0

    def _repeats(self, iteration: int, length: int) -> bool:
        now, then = self.tasks(iteration), self.tasks(iteration - length)
        shift_ms = self.began_ms(iteration) - self.began_ms(iteration - length)
        allowed_ms = max(_TOLERANCE * shift_ms, 1e-9)
        return all(
            abs(a.start_ms - b.start_ms - shift_ms) <= allowed_ms and abs(a.end_ms - b.end_ms - shift_ms) <= allowed_ms
            for a, b in zip(now, then, strict=True)
        )


def _positions(script: Script) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Positions of what each action waits for, in the iteration before and in its own, ascending."""
    ends = [label.rpartition(":")[2] for label, _, _ in script.names]
    before = {end: position for position, end in enumerate(ends)}
    here, positions = dict[str, int](), list[tuple[tuple[int, ...], tuple[int, ...]]]()
    for position, labels in enumerate(script.waits):
        earlier = {before[label] for label in labels if label not in here and label in before}
        positions.append((tuple(sorted(earlier)), tuple(sorted({here[label] for label in labels if label in here}))))
        here[ends[position]] = position
    return positions


def _period(run: Run) -> tuple[float, bool]:
    """Milliseconds of an iteration, the mean of a cycle or of the last ones, and whether there is a cycle."""
    length, last = run.cycle(), run.num_done - 1
    num_mean = length or _MAX_CYCLE
    return (run.began_ms(last) - run.began_ms(last - num_mean)) / num_mean, length > 0


def _timeline(run: Run, facts: Facts) -> Timeline:
    names, last = run.script.names, run.num_done - 1
    step_ms, is_steady = _period(run)
    shown = last - 1
    tasks, base_ms = run.tasks(shown), run.began_ms(shown)
    path = critical_path(run.engine, run.tasks(last), 2 * step_ms, step_ms)
    return Timeline(
        plan_digest=facts.plan_digest,
        model=facts.model,
        hw=run.rates.hw,
        step_ms=step_ms,
        is_steady=is_steady,
        num_iterations=run.num_done,
        num_samples=facts.num_samples,
        num_tokens=facts.num_tokens,
        world_size=facts.world_size,
        flops=facts.flops,
        streams=stream_times(tasks, path),
        overhead_ms=path.get(OVERHEAD, 0.0),
        stalls=stalls_of(run.engine, tasks, names),
        peaks=facts.peaks,
        slices=slices_of(tasks, names, base_ms),
        next_slices=slices_of(run.tasks(last), names, base_ms),
    )


def flops_of(plan: Plan) -> Flops:
    """Operations of one forward and backward of ``plan`` on one rank."""
    forward, backward = ([w for s in plan.graph_segments(g) for w in s.work] for g in ("forward", "backward"))
    numel = sum(info.numel for info in plan.layout.params)
    return Flops.of(forward, backward, numel=numel, num_tokens=0 if plan.is_evaluation else plan.num_tokens)


def _repeated(flops: Flops, times: int) -> Flops:
    counted = None if flops.patrickstar is None else times * flops.patrickstar
    return Flops(times * flops.model, times * flops.hardware, counted)
