"""Models and a machine in slow motion, for simulated times beside real ones, and their measurement.

**The machine** has declared rates, several hundred times slower than a GPU's and those of its host. What actions really
take is a small part of the time that they are given (`Run.work_share`), so that a run shows what executor, streams and
waits make of these rates, and hardly what the machine at hand makes of them.

**The models** are towers of equal layers, a chunk each, whose optimizer states stand on the host: one with so many rows
that computing bounds the step, one with few rows, whose updates on the host take as long (once more with a decision
before them, which the launching thread takes, so that its path ends in overhead), and one whose layers are frozen but
for the last, of which a few fit on the device at a time: copies bound it. In the least memory all updates are the
host's and take longer than the forward; they bound the step where none begins before ``step()``.

Two more have blocks of layers on many rows, which save more for backward than the device holds. They differ in their
link alone: over the usual one saved values leave and come back beside the computation; over one of a tenth they
would not, and computing most blocks again is faster. The plan decides; each is held against the other way too.

**A measured step** is the median time from one iteration of a training loop to the next, by the wall clock. Streams and
waits are read from the device's own record of when its actions ran, by the code that reads a simulation.

**Hidden copies.** Copy time is hidden while the step goes on elsewhere, in the compute stream or in a host update, and
*exposed* while a copy is under way and the compute stream waits, with no update under way either. Not all of it can be
hidden. A step has two phases: updates run beside the next forward, and nothing but copies beside the backward. Of each
phase, even where all that may overlap does,

    W = max(0, max(h2d, d2h) - max(compute, updates))

stays exposed, by what each stream's actions take alone at the machine's rates. With K, the same of all copies, K - W of
both phases is the *hideable* copy time, and (K - exposed) / (K - W) the *hidden share*, with the exposed time of the
measured run. Where nothing overlaps it is 0 or less.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import nn

import chunkc
from chunkc.compiler.compiled_model import compiled_of
from chunkc.cost.actions import Cost
from chunkc.cost.engine import Engine, Task
from chunkc.cost.read import critical_path
from chunkc.cost.sharing import MEASURED_STREAMS, Alone, Use
from chunkc.cost.timeline import Timeline
from chunkc.hardware.profile import CopyRate, DtypeRate, Figure, Rates, Slowdown
from chunkc.ir.actions import Stream
from chunkc.ir.plan import Plan
from chunkc.passes import Activations
from chunkc.runtime.devices.emulated import EmulatedDevice
from chunkc.runtime.devices.throttle import Span

NUM_WARM_UP: Final = 2
MAX_WORK_SHARE: Final = 0.2
"""The machine at hand is at least five times as fast as the declared one, on every stream."""
MATMUL_TFLOPS: Final = 0.0015
MEMORY_GB_PER_S: Final = 0.4
COPY_GB_PER_S: Final = 0.09
COPY_LATENCY_US: Final = 300.0
UPDATE_GPARAM_PER_S: Final = 0.009
SLOWDOWNS: Final = {
    ("h2d", ("d2h",)): 1.1, ("d2h", ("h2d",)): 1.1, ("h2d", ("cpu",)): 1.15, ("d2h", ("cpu",)): 1.15,
    ("cpu", ("h2d",)): 1.1, ("cpu", ("d2h",)): 1.1, ("cpu", ("d2h", "h2d")): 1.2,
    ("h2d", ("cpu", "d2h")): 1.25, ("d2h", ("cpu", "h2d")): 1.25,
}  # fmt: skip
"""Copies and host updates share the host's memory; compute slows nothing and is slowed by nothing."""


