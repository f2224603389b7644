"""Steps of the optimizers over one model: what `chunkc.runtime.optim` knows of it.

A step takes every gradient that is there, in chunks or not, and launches the step program of the latest executor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import nn

from chunkc.distributed.agreement import Kind, Lines
from chunkc.runtime.execution.grad_norm import SkippedStep, StepDecision
from chunkc.runtime.model.backward_rules import present_gradients, refuse_unplanned
from chunkc.runtime.model.grad_clipping import GradClipping
from chunkc.runtime.model.gradient_values import GradientValues
from chunkc.runtime.model.memory_accounting import Accounting
from chunkc.runtime.model.program_state import ModelPhase, ProgramState
from chunkc.runtime.update.update_inputs import Hyper, step_lines


class OptimizerSteps:
    """The `OptimizerRuntime` of one model.

    Attributes:
        ranks: with which the model is trained; they step together.
        owners: which optimizer steps each parameter (kept by the optimizers).
        transactions: what changes values and counts together runs in these.
        decision: of the latest step that may be skipped.
        plan_recorded: makes the plans of graphs that ran without one; called at the first step, when all are known.
    """

    def __init__(
        self, gradient_values: GradientValues, clipping: GradClipping, state: ProgramState, accounting: Accounting
    ) -> None:
        self.ranks, self.transactions = state.ranks, state.transactions
        self.owners: dict[int, object] = {}
        self.decision: StepDecision | None = None
        self.plan_recorded: Callable[[], None] | None = None
        self._values, self._clipping, self._state, self._accounting = gradient_values, clipping, state, accounting
        self._parameters, self._gradients = gradient_values.parameters, gradient_values.gradients

    @property
    def is_sixteen_bit(self) -> bool:
        """Whether param32 is more precise than the parameter that the graphs read."""
        return self._parameters.is_sixteen_bit

    def name_of(self, index: int) -> str:
        """The parameter's name in the user's model."""
        return self._parameters.name_of(index)

    def is_trained(self, index: int) -> bool:
        """Whether the parameter has, or before the first plan may get, an optimizer state."""
        return self._parameters.is_trained(index)

    def read_state(
        self, param: int, names: Sequence[str] = ("exp_avg", "exp_avg_sq", "param32")
    ) -> tuple[torch.Tensor, ...]:
        """See `Parameters.read_state`."""
        return self._parameters.read_state(param, names)

    def write_state(
        self, param: int, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, param32: torch.Tensor | None
    ) -> None:
        """See `Parameters.write_state`."""
        self._parameters.write_state(param, exp_avg, exp_avg_sq, param32)

    def expect_optimizer(self) -> None:
        """An optimizer of chunkc holds some parameter."""
        self._parameters.has_optimizer = True

    def expect_clipping(self) -> None:
        """Gradients will be clipped: plans measure them as they land."""
        self._clipping.wants_norms = True

    def expect_scaled_losses(self) -> None:
        """The script scales its losses by itself until the next step."""
        self._clipping.is_scaled_outside = True

    def clip(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """See `GradClipping.clip`."""
        return self._clipping.clip(max_norm, norm_type)

    def unscale(self, inverse: torch.Tensor, scaler: Lines) -> torch.Tensor | None:
        """See `GradClipping.unscale`."""
        return self._clipping.unscale(inverse, scaler)

    def settle(self) -> None:
        """Wait for a transaction that its caller has left, and undo a change that an exception has ended."""
        self._state.settle()

    def check_step(self, params: Mapping[int, nn.Parameter]) -> frozenset[int]:
        """Indexes of all parameters that have a gradient now; see ``OptimizerRuntime``."""
        self.settle()
        return present_gradients(self._parameters, self._gradients)

    def prepare_step(self, stepped: Collection[int]) -> None:
        """Make the plans of graphs that ran without one; an exception leaves a model without them.

        Raises:
            ChunkcError: before the first forward of the model, when there is no plan for the parameters ``stepped``.
        """
        if self._state.executor is None and self.plan_recorded is not None:
            self.plan_recorded()
        if self._state.executor is None:
            refuse_unplanned(self._parameters, sorted(stepped))

    def step(self, hypers: Mapping[int, Hyper], steps: Mapping[int, int]) -> StepDecision | None:
        """Launch the step program and raise the autograd version of every parameter that it changes.

        Called in a transaction, after `prepare_step`.

        Returns:
            What becomes of it, where it may be skipped because a gradient is infinite or NaN.
        """
        assigned = [i for i in hypers if not self._gradients.is_handle(i)]
        self.ranks.agree(Kind.STEP, lambda: step_lines(hypers, steps, assigned, self.name_of))
        unshown = [i for i in self._gradients.unshown() if i not in hypers]
        self._parameters.foreign.end_gradients(unshown, self._parameters.names)
        with self.ranks.collective_section("a step", self._state.device.synchronize):
            return self._step(hypers, steps)

    def _step(self, hypers: Mapping[int, Hyper], steps: Mapping[int, int]) -> StepDecision | None:
        """`step`, on which all ranks have agreed."""
        self._state.reduce_gradients()
        self._state.num_expected = self._gradients.num_micro_batches or self._state.num_expected
        if self.decision is not None:
            self.decision.is_skipped()  # before the next decision stands where it stood
        self._take_assigned(hypers)
        executor, gradients, scale = self._state.running, self._gradients, self._clipping.own_scale
        self._clipping.is_scaled_outside = False  # until a script scales a loss again
        nonfinite = gradients.found
        if scale is not None:
            nonfinite = self._clipping.find_nonfinite(frozenset(hypers))
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
        self._parameters.raise_versions(hypers)
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
        self._parameters.join()
        self._state.to_cold()
        if plain:
            self._values.apply_factor()
        for index in zeros:
            gradients.host_grads[index] = self._values.zeros(index)
        for index in plain:
            grad = self._parameters.params[index].grad
            if grad is not None:
                gradients.chunk_grads.discard(index)
                own = grad.to("cpu", self._parameters.params[index].dtype).detach()
                gradients.host_grads[index] = self._values.averaged(own)
        self._values.move_into_chunks()
