"""Steps of the optimizers over one model: what `chunkc.runtime.optim` knows of it.

A step takes every gradient that is there, in chunks or not, and launches the step program of the latest executor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from torch import nn

from chunkc.distributed.agreement import Kind
from chunkc.runtime.execution.grad_norm import SkippedStep, StepDecision
from chunkc.runtime.model.backward_rules import present_gradients, refuse_unplanned
from chunkc.runtime.model.grad_clipping import GradClipping
from chunkc.runtime.model.gradient_values import GradientValues
from chunkc.runtime.model.memory_accounting import Accounting
from chunkc.runtime.model.program_state import ModelPhase, ProgramState
from chunkc.runtime.update.update_inputs import Hyper, step_lines


class OptimizerSteps:
    """One compiled model towards its optimizers, which name its parameters by their index in the layout.

    Attributes:
        owners: which optimizer steps each parameter (kept by the optimizers).
        transactions: what changes values and counts together runs in these.
        decision: of the latest step that may be skipped.
        plan_recorded: makes the plans of graphs that ran without one; called at the first step.
    """

    def __init__(
        self, gradient_values: GradientValues, clipping: GradClipping, state: ProgramState, accounting: Accounting
    ) -> None:
        self.ranks, self.transactions = state.ranks, state.transactions
        self.owners: dict[int, object] = {}
        self.decision: StepDecision | None = None
        self.plan_recorded: Callable[[], None] | None = None
        self._values, self.clipping, self._state, self._accounting = gradient_values, clipping, state, accounting
        self.parameters, self._gradients = gradient_values.parameters, gradient_values.gradients

    def settle(self) -> None:
        self._state.settle()

    def check_step(self, params: Mapping[int, nn.Parameter]) -> frozenset[int]:
        self.settle()
        return present_gradients(self.parameters, self._gradients)

    def prepare_step(self, stepped: Collection[int]) -> None:
        """Plan graphs that ran without a plan; ChunkcError before the first forward of the model."""
        if self._state.executor is None and self.plan_recorded is not None:
            self.plan_recorded()
        if self._state.executor is None:
            refuse_unplanned(self.parameters, sorted(stepped))

    def step(self, hypers: Mapping[int, Hyper], steps: Mapping[int, int]) -> StepDecision | None:
        """Launch the step program, in a transaction, and return its decision if it may be skipped."""
        assigned = [i for i in hypers if not self._gradients.is_handle(i)]
        self.ranks.agree(Kind.STEP, lambda: step_lines(hypers, steps, assigned, self.parameters.name_of))
        unshown = [i for i in self._gradients.unshown() if i not in hypers]
        self.parameters.foreign.end_gradients(unshown, self.parameters.names)
        with self.ranks.collective_section("a step", self._state.device.synchronize):
            return self._step(hypers, steps)

    def _step(self, hypers: Mapping[int, Hyper], steps: Mapping[int, int]) -> StepDecision | None:
        self._state.reduce_gradients()
        self._state.num_expected = self._gradients.num_micro_batches or self._state.num_expected
        if self.decision is not None:
            self.decision.is_skipped()  # before the next decision stands where it stood
        self._take_assigned(hypers)
        executor, gradients, scale = self._state.running, self._gradients, self.clipping.own_scale
        self.clipping.is_scaled_outside = False  # until a script scales a loss again
        nonfinite = gradients.found
        if scale is not None:
            nonfinite = self.clipping.find_nonfinite(frozenset(hypers))
        if executor.norm_table is None and nonfinite is not None and bool(nonfinite):
            self._state.restore_params()
            gradients.consume()
            self._accounting.steps.end()
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
            self._accounting.steps.end()
        except BaseException:
            self._state.enter(ModelPhase.BROKEN)
            raise
        return self.decision

    def _take_assigned(self, active: Mapping[int, Hyper]) -> None:
        """Plain tensors that eager operators or the user put into ``param.grad`` become gradients in chunks."""
        gradients = self._gradients
        plain = [i for i in active if not gradients.is_handle(i)]
        zeros = [i for i in active if gradients.is_handle(i) and not gradients.is_kept(i)]
        if not plain and not zeros and not gradients.host_grads and self._state.phase is not ModelPhase.SAVED:
            return
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
