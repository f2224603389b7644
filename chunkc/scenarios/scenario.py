"""Answers to "what if this model ran on that machine": plans and simulations of models given as data.

`Scenarios` answers each `Scenario` and keeps captures, which cost most, for the next question. Where all layers of a
model are alike, its schedule follows from captures of few of them (``chunkc.capture.periodic``).

With ``Recompute.AUTO`` a model is planned without activation checkpointing around every layer, and with it if it does
not fit. The plan is then that of ``chunkc.plan`` for the same checkpointed model. Of one without checkpoints
``chunkc.plan`` may compute some layers again, where that is faster; a scenario keeps all that it was asked to keep. In
fp16 it has the norms and the decision that loss scaling needs; with ``tracks_grad_norm=True`` those of clipping.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Final

import torch

from chunkc.capture.periodic import BASE, NotPeriodicError, periodic_schedule
from chunkc.compiler.memory.decisions import with_norms, with_scaled_tangents
from chunkc.compiler.plan_ahead import capture_ahead, plan_schedule, uncollected
from chunkc.compiler.segment_compiler import Backend
from chunkc.compiler.validation import compute_dtype, needs_scaling, param_infos, unique_params
from chunkc.cost.rates import known_rates
from chunkc.errors import BudgetError, HardwareError
from chunkc.hardware import Hardware
from chunkc.ir.plan import StageRecord
from chunkc.ir.schedule import Schedule
from chunkc.passes import Activations, PlanOptions, Target, budgets_of
from chunkc.passes.rematerialise import MANY_OPERATORS
from chunkc.passes.search import MAX_ACTIONS, SCREENING_ACTIONS
from chunkc.progress import stage, within
from chunkc.report import Plan
from chunkc.report.timeline import Timeline, simulate
from chunkc.runtime.update.rules import states_of
from chunkc.scenarios.models import Transformer

logger = logging.getLogger("chunkc")

Tell = Callable[[str], None]


class Recompute(StrEnum):
    """Whether activations are kept for backward, or every layer is computed again."""

    AUTO = "auto"
    NONE = "none"
    FULL = "full"


RECOMPUTATION: Final[Mapping[Activations, Recompute]] = MappingProxyType(
    {"auto": Recompute.AUTO, "keep": Recompute.NONE, "recompute": Recompute.FULL, "offload": Recompute.NONE}
)
"""Whether layers are computed again, by the choice for all activations."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One question: a model that is trained on a machine.

    Attributes:
        batch: sequences of one rank in a forward. sequence: tokens of each. accumulate: micro-batches of a step.
        recompute: whether layers are computed again in backward.
        dtype: compute dtype, or ``auto``.
        world_size: ranks; None takes the GPUs of ``hw``. rank: whose plan is asked for.
        chunk_numel: elements of a chunk; None lets the planner choose.
        shard: over which ranks model data is divided, ``all`` or those of a ``node``.
        policy: by which to plan; one of `policies`.
        backend: how segments would be compiled.
        tracks_grad_norm: whether gradients are measured as they land, and updates follow a decision, as with clipping;
            None: where the compute dtype needs loss scaling.
        optimizer: whose states are planned for, as ``chunkc.plan(optimizer=)`` names it.
        activations: whether saved values may go to host memory: where that is fastest (``auto``), all (``offload``) or
            none.
    """

    model: Transformer
    hw: Hardware
    batch: int
    sequence: int
    recompute: Recompute = Recompute.AUTO
    dtype: torch.dtype | str = "auto"
    world_size: int | None = None
    rank: int = 0
    chunk_numel: int | None = None
    policy: str = "chunkc"
    backend: Backend = "inductor"
    accumulate: int = 1
    shard: str = "all"
    tracks_grad_norm: bool | None = None
    optimizer: str = "adamw"
    activations: Activations = "auto"

    @property
    def num_ranks(self) -> int:
        return self.hw.num_ranks(self.world_size)

    def __str__(self) -> str:
        ranks = f"{self.num_ranks} ranks, " if self.num_ranks > 1 else ""
        ranks += "sharded within nodes, " if self.shard == "node" else ""
        times = f"{self.accumulate} x " if self.accumulate > 1 else ""
        clipping = {None: "", True: ", clipped", False: ", neither clipped nor scaled"}
        waits = clipping[self.tracks_grad_norm] + ("" if self.optimizer == "adamw" else f", {self.optimizer}")
        what = f"{self.model.label}, {ranks}batch {times}{self.batch} x {self.sequence}"
        moves = ", activations moved" if self.activations == "offload" else ""
        return f"{what}, recompute {self.recompute}{moves}{waits}"


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of a scenario.

    Attributes:
        scenario: as planned: ``recompute`` is decided. None for a model that is no data.
        plan: None where the model does not fit; shortage: why it does not.
        timeline: None without a plan, and where the machine's rates are not known, as ``unpriced`` says.
        elapsed_s: seconds that it took, captures included. planning_s: those behind the capture.
    """

    scenario: Scenario | None
    plan: Plan | None = None
    shortage: BudgetError | None = None
    timeline: Timeline | None = None
    unpriced: str = ""
    elapsed_s: float = 0.0
    planning_s: float = 0.0

    @property
    def fits(self) -> bool:
        return self.plan is not None


