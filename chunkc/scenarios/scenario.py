"""Answers to "what if this model ran on that machine": plans and simulations of models given as data.

`Scenarios` answers each `Scenario` and keeps captures, which cost most, for the next question.

With ``Recompute.AUTO`` the share of layers that are computed again is chosen as ``chunkc.compile`` chooses it, by
`chunkc.passes.rematerialise`: each share is planned by a short search, which moves saved values too, and the fastest
one again in full. In fp16 a plan has the norms and the decision that loss scaling needs; with
``tracks_grad_norm=True`` those of clipping.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Final

import torch

from chunkc.capture.layers.deep_captures import CapturedAhead
from chunkc.compiler.memory.decisions import with_decision_bytes
from chunkc.compiler.plan_ahead import plan_schedule, uncollected
from chunkc.compiler.segment_compiler import Backend
from chunkc.compiler.validation import needs_scaling
from chunkc.cost.rates import known_rates
from chunkc.distributed.job import lay_out_ahead
from chunkc.distributed.mesh import RankMesh
from chunkc.distributed.stages import check_unscaled
from chunkc.errors import BudgetError, HardwareError
from chunkc.hardware import Hardware
from chunkc.ir.schedule import Schedule
from chunkc.ir.tiers import Tier
from chunkc.passes import Activations, Packings, Planned, PlanOptions, Target, budgets_of, make_fastest_plan
from chunkc.passes.rematerialise import (
    KEEP_ALL,
    RECOMPUTE_ALL,
    BudgetCandidate,
    BudgetChoice,
    Priced,
    choose_among,
    choose_budget,
)
from chunkc.passes.search import MAX_ACTIONS, SCREENING_ACTIONS
from chunkc.progress import stage, within
from chunkc.report import Plan
from chunkc.report.timeline import Timeline, simulate
from chunkc.runtime.update.rules import states_of
from chunkc.scenarios.captures import Captures, Subject
from chunkc.scenarios.models import Transformer

Tell = Callable[[str], None]


class Recompute(StrEnum):
    """Whether activations are kept, or computed again in all layers or in the first ones."""

    AUTO = "auto"
    NONE = "none"
    PARTIAL = "partial"
    FULL = "full"


RECOMPUTATION: Final[Mapping[Activations, Recompute]] = MappingProxyType(
    {"auto": Recompute.AUTO, "keep": Recompute.NONE, "recompute": Recompute.FULL, "offload": Recompute.NONE}
)
"""Whether layers are computed again, by the choice for all activations."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One question: a model that is trained on a machine.

    Attributes:
        batch: sequences of one rank in a forward. sequence: tokens of each, which ranks along ``cp`` divide.
        accumulate: micro-batches of a step.
        recompute: whether layers are computed again in backward. kept_share: of the layers, those, at the end, that
            are not, where ``recompute`` is ``partial``.
        dtype: compute dtype, or ``auto``.
        world_size: ranks; None takes the GPUs of ``hw``. rank: whose plan is asked for.
        chunk_numel: elements of a chunk; None lets the planner choose.
        shard: over which ranks model data is divided, ``all`` or those of a ``node``.
        mesh: the ranks by dimension, as ``chunkc.plan(mesh=)`` reads a text; empty: as ``shard`` says. With ``tp``,
            whoever asks has made a process group of the ranks, if a fake one.
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
    mesh: str = ""
    kept_share: float = 0.5

    @property
    def keep(self) -> float:
        """The activation budget in [0, 1]; ValueError where it is not decided."""
        match self.recompute:
            case Recompute.AUTO:
                raise ValueError(f"of {self} it is not decided what is computed again")
            case Recompute.PARTIAL:
                return self.kept_share
        return KEEP_ALL if self.recompute is Recompute.NONE else RECOMPUTE_ALL

    def keeping(self, keep: float) -> Scenario:
        """The same with an activation budget."""
        ends = {KEEP_ALL: Recompute.NONE, RECOMPUTE_ALL: Recompute.FULL}
        return replace(self, recompute=ends.get(keep, Recompute.PARTIAL), kept_share=keep)

    @property
    def subject(self) -> Subject:
        """Subject of the capture."""
        numbers, ranks = (self.batch, self.sequence), self.ranks
        return Subject(*(self.model, *numbers, self.dtype, self.backend, self.hw), ranks.num_tensor, ranks.num_context)

    @property
    def ranks(self) -> RankMesh:
        """The ranks by dimension; ChunkcError for those that cannot be."""
        return lay_out_ahead(self.mesh or None, self.hw, self.shard, self.world_size, self.model.place)

    @property
    def num_ranks(self) -> int:
        return self.hw.num_ranks(self.world_size)

    @property
    def buffers_nbytes(self) -> int:
        """Bytes of a device that are kept for what goes between stages of a pipeline."""
        return self.model.buffers_nbytes(self.batch, self.sequence, self.accumulate, self.dtype, self.hw)

    def __str__(self) -> str:
        ranks = f"{self.num_ranks} ranks, " if self.num_ranks > 1 else ""
        ranks += f"mesh {self.mesh}, " if self.mesh else ""
        ranks += "sharded within nodes, " if self.shard == "node" else ""
        times = f"{self.accumulate} x " if self.accumulate > 1 else ""
        clipping = {None: "", True: ", clipped", False: ", neither clipped nor scaled"}
        waits = clipping[self.tracks_grad_norm] + ("" if self.optimizer == "adamw" else f", {self.optimizer}")
        what = f"{self.model.title}, {ranks}batch {times}{self.batch} x {self.sequence}"
        moves = ", activations moved" if self.activations == "offload" else ""
        share = f" ({1 - self.kept_share:.0%} of the layers)" if self.recompute is Recompute.PARTIAL else ""
        return f"{what}, recompute {self.recompute}{share}{moves}{waits}"


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
class Estimate:
    """The outcome of short searches.

    Of `Recompute.AUTO` it is that of the best share of layers computed again, of those that were tried.

    Attributes:
        scenario: as asked for. num_tokens: of all ranks in a step.
        best: its simulated step, and the memory of one rank.
    """

    scenario: Scenario
    num_tokens: int
    best: BudgetCandidate