class Tower(nn.Module):
    """``num_layers`` equal layers and a mean of squares; the last ``num_trained`` are not frozen.

    With a ``depth`` above one, each is a block of as many.
    """

    def __init__(self, num_layers: int, width: int, num_trained: int, depth: int = 1) -> None:
        super().__init__()

        def layer() -> nn.Module:
            return nn.Linear(width, width, bias=False)

        def block() -> nn.Module:
            inner = [part for _ in range(depth - 1) for part in (layer(), nn.ReLU())]
            return nn.Sequential(*inner, layer()) if inner else layer()

        self.layers = nn.ModuleList(block() for _ in range(num_layers))
        self.layers[: num_layers - num_trained].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss of rows ``x``."""
        for layer in self.layers:
            x = torch.relu(layer(x))
        return (x * x).mean()


@dataclass(frozen=True, slots=True)
class Case:
    """A tower, the rows of a batch, its device memory, what bounds its step, and a norm beyond all.

    ``activations`` as of ``compile``. ``moves``: whether most saved values move, or few do and blocks are computed
    again; None where they fit.
    """

    name: str
    num_layers: int
    width: int
    num_trained: int
    num_rows: int
    hw: str
    bounds: tuple[str, ...]
    max_grad_norm: float | None = None
    depth: int = 1
    copy_gb_per_s: float = COPY_GB_PER_S
    activations: Activations = "auto"
    moves: bool | None = None

    def build(self) -> nn.Module:
        """The model, with the same values each time."""
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return Tower(self.num_layers, self.width, self.num_trained, self.depth)

    def batch(self) -> torch.Tensor:
        """Rows to train on."""
        return torch.randn(self.num_rows, self.width, generator=torch.Generator().manual_seed(2))

    def options(self) -> dict[str, Any]:
        """Options of ``compile`` and ``plan``."""
        return {
            "dtype": torch.float32,
            "backend": "eager",
            "chunk_size": self.width**2,
            "activations": self.activations,
        }

    def machine(self) -> chunkc.Hardware:
        """Its device memory, with the declared rates."""
        return replace(
            chunkc.Hardware.parse(self.hw),
            name=f"{self.hw} (declared)",
            rates=declared_rates(self.copy_gb_per_s),
        )


_BLOCKS: Final = Case("moving wins", 12, 128, 12, 512, "emulated-6m-1g", ("compute",), depth=3, moves=True)
CASES: Final = (
    Case("compute-bound", 24, 256, 24, 96, "emulated-24m-1g", ("compute",)),
    Case("copy-bound", 28, 512, 1, 24, "emulated-8m-1g", ("h2d", "d2h")),
    Case("update-bound", 24, 256, 24, 24, "emulated-12m-1g", ("cpu", "compute")),
    Case("with a decision", 24, 256, 24, 24, "emulated-12m-1g", ("cpu", "compute", "overhead"), max_grad_norm=1e9),
    Case("begun", 24, 256, 24, 24, "emulated-3m-1g", ("compute", "h2d")),
    Case("begun, decision", 24, 256, 24, 24, "emulated-3m-1g", ("compute", "h2d", "overhead"), max_grad_norm=1e9),
    _BLOCKS,
    replace(_BLOCKS, name="recomputed", activations="recompute", moves=False),
    replace(_BLOCKS, name="moving loses", copy_gb_per_s=COPY_GB_PER_S / 10, moves=False),
    replace(_BLOCKS, name="moved", copy_gb_per_s=COPY_GB_PER_S / 10, activations="offload", bounds=("h2d", "d2h")),
)
"""Behind a case of which the plan decides what is done with activations stands one that does the other."""


def declared_rates(copy_gb_per_s: float = COPY_GB_PER_S) -> Rates:
    """Rates of the machine; launches are declared to take no time, so their time counts as a difference."""
    copy = CopyRate(_exact(COPY_LATENCY_US), _exact(copy_gb_per_s))
    none = _exact(0.0)
    return Rates(
        h2d=copy,
        d2h=copy,
        slowdowns=tuple(_slowdowns()),
        cpu_update_gparam_per_s=(DtypeRate("float32", _exact(UPDATE_GPARAM_PER_S)),),
        gpu_update_gparam_per_s=(DtypeRate("float32", _exact(UPDATE_GPARAM_PER_S)),),
        matmul_tflops=(DtypeRate("float32", _exact(MATMUL_TFLOPS)),),
        attention_tflops=(DtypeRate("float32", _exact(MATMUL_TFLOPS)),),
        device_memory_gb_per_s=_exact(MEMORY_GB_PER_S),
        compute_launch_us=none,
        copy_launch_us=none,
        handoff_us=none,
        num_rounds=1,
        conditions=(),
        table=(),
    )


def _exact(value: float) -> Figure:
    return Figure(value, 0.0)


def _slowdowns() -> Iterator[Slowdown]:
    names = [str(s) for s in MEASURED_STREAMS]
    for of in names:
        others = sorted(n for n in names if n != of)
        for by in (c for n in range(1, len(names)) for c in combinations(others, n)):
            known = tuple(n for n in by if n != "compute")
            yield Slowdown(of, by, _exact(SLOWDOWNS.get((of, known), 1.0)))


@dataclass(frozen=True, slots=True)
class Run:
    """A training run on the throttled device, and what the simulator says of the same plan and machine.

    Attributes:
        plan, simulated: of this run.
        steps_ms: of the measured iterations, by the wall clock.
        exposed_ms: median over the iterations, and simulated_exposed_ms; see the module docstring.
        bound: stream with most of the critical path of the last iteration.
        peak_nbytes: of device memory, measured.
        work_shares: by stream, the real work of its actions, of the time that they were given.
        overrun_share: by how much work exceeded the time that it was given, of all iterations' time.
    """

    plan: Plan
    simulated: Timeline
    steps_ms: tuple[float, ...]
    exposed_ms: float
    simulated_exposed_ms: float
    bound: str
    peak_nbytes: int
    work_shares: Mapping[str, float]
    overrun_share: float

    @property
    def step_ms(self) -> float:
        """The measured step."""
        return statistics.median(self.steps_ms)

    @property
    def step_error(self) -> float:
        """Of the simulated step, relative to the measured one; negative where the simulator is too fast."""
        return self.simulated.step_ms / self.step_ms - 1

    @property
    def peak_error(self) -> float:
        """Of the planned peak of device memory, relative to the measured one."""
        return self.plan.memory.device_peak_nbytes / self.peak_nbytes - 1

    @property
    def hidden_share(self) -> float:
        """Of the copy time that can be hidden; see the module docstring."""
        copies_ms, waiting_ms = hideable(self.simulated)
        return (copies_ms - self.exposed_ms) / (copies_ms - waiting_ms)

    @property
    def work_share(self) -> float:
        """The largest of `work_shares`."""
        return max(self.work_shares.values())

    @property
    def is_disturbed(self) -> bool:
        """Whether this machine was too busy: some step or some work took longer than it should."""
        return self.overrun_share > 0.01 or max(self.steps_ms) - min(self.steps_ms) > 0.05 * self.step_ms


def moves_most(plan: Plan) -> bool:
    """Whether at least half of the bytes that are saved for backward move to the host and back."""
    return 2 * plan.copies_nbytes >= sum(value.nbytes for value in plan.saved) > 0


def hideable(timeline: Timeline) -> tuple[float, float]:
    """K and W of the module docstring, milliseconds."""
    copies_ms = waiting_ms = 0.0
    for programs in (("forward", "step"), ("backward",)):
        alone = {
            stream: sum(s.alone_ms for s in timeline.slices if s.stream is stream and s.program in programs)
            for stream in Stream
        }
        copies_ms += alone[Stream.H2D] + alone[Stream.D2H]
        others_ms = max(alone[Stream.COMPUTE], alone[Stream.CPU])
        waiting_ms += max(0.0, max(alone[Stream.H2D], alone[Stream.D2H]) - others_ms)
    return copies_ms, waiting_ms


def exposed_ms(ran: Iterable[tuple[Stream, float, float]], begin_ms: float, end_ms: float) -> float:
    """Exposed copy time between two moments, of actions as (stream, start, end)."""
    changes = []
    for stream, start_ms, stop_ms in ran:
        first_ms, last_ms = max(begin_ms, start_ms), min(end_ms, stop_ms)
        copies, others = (1, 0) if stream in (Stream.H2D, Stream.D2H) else (0, 1)
        if first_ms < last_ms:
            changes += [(first_ms, copies, others), (last_ms, -copies, -others)]
    num_copies = num_others = 0
    total_ms, since_ms = 0.0, begin_ms
    for now_ms, copies, others in sorted(changes):
        if num_copies and not num_others:
            total_ms += now_ms - since_ms
        since_ms, num_copies, num_others = now_ms, num_copies + copies, num_others + others
    return total_ms


def train(case: Case, num_steps: int = 5, settings: str = "throttle", num_tries: int = 3) -> Run:
    """Train ``case`` and measure ``num_steps`` steps.

    A run that was disturbed by what else the machine did (`Run.is_disturbed`) says nothing about a simulator: it is
    repeated, and the last of ``num_tries`` counts whatever happened.
    """
    for _ in range(num_tries):
        found = _train(case, num_steps, settings)
        if not found.is_disturbed:
            break
    return found


def _train(case: Case, num_steps: int, settings: str) -> Run:
    hw = case.machine()
    model = case.build()
    with patch.dict(os.environ, CHUNKC_EMULATED=settings):
        chunkc.compile(model, hw, **case.options())
    optimizer = chunkc.AdamW(model.parameters(), max_grad_norm=case.max_grad_norm)
    device: Any = compiled_of(model).runtime.device
    if not isinstance(device, EmulatedDevice):
        raise RuntimeError(f"{case.name} is to run on an emulated device, not on {device.name}")
    batch = case.batch()

    def iterate() -> None:
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    iterate()  # no update begins before a first step, so that this iteration is none of the plan's
    device.synchronize()
    spans = device.timekeeper.records = []
    marks = []
    for _ in range(NUM_WARM_UP + num_steps):
        marks.append(time.perf_counter())
        iterate()
    marks.append(time.perf_counter())
    peak_nbytes = chunkc.stats(model)["measured_peak_nbytes"]
    plan = chunkc.plan_of(model)
    return _read(plan, chunkc.simulate(plan, hw), [mark * 1e3 for mark in marks[NUM_WARM_UP:]], spans, peak_nbytes)


def _read(plan: Plan, simulated: Timeline, marks_ms: Sequence[float], spans: Sequence[Span], peak_nbytes: int) -> Run:
    """The times that follow from the spans of complete iterations, warm-up included."""
    names = [(n, p.name, str(a)) for p in plan.programs if p.is_repeated for n, a in p.labelled()]
    spans = [s for s in spans if s.pace is not None]  # not what reads norms between the programs
    tasks, steps = _tasks(spans), list(pairwise(marks_ms))
    steps_ms = tuple(end - begin for begin, end in steps)
    engine = Engine(Alone(), tasks=tasks)
    if [t.name for t in tasks] != [text for _, _, text in names] * (NUM_WARM_UP + len(steps)):
        raise RuntimeError("the device did not carry out the plan's actions once in each iteration")
    step_ms = statistics.median(steps_ms)
    path = critical_path(engine, tasks[-len(names) :], 2 * step_ms, step_ms)
    ran = [(t.stream, t.start_ms, t.end_ms) for t in tasks]
    expected = [(s.stream, s.start_ms, s.end_ms) for s in (*simulated.slices, *simulated.next_slices)]
    measured = sorted(spans, key=lambda s: s.number)[NUM_WARM_UP * len(names) :]
    return Run(
        plan=plan,
        simulated=simulated,
        steps_ms=steps_ms,
        exposed_ms=statistics.median(exposed_ms(ran, *step) for step in steps),
        simulated_exposed_ms=exposed_ms(expected, simulated.step_ms, 2 * simulated.step_ms),
        bound=max(path, key=lambda name: path[name]),
        peak_nbytes=peak_nbytes,
        work_shares=_work_shares(measured, len(names)),
        overrun_share=sum(s.end_s - s.due_s for s in measured if s.is_paced) / (sum(steps_ms) * 1e-3),
    )


def _work_shares(spans: Sequence[Span], num_actions: int) -> dict[str, float]:
    """Shares of work in iterations of ``num_actions`` actions.

    An action's work is its least over the iterations, which other programs slow least.
    """
    work_s: dict[str, float] = {}
    given_s: dict[str, float] = {}
    ordered = sorted(spans, key=lambda s: s.number)
    for position in range(num_actions):
        own = ordered[position::num_actions]
        stream = str(own[0].stream)
        work_s[stream] = work_s.get(stream, 0.0) + min(s.work_s for s in own)
        given_s[stream] = given_s.get(stream, 0.0) + statistics.median(s.due_s - s.start_s for s in own)
    return {stream: work_s[stream] / given_s[stream] for stream in work_s}


def _tasks(spans: Sequence[Span]) -> list[Task]:
    """The spans as tasks that ran, in the order of launching, so that what reads simulations reads them."""
    tasks, ordered = [], sorted(spans, key=lambda s: s.number)
    positions: dict[int | None, int] = {span.number: position for position, span in enumerate(ordered)}
    for span in ordered:
        alone_ms = 0.0 if span.pace is None else span.pace.alone_ms
        tasks.append(
            Task(
                number=positions[span.number],
                name=span.label,
                cost=Cost(alone_ms, Use(span.stream), 0.0),
                waits=(),
                start_ms=span.start_s * 1e3,
                worked_ms=span.end_s * 1e3,
                end_ms=span.end_s * 1e3,
                cause=positions.get(span.cause),
                host_cause=positions.get(span.host_cause),
            )
        )
    return tasks