@dataclass(frozen=True, slots=True)
class CapturedAhead:
    """A schedule, and what its capture did."""

    schedule: Schedule
    stages: tuple[StageRecord, ...]


PolicyPlanner = Callable[[Scenario, CapturedAhead, Target, int], Plan]
"""Makes the verified plan of a scenario within a number of simulated actions, or raises `BudgetError`."""


def priced(plan: Plan, hw: Hardware) -> tuple[Timeline | None, str]:
    """The simulation of ``plan``, or None and why there is none."""
    stage("simulating")
    try:
        return simulate(plan, hw), ""
    except HardwareError as error:
        return None, " ".join(str(error).split())


@dataclass(slots=True)
class Scenarios:
    """Answers scenarios; ``tell`` is given a line for each plan that was made."""

    tell: Tell = lambda line: None
    _captures: dict[tuple[object, ...], CapturedAhead] = field(default_factory=dict)

    def answer(self, scenario: Scenario) -> Answer:
        """Plan and simulate ``scenario``; raises as `captured`."""
        if scenario.recompute is Recompute.AUTO:
            return self._faster(scenario)
        return self._answer(scenario)

    def _faster(self, scenario: Scenario) -> Answer:
        """Keep what fits; else recompute layers, unless moving what they save is faster.

        Of large models both are planned by a short search, and the better one again in full.
        """
        keeping, recomputing = (replace(scenario, recompute=r) for r in (Recompute.NONE, Recompute.FULL))
        num_operators = sum(len(graph.operators) for graph in self.captured(keeping).schedule.graphs)
        max_actions = SCREENING_ACTIONS if num_operators > MANY_OPERATORS else MAX_ACTIONS
        best = self._answer(keeping, max_actions)
        if best.plan is None or best.plan.moves:
            again = self._answer(recomputing, max_actions)
            best = again if not best.fits or (again.fits and _step_ms(again) < _step_ms(best)) else best
        if max_actions == MAX_ACTIONS or best.scenario is None or not best.fits:
            return best
        return self._answer(best.scenario)

    def _answer(self, scenario: Scenario, max_actions: int = MAX_ACTIONS) -> Answer:
        began_s = time.perf_counter()
        with uncollected(), within(str(scenario)):
            captured = self.captured(scenario)
            captured_s = time.perf_counter()
            answer = _planned(scenario, captured, max_actions)
        finished_s = time.perf_counter()
        answer = replace(answer, elapsed_s=finished_s - began_s, planning_s=finished_s - captured_s)
        self.tell(f"{scenario}: {'fits' if answer.fits else 'does not fit'} ({answer.elapsed_s:.1f} s)")
        return answer

    def captured(self, scenario: Scenario) -> CapturedAhead:
        """Return the capture of one iteration; of the machine, dtype and compute capability matter.

        Raises:
            ChunkcError: when the model cannot be built or captured.
        """
        key = _key(scenario)
        if key not in self._captures:
            self._captures[key] = _capture(scenario)
        return self._captures[key]

    def is_captured(self, scenario: Scenario) -> bool:
        """Whether an answer takes no more captures."""
        return _key(scenario) in self._captures


def _step_ms(answer: Answer) -> float:
    """The simulated step in milliseconds, 0 where it is unknown."""
    return 0.0 if answer.timeline is None else answer.timeline.step_ms


