"""A runner: one captured model that is planned and trained again and again, each time from its initial values.

A runner captures once by the product's path and gives every run a new runtime, device and plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from machines import EMULATED, Machine
from models import Case
from torch import nn
from training import AfterStep, Recipe, Trained, train

import chunkc
from chunkc.capture.graphs import Captured
from chunkc.compiler.capture_session import CaptureSession
from chunkc.compiler.compiled_model import CompiledModel, compiled_of
from chunkc.compiler.evaluation import Evaluator
from chunkc.compiler.graph_entry import GraphEntry
from chunkc.compiler.graph_set import GraphSet, RecordedGraph
from chunkc.compiler.validation import unique_params
from chunkc.errors import BudgetError, ChunkcError
from chunkc.hardware.usable_memory import Budget
from chunkc.ir.plan import Plan
from chunkc.ir.schedule import ParamInfo
from chunkc.ir.tiers import Tier
from chunkc.passes import PlanOptions
from chunkc.runtime.devices.debug_settings import DebugSettings
from chunkc.runtime.devices.protocol import Device
from chunkc.runtime.model.model import ModelRuntime
from chunkc.runtime.update.rules import OPTIMIZERS

BIG_NBYTES = 1 << 30
POISON = DebugSettings(poison=True)
MakeRuntime = Callable[[Sequence[ParamInfo], Sequence[nn.Parameter], Device, int], ModelRuntime]
GetRunner = Callable[..., "PlanRunner"]
Cuts = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Setup:
    """What a run is planned for and runs on; ``host_arithmetic``: of all updates, those on the device too."""

    options: PlanOptions = PlanOptions()  # noqa: RUF009 - frozen
    device_nbytes: int = BIG_NBYTES
    host_nbytes: int = BIG_NBYTES
    settings: DebugSettings = POISON
    make_runtime: MakeRuntime = ModelRuntime
    host_arithmetic: bool = False


class PlanRunner:
    """See the module's text. ``dtype`` is the compute dtype; ``plans`` keeps plans that tests want to find again."""

    def __init__(
        self, case: Case, dtype: torch.dtype = torch.float32, backend: Any = "eager", machine: Machine = EMULATED
    ) -> None:
        self.case = case
        self.dtype = dtype
        self.machine = machine
        self.batches = machine.put(case.batches())
        self.plans: dict[str, Plan] = {}
        self.model = chunkc.compile(case.build(), machine.hw(BIG_NBYTES, BIG_NBYTES), dtype=dtype, backend=backend)
        made = compiled_of(self.model)
        self._captures: list[tuple[Captured, GraphEntry]] = []
        self.compiled = CompiledModel(self.model, made.runtime, made.settings, self._plan_later)
        self.compiled.enter()
        with pytest.raises(ChunkcError, match="before it had one"):
            self.model(**self.batches[0])

    def _plan_later(self, session: CaptureSession, recorded: RecordedGraph, entry: GraphEntry) -> None:
        self._captures.append((recorded.captured, entry))
        if len(self._captures) > 1:  # some models are captured anew at their second call
            session.plan(recorded, entry)

    @property
    def captured(self) -> Captured:
        return self._captures[-1][0]

    @property
    def plan(self) -> Plan:
        executor = self.compiled.runtime.executor
        if executor is None:
            raise RuntimeError("nothing has run yet")
        return executor.plan

    @property
    def next_plan(self) -> Plan:
        return self.compiled.session.planned[-1].plan

    def reset(self, setup: Setup) -> None:
        """Initial values, a new device and a new plan; BudgetError when ``setup`` does not fit."""
        fresh = self.case.build()
        session, old = self.compiled.session, self.compiled.runtime
        params = old.params
        for p in params:
            p.grad = None
        device = self.machine.make_device(
            setup.device_nbytes, setup.host_nbytes, setup.settings, host_arithmetic=setup.host_arithmetic
        )
        micro_batches = setup.options.accumulate
        runtime = setup.make_runtime(old.infos, list(unique_params(fresh)), device, micro_batches)
        runtime.params = runtime.parameters.params = runtime.gradients.params = params
        runtime.parameters.shells = old.parameters.shells
        runtime.parameters.state_spec = setup.options.state_spec
        for p in params:
            p.chunkc_store = runtime.parameters
        with torch.no_grad():
            for buffer, initial in zip(self.model.buffers(), fresh.buffers(), strict=True):
                buffer.copy_(initial)
        budgets = {Tier.DEVICE: Budget(setup.device_nbytes), Tier.HOST: Budget(setup.host_nbytes)}
        target = replace(session.settings.target, rates=None, budgets=budgets)  # no search by rates
        session.settings.target, session.settings.options = target, setup.options
        session.runtime = runtime
        self.compiled.evaluator = Evaluator(session)
        captured, entry = self._captures[-1]
        session.graphs = GraphSet(runtime, session.request, session.install)
        entry.attach(runtime, captured, session.graphs.fit, widen=session.graphs.widen)
        session.plan(session.recorded(captured, compiles=True), entry)

    def train(
        self,
        setup: Setup,
        recipe: Recipe,
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
        after_step: AfterStep | None = None,
    ) -> Trained:
        """Train from the initial values with the recipe's optimizer (or ``make_optimizer(model)``)."""
        states = OPTIMIZERS[recipe.optimizer]
        self.reset(replace(setup, options=replace(setup.options, state_spec=states)))
        return self.run_steps(recipe, after_step, make_optimizer)

    def run_steps(
        self,
        recipe: Recipe,
        after_step: AfterStep | None = None,
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    ) -> Trained:
        make = make_optimizer or (lambda model: recipe.ours(model.parameters()))
        found = train(self.model, self.batches, make(self.model), recipe, after_step)
        found.params = {
            info.name: self.compiled.runtime.parameters.read_exact(i) for i, info in enumerate(self.plan.layout.params)
        }
        return found

    def stats(self) -> dict[str, int]:
        return chunkc.stats(self.model)

    def smallest(self, options: PlanOptions = PlanOptions()) -> tuple[int, int]:  # noqa: B008 - frozen
        try:
            self.reset(Setup(options, device_nbytes=1, host_nbytes=BIG_NBYTES))
        except BudgetError as error:
            return error.min_device_nbytes, error.min_host_nbytes
        raise AssertionError("one byte of device memory was found to suffice")


def cuts_of(plan: Plan) -> Cuts:
    """Where all segments of ``plan`` but the first start, as an option for another plan."""
    forward, backward = (tuple(s.first_op for s in plan.graph_segments(g)[1:]) for g in ("forward", "backward"))
    return forward, backward


def spans_of(plan: Plan) -> list[tuple[str, int, int]]:
    return [(s.graph, s.first_op, s.end_op) for s in plan.segments]