PolicyPlanner = Callable[[Scenario, CapturedAhead, Target, int, Packings], Plan]
"""Makes the verified plan of a scenario within a number of simulated actions, or raises `BudgetError`.

It is given the packings of plans that were made before, and adds its own."""


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
    _captures: Captures = field(default_factory=Captures)
    _priced: dict[str, Priced] = field(default_factory=dict)
    _packings: dict[str, Packings] = field(default_factory=dict)  # by subjects

    def estimate(self, scenario: Scenario, *, tries_all: bool = False) -> Estimate | Answer:
        """A look at ``scenario`` by short searches; the answer where nothing fits.

        ``tries_all``: whether all shares are tried of layers that are computed again, as `answer` does, or the ends.
        What is simulated is not simulated again for `answer`. Errors as of `captured`.
        """
        began_s, budgets = time.perf_counter(), self._budgets(scenario)
        with uncollected(), within(str(scenario)):
            choice = budgets.choice() if tries_all and scenario.recompute is Recompute.AUTO else budgets.first_choice()
            schedule = budgets.schedule_with(choice.budget)
            if not choice.best.fits:
                return self._refused(scenario.keeping(choice.budget), budgets.refusals.get(schedule.digest()), began_s)
        num_lines = scenario.ranks.num_replicas * scenario.ranks.num_sharing
        return Estimate(scenario, schedule.num_tokens * num_lines * scenario.accumulate, choice.best)

    def _refused(self, scenario: Scenario, refusal: _Refusal | None, began_s: float) -> Answer:
        """The answer of one that does not fit, planned again where a short search has left no error."""
        if refusal is None:
            return self._answer(scenario, SCREENING_ACTIONS)
        elapsed_s = time.perf_counter() - began_s
        self.tell(f"{scenario}: does not fit ({elapsed_s:.1f} s)")
        return Answer(scenario, shortage=refusal.error, elapsed_s=elapsed_s, planning_s=refusal.planning_s)

    def answer(self, scenario: Scenario, max_actions: int = MAX_ACTIONS) -> Answer:
        """Plan and simulate ``scenario``; ``max_actions`` as of `make_fastest_plan`. Raises as `captured`."""
        if scenario.recompute is Recompute.AUTO:
            return self._fastest(scenario, max_actions)
        return self._answer(scenario, max_actions)

    def _fastest(self, scenario: Scenario, max_actions: int) -> Answer:
        """Plan with the share of layers computed again that is the fastest, or makes the model fit."""
        began_s, budgets = time.perf_counter(), self._budgets(scenario)
        with uncollected(), within(str(scenario)):
            choice = budgets.choice()
        self.tell(f"{scenario}: {choice.note} ({time.perf_counter() - began_s:.1f} s)")
        answer = self._answer(scenario.keeping(choice.budget), max_actions)
        return replace(answer, elapsed_s=time.perf_counter() - began_s)

    def _budgets(self, scenario: Scenario) -> _Budgets:
        def schedule_with(keep: float) -> Schedule:
            return self.captured(scenario.keeping(keep)).schedule

        priced = self._priced.setdefault(repr(scenario), Priced())
        return _Budgets(scenario, _target(scenario), priced, schedule_with, self._packings_of(scenario))

    def _packings_of(self, scenario: Scenario) -> Packings:
        return self._packings.setdefault(repr(scenario.subject.key), Packings())

    def _answer(self, scenario: Scenario, max_actions: int) -> Answer:
        began_s = time.perf_counter()
        with uncollected(), within(str(scenario)):
            captured = self.captured(scenario)
            captured_s = time.perf_counter()
            answer = _planned(scenario, captured, max_actions, self._packings_of(scenario))
        finished_s = time.perf_counter()
        answer = replace(answer, elapsed_s=finished_s - began_s, planning_s=finished_s - captured_s)
        self.tell(f"{scenario}: {'fits' if answer.fits else 'does not fit'} ({answer.elapsed_s:.1f} s)")
        return answer

    def captured(self, scenario: Scenario) -> CapturedAhead:
        """Return the capture of one iteration; of the machine, dtype and compute capability matter.

        Raises:
            ChunkcError: when the model cannot be built or captured.
        """
        return self._captures.of(scenario.subject, scenario.keep)

    def is_captured(self, scenario: Scenario) -> bool:
        """Whether an answer takes no more captures."""
        return scenario.recompute is not Recompute.AUTO and self._captures.has(scenario.subject, scenario.keep)


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Why a plan does not fit, and the seconds in which that was found."""

    error: BudgetError
    planning_s: float


@dataclass(frozen=True, slots=True)
class _Budgets:
    """Plans of one scenario by activation budget, each of a short search.

    ``priced``: of those that were simulated. ``refusals``: of those that do not fit, by digests of schedules.
    """

    scenario: Scenario
    target: Target
    priced: Priced
    schedule_with: Callable[[float], Schedule]
    packings: Packings
    refusals: dict[str, _Refusal] = field(default_factory=dict)

    def first_choice(self) -> BudgetChoice:
        """The better one of all layers computed again and all kept, or what the scenario says."""
        tried = (RECOMPUTE_ALL, KEEP_ALL) if self.scenario.recompute is Recompute.AUTO else (self.scenario.keep,)
        return choose_among(tried, self.schedule_with, self.plan_with, self.target.rates, self.priced)

    def choice(self) -> BudgetChoice:
        """The best of all shares."""
        is_cheap = self.scenario.model.num_layers is not None
        return choose_budget(
            self.schedule_with, self.plan_with, self.target.rates, is_cheap=is_cheap, priced=self.priced
        )

    def plan_with(self, schedule: Schedule) -> Planned:
        wished, options = _wishes(self.scenario, schedule)
        max_actions, packings = SCREENING_ACTIONS, self.packings
        began_s = time.perf_counter()
        try:
            return make_fastest_plan(wished, self.target, options, max_actions=max_actions, packings=packings)
        except BudgetError as error:
            self.refusals[schedule.digest()] = _Refusal(error, time.perf_counter() - began_s)
            raise


def policies() -> tuple[str, ...]:
    """The policies by which a scenario can be planned, the default first."""
    return tuple(_POLICIES)


def _target(scenario: Scenario) -> Target:
    hw, ranks = scenario.hw, scenario.ranks
    return Target(
        model=scenario.model.title,
        hw=str(hw),
        budgets=budgets_of(hw),
        world_size=ranks.num_sharing,
        rank=scenario.rank % ranks.num_sharing,
        num_replicas=ranks.num_replicas,
        rates=known_rates(hw) if hw.num_gpus == scenario.num_ranks else None,
        runs_inline=hw.emulated,
        mesh=ranks.dims,
    ).less({Tier.DEVICE: scenario.buffers_nbytes})


def _planned(scenario: Scenario, captured: CapturedAhead, max_actions: int, packings: Packings) -> Answer:
    hw = scenario.hw
    try:
        plan = _POLICIES[scenario.policy](scenario, captured, _target(scenario), max_actions, packings)
    except BudgetError as error:
        return Answer(scenario, shortage=error)
    timeline, unpriced = priced(plan, hw)
    return Answer(scenario, plan, timeline=timeline, unpriced=unpriced)


def _chunkc_plan(
    scenario: Scenario, captured: CapturedAhead, target: Target, max_actions: int, packings: Packings
) -> Plan:
    schedule, options = _wishes(scenario, captured.schedule)
    wanted = (schedule, target, options, captured.stages, scenario.backend)
    return plan_schedule(*wanted, max_actions=max_actions, packings=packings)


def _wishes(scenario: Scenario, schedule: Schedule) -> tuple[Schedule, PlanOptions]:
    """``schedule`` with its norms and scaled tangents, and the options of its plan."""
    scales = needs_scaling(schedule.params) and scenario.tracks_grad_norm is not False
    tracks_grad_norm = scales if scenario.tracks_grad_norm is None else scenario.tracks_grad_norm
    if scales:
        check_unscaled(scenario.ranks)
    options = PlanOptions(
        chunk_numel=scenario.chunk_numel,
        accumulate=scenario.accumulate,
        in_flight=scenario.model.in_flight(scenario.accumulate),
        tracks_grad_norm=tracks_grad_norm,
        scales=scales,
        state_spec=states_of(scenario.optimizer),
        activations=scenario.activations,
        moved_share=1.0 if scenario.activations == "offload" else 0.0,
    )
    return with_decision_bytes(schedule, tracks_grad_norm=tracks_grad_norm, scales=scales), options


_POLICIES: Final[Mapping[str, PolicyPlanner]] = MappingProxyType({"chunkc": _chunkc_plan})
