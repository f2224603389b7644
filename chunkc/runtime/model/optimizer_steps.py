"""Steps of the optimizers over one model: what `chunkc.runtime.optim` knows of it.

A step takes every gradient that is there, in chunks or not, and launches the step program of the latest executor. By
the clock it lasts from the end of one ``optimizer.step()`` to the end of the next, with whatever the user does in
between: that is the time which tokens per second are about. Updates that run beside the next forward count where they
are waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass

from chunkc.distributed.agreement import Kind
from chunkc.ir.actions import Stream
from chunkc.ir.plan import Plan
from chunkc.runtime.execution.executor import ExpectedInputs
from chunkc.runtime.execution.grad_norm import SkippedStep, StepDecision
from chunkc.runtime.model.backward_rules import refuse_unplanned, refuse_unsteppable
from chunkc.runtime.model.grad_clipping import GradClipping
from chunkc.runtime.model.gradient_values import GradientValues
from chunkc.runtime.model.program_state import ModelPhase, ProgramState
from chunkc.runtime.update.rules import Hyper
from chunkc.runtime.update.update_inputs import step_lines


@dataclass(frozen=True, slots=True)
class StepWindow:
    """One step: its seconds, the plans of each forward's graphs, and the compute stream's waits."""

    elapsed_s: float
    calls: tuple[tuple[Plan, ...], ...]
    stalled_s: Mapping[Stream, float]


class StepLog:
    """The latest whole step, None before the second has ended, by a ``clock`` in seconds."""

    def __init__(
        self, stalled_s: Callable[[], Mapping[Stream, float]], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.num_steps = 0
        self.latest: StepWindow | None = None
        self._stalled_s = stalled_s
        self._clock = clock
        self._ended_s = 0.0
        self._stalls_before: Mapping[Stream, float] = {}
        self._calls: list[tuple[Plan, ...]] = []

    def forward(self, plans: Sequence[Plan]) -> None:
        self._calls.append(tuple(plans))

    def end(self) -> None:
        now_s, stalls = self._clock(), self._stalled_s()
        if self.num_steps:
            since = {stream: total - self._stalls_before.get(stream, 0.0) for stream, total in stalls.items()}
            self.latest = StepWindow(now_s - self._ended_s, tuple(self._calls), since)
        self._ended_s, self._stalls_before = now_s, stalls
        self._calls.clear()
        self.num_steps += 1


class OptimizerSteps:
    """One compiled model towards its optimizers, which name its parameters by their index in the layout.

    Attributes:
        log: how long the steps take, and what they were made of.
        owners: which optimizer steps each parameter (kept by the optimizers).
        transactions: what changes values and counts together runs in these.
        decision: of the latest step that may be skipped.
        expected_inputs: of the optimizer that stepped last, says what a step of given parameters would take now.
        plan_recorded: makes the plans of graphs that ran without one; called at the first step.
    """

    def __init__(self, gradient_values: GradientValues, clipping: GradClipping, state: ProgramState) -> None:
        self.ranks, self.transactions = state.ranks, state.transactions
        self.log = StepLog(state.device.stalled_s)
        self.owners: dict[int, object] = {}
        self.decision: StepDecision | None = None
        self.expected_inputs: Callable[[Set[int]], ExpectedInputs | None] | None = None
        self.plan_recorded: Callable[[], None] | None = None
        self._values, self.clipping, self._state = gradient_values, clipping, state
        self.parameters, self._gradients = gradient_values.parameters, gradient_values.gradients

    def expect(self, made: Set[int]) -> ExpectedInputs | None:
        """Inputs of the step behind a backward that makes gradients of ``made``; None where none is expected.

        Before the first step, no optimizer is known, and a micro-batch before the last is followed by others.
        """
        gradients, state = self._gradients, self._state
        is_last = gradients.num_micro_batches >= (state.num_expected or gradients.accumulate)
        if self.expected_inputs is None or not is_last or gradients.host_grads:
            return None
        return self.expected_inputs(made | gradients.published(gradients.chunk_grads))

    def settle(self) -> None:
        self._state.settle()

    def check_step(self) -> frozenset[int]:
        """The parameters that have a gradient; ChunkcError where one cannot be stepped."""
        self.settle()
        present, doubtful = self._gradients.present(self.parameters.trained)
        if doubtful:
            refuse_unsteppable(self.parameters, self._gradients, doubtful)
        return present

    def prepare_step(self, stepped: Collection[int]) -> None:
        """Plan graphs that ran without a plan; ChunkcError before the first forward of the model."""
        if self._state.executor is None and self.plan_recorded is not None:
            self.plan_recorded()
        if self._state.executor is None:
            refuse_unplanned(self.parameters, sorted(stepped))

    def step(self, hypers: Mapping[int, Hyper], steps: Mapping[int, int]) -> StepDecision | None:
        """Launch the step program, in a transaction, and return its decision if it may be skipped."""
        if self.ranks.job_size > 1:
            assigned = [i for i in hypers if not self._gradients.is_handle(i)]
            self.ranks.agree(Kind.STEP, lambda: step_lines(hypers, steps, assigned, self.parameters.name_of))
        if self.parameters.foreign.has_read:
            unshown = [i for i in self._gradients.unshown() if i not in hypers]
            self.parameters.foreign.end_gradients(unshown, self.parameters.names)
        with self._state.collective("a step"):
            return self._step(hypers, steps)

    def _step(self, hypers: Mapping[int, Hyper], steps: Mapping[int, int]) -> StepDecision | None:
        self._state.reduce_gradients()
        self._state.num_expected = self._gradients.num_micro_batches or self._state.num_expected
        if self.decision is not None:
            self.decision.is_skipped()  # before the next decision stands where it stood
        self._take_assigned(hypers)
        executor, gradients, clipping = self._state.running, self._gradients, self.clipping
        scale = None if clipping.loss_scale is None else clipping.own_scale
        clipping.is_scaled_outside = False  # until a script scales a loss again
        nonfinite = gradients.found if scale is None else clipping.find_nonfinite(frozenset(hypers))
        if executor.norm_table is None and nonfinite is not None and bool(nonfinite):
            executor.drop_begun()
            self._state.restore_params()
            gradients.consume()
            self.log.end()
            self.decision = SkippedStep()
            return self.decision
        if executor.norm_table is None and gradients.factor is not None:
            self._state.device.synchronize()
            self._values.apply_factor()
        factor = gradients.factor
        gradients.consume()
        self.parameters.raise_versions(hypers)
        try:
            self.decision = executor.step(hypers, steps, factor, nonfinite, scale)
            self.log.end()
        except BaseException:
            self._state.enter(ModelPhase.BROKEN)
            raise
        return self.decision

    def _take_assigned(self, active: Mapping[int, Hyper]) -> None:
        """Plain tensors that eager operators or the user put into ``param.grad`` become gradients in chunks."""
        gradients = self._gradients
        doubtful = gradients.doubtful(active)
        if not doubtful and not gradients.host_grads and self._state.phase is not ModelPhase.SAVED:
            return
        plain = [i for i in doubtful if not gradients.is_handle(i)]
        zeros = [i for i in doubtful if gradients.is_handle(i)]
        self.parameters.join()
        self._state.to_cold()
        if plain:
            self._values.apply_factor()
        for index in zeros:
            gradients.host_grads[index] = self._values.zeros(index)
        for index in plain:
            grad = self.parameters.params[index].grad
            if grad is not None:
                gradients.chunk_grads.discard(index)
                own = grad.to("cpu", self.parameters.params[index].dtype).detach()
                gradients.host_grads[index] = self._values.averaged(own)
        self._values.move_into_chunks()