def _key(scenario: Scenario) -> tuple[object, ...]:
    hw = scenario.hw
    machine = (hw.compute_dtype, hw.compute_capability)
    facts = (scenario.batch, scenario.sequence, scenario.dtype, scenario.backend)
    return (repr(scenario.model), scenario.recompute, *machine, *facts)


def policies() -> tuple[str, ...]:
    """The policies by which a scenario can be planned, the default first."""
    return tuple(_POLICIES)


def _planned(scenario: Scenario, captured: CapturedAhead, max_actions: int) -> Answer:
    hw = scenario.hw
    world_size, num_replicas = hw.sharding(scenario.shard, scenario.world_size)
    target = Target(
        model=scenario.model.label,
        hw=str(hw),
        budgets=budgets_of(hw),
        world_size=world_size,
        rank=scenario.rank % world_size,
        num_replicas=num_replicas,
        rates=known_rates(hw) if hw.num_gpus == scenario.num_ranks else None,
        runs_inline=hw.emulated,
    )
    try:
        plan = _POLICIES[scenario.policy](scenario, captured, target, max_actions)
    except BudgetError as error:
        return Answer(scenario, shortage=error)
    timeline, unpriced = priced(plan, hw)
    return Answer(scenario, plan, timeline=timeline, unpriced=unpriced)


def _chunkc_plan(scenario: Scenario, captured: CapturedAhead, target: Target, max_actions: int) -> Plan:
    scales = needs_scaling(captured.schedule.params) and scenario.tracks_grad_norm is not False
    tracks_grad_norm = scales if scenario.tracks_grad_norm is None else scenario.tracks_grad_norm
    options = PlanOptions(
        chunk_numel=scenario.chunk_numel,
        accumulate=scenario.accumulate,
        tracks_grad_norm=tracks_grad_norm,
        scales=scales,
        state_spec=states_of(scenario.optimizer),
        activations=scenario.activations,
        moved_share=1.0 if scenario.activations == "offload" else 0.0,
    )
    schedule = with_scaled_tangents(captured.schedule) if scales else captured.schedule
    schedule = with_norms(schedule) if tracks_grad_norm else schedule
    stages, backend = captured.stages, scenario.backend
    return plan_schedule(schedule, target, options, stages, backend, max_actions=max_actions)


_POLICIES: Final[Mapping[str, PolicyPlanner]] = MappingProxyType({"chunkc": _chunkc_plan})


def _capture(scenario: Scenario) -> CapturedAhead:
    num_layers = scenario.model.num_layers
    if num_layers is None or num_layers <= BASE + 1:
        return _direct(scenario, scenario.model)
    model = scenario.model.build(recompute=scenario.recompute is Recompute.FULL)
    infos = param_infos(model, compute_dtype(scenario.dtype, list(unique_params(model)), scenario.hw))
    shallow, deeper = (_with_depth(scenario, depth) for depth in (BASE, BASE + 1))
    began_s = time.perf_counter()
    try:
        schedule = periodic_schedule(shallow.schedule, deeper.schedule, num_layers, infos)
    except NotPeriodicError as error:
        logger.info("%s is captured as it is: %s", scenario.model.label, error)
        return _direct(scenario, scenario.model)
    note = f"{num_layers} layers from captures of {BASE} and {BASE + 1}"
    record = StageRecord("periodic", 1e3 * (time.perf_counter() - began_s), note)
    return CapturedAhead(schedule, (*shallow.stages, *deeper.stages, record))


def _with_depth(scenario: Scenario, num_layers: int) -> CapturedAhead:
    with within(f"{num_layers} layers"):
        return _direct(scenario, scenario.model.with_depth(num_layers))


def _direct(scenario: Scenario, transformer: Transformer) -> CapturedAhead:
    stage("building the model")
    model = transformer.build(recompute=scenario.recompute is Recompute.FULL)
    dtype = compute_dtype(scenario.dtype, list(unique_params(model)), scenario.hw)
    inputs = transformer.inputs(scenario.batch, scenario.sequence)
    captured = capture_ahead(model, dtype, inputs, scenario.backend, gpu=scenario.hw.compute_capability)
    return CapturedAhead(captured.schedule, captured.stages)
