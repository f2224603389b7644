"""Run the programs of one compiled model, in every order that autograd allows.

Gradients overlay payloads until they are stepped or discarded; discarding restores payloads from param32. An order that
adds up gradients of more backwards than were declared is refused before anything has changed. With several, gradients
have chunks of their own, and forwards and evaluations may come in between. An exception inside a program brings the
model to the cold state with the parameters of the last step; inside a backward, gradients since then are gone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from chunkc._torch_compat.core import current_backward
from chunkc.distributed.agreement import Kind, backward_line
from chunkc.distributed.process_group import Ranks
from chunkc.errors import AccumulationError
from chunkc.ir.actions import Stream
from chunkc.ir.schedule import ParamInfo
from chunkc.runtime.devices.protocol import Device
from chunkc.runtime.execution.executor import Executor
from chunkc.runtime.execution.grad_norm import SkippedStep, StepDecision
from chunkc.runtime.execution.warmup_graph import UnplannedGraph
from chunkc.runtime.model import backward_rules
from chunkc.runtime.model.program_state import AtStake, Transitions
from chunkc.runtime.params.autograd_coverage import find_accumulators, left_out
from chunkc.runtime.update.update_inputs import Hyper, step_lines


class ModelRuntime(Transitions):
    """State machine over the executors of one model; see the module docstring.

    Attributes:
        executors: of every captured graph, by a key of its own.
        ran: what has run forward in the latest call.
        measures: ``wants_norms`` as the call under way found it.
        plan_recorded: makes the plans of graphs that ran without one; called at the first step, when all are known.
    """

    def __init__(
        self,
        infos: Sequence[ParamInfo],
        params: Sequence[nn.Parameter],
        device: Device,
        accumulate: int = 1,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(infos, params, device, accumulate, ranks)
        self.num_forwards = 0
        self.executors: dict[object, Executor] = {}
        self._broken, self._num_calls = False, 0
        self._call_of: dict[object, int] = {}
        self.ran: list[Executor | UnplannedGraph] = []
        self._accumulators: dict[int, Node] = {}
        self._watched: set[int] = set()
        self.plan_recorded: Callable[[], None] | None = None
        self.measures = False

    def moved_nbytes(self, stream: Stream) -> int:
        """Bytes copied on ``stream`` by the latest executor; with micro-batches, by all executors of its step."""
        latest = self._running()
        executors = self.executors.values() if self.accumulate > 1 else (latest,)
        return sum(e.moved_nbytes(stream) for e in executors if e.step_number == latest.step_number)

    @property
    def is_broken(self) -> bool:
        """Whether an update failed halfway, so that parameters are of two steps."""
        return self._broken

    @property
    def can_evaluate(self) -> bool:
        """Whether an evaluation may run from cold: chunks hold every parameter, and no gradient lies over one."""
        self.settle()
        return not (self._store is None or self._broken or self._overlaid() or self.staged_nbytes())

    # Forward.

    def before_forward(self) -> None:
        """Check what must hold before a training forward; nothing has changed when this raises.

        Raises:
            AccumulationError: when gradients wait that were neither stepped nor zeroed.
            ChunkcError: when a parameter has hooks or was never given a value.
        """
        self.settle()
        backward_rules.refuse_broken(is_broken=self._broken)
        self._check_hooks()
        self.staging.check_complete()
        kept = {*self.gradients.landed, *self.gradients.apart}
        if self._is_foreign_step(kept if self.accumulate == 1 else self.gradients.unshown()):
            self.accounting.steps.end()
        waiting = self.gradients.waiting() if self.gradients.pending and self.accumulate == 1 else []
        if waiting:
            raise AccumulationError(
                f"gradients of {self.names(waiting)} were neither stepped nor zeroed before the next forward, "
                "and accumulation over micro-batches was not declared. Call optimizer.step() or zero_grad() first, or "
                "declare it with chunkc.compile(..., accumulate=N)"
            )
        self._num_calls += 1
        self.measures = self.wants_norms
        self.ran.clear()

    def forward(self, executor: Executor, args: list[Any], held_nbytes: int) -> list[Any]:
        """Run a forward program from wherever the last call left the model.

        ``held_nbytes`` of inputs and buffers are alive before the program begins, and count as non-model data.

        Raises:
            RankError: when the ranks do other things, or exchange other chunks.
        """
        program = self._forward_program(executor)
        executor.agree(Kind.FORWARD, program)

        def run() -> list[Any]:
            outputs = executor.forward(program, args)
            self.accounting.end_forward(self.layout, outputs, is_first=is_first)
            self._saved = program == "forward"
            self._count_forward(executor)
            return outputs

        with self.ranks.collective_section("a forward", self.device.synchronize), self.changing(AtStake.DEVICE):
            if program == "forward":
                self.to_cold()
            self._uncover()
            self._switch_to(executor)
            executor.enter_step(self.accounting.steps.num_steps)
            is_first = executor.num_actions == 0
            self.accounting.start(held_nbytes, args)
            return self._guarded(run)

    def forward_unplanned(self, graph: UnplannedGraph, args: list[Any], held_nbytes: int) -> list[Any]:
        """Run the forward of a graph that has no plan yet."""
        self.ranks.agree(Kind.FORWARD, lambda: [f"a graph of {len(graph.used_params)} parameters, not planned yet"])
        with self.ranks.collective_section("a forward without a plan", self.device.synchronize):
            self.to_cold()
            with self.changing(AtStake.DEVICE):
                self._uncover()
            self.accounting.start(held_nbytes)
            outputs = graph.forward(args, self.read_param)
            self.accounting.end_forward(self.layout, outputs, is_first=graph not in self._call_of)
            self._count_forward(graph)
            return outputs

    def _count_forward(self, graph: Executor | UnplannedGraph) -> None:
        self._call_of[graph] = self._num_calls
        self.ran.append(graph)
        self.num_forwards += 1

    def watch(self, outputs: Any) -> None:
        """Learn from the outputs of a forward how to tell that a backward asks for all gradients."""
        for graph in self.ran:
            if id(graph) not in self._watched:
                self._watched.add(id(graph))
                wanted = {i: self.params[i] for i in graph.graded_params if i not in self._accumulators}
                self._accumulators |= find_accumulators(outputs, wanted)

    # Backward.

    def backward(self, executor: Executor, args: list[Any], reached: Set[int]) -> list[Any]:
        """Run a backward program and hand out the gradients that land.

        Afterwards the ``grad`` of every trained parameter that the loss has ``reached`` is its landed gradient.

        Raises:
            RankError: when the ranks do other things, or make gradients of other parameters.
        """
        own = self.requested.of_rank(executor.graded_params, reached)
        with self.ranks.agreement_scope():
            self.settle()
            goes_on = self._check_backward(executor, own)
            program = self._backward_program(executor, self.gradients.num_micro_batches + (not goes_on))
            requested = self._agree_on_backward(executor, program, own)
        withheld = frozenset(executor.graded_params) - own

        def run() -> list[Any]:
            outputs = executor.backward(program, args, added_to, scale, withheld)
            self.accounting.end_backward(self.layout)
            self._saved, self._consumed = False, False
            self._unreduced = executor.plan.program(program).exit.phase == "unreduced"
            self.gradients.land(executor.graded_params)
            self.gradients.hand_out(executor, sorted(requested), None if scale is None else scale.scale)
            self._note_landed(
                None if self._unreduced else executor.norm_table, frozenset(executor.graded_params), scale
            )
            return outputs

        with self.ranks.collective_section("a backward", self.device.synchronize), self.changing(AtStake.GRADIENTS):
            if executor.plan.program(program).entry.phase != "unreduced":
                self.reduce_gradients()
            self._begin_backward(executor, goes_on=goes_on)
            self._enter_backward(executor, program)
            self.accounting.begin_backward()
            added_to, scale = self._accumulated(), self.own_scale
            return self._guarded(run)

    def _agree_on_backward(self, executor: Executor, program: str, own: frozenset[int]) -> frozenset[int]:
        """Agree on ``program``, on gradients over parameters, and on gradients that begin anew beside others.

        Returns:
            The parameters whose gradients any rank asks for; ``own`` are this rank's.
        """
        state, added_to = program, self._accumulated()
        if executor.plan.program(program).entry.phase == "saved":
            follows = self._saved and self._executor is executor
            state = f"{program}, {'right after its forward' if follows else 'after something else'}"
        overlaid = [self.name_of(i) for i in sorted(self._overlaid() & executor.used_params)]
        begun = [i for i in executor.graded_params if i not in added_to] if added_to else []
        anew = [f"the gradient of {self.name_of(i)} begins anew" for i in begun]
        graded = executor.graded_params
        lines = [
            *self._graph_lines(executor),
            state,
            *overlaid,
            *anew,
            *self.assigned(graded),
            *self.requested.frozen(graded),
        ]
        return self.requested.of_any(own, executor.agree(Kind.BACKWARD, program, lines, self.requested.number(own)))

    def _graph_lines(self, graph: Executor | UnplannedGraph) -> list[str]:
        """Which graph of the latest forward a backward is of, where that has several."""
        is_broken = len(self.ran) > 1 and graph in self.ran
        return [backward_line(self.ran.index(graph), len(self.ran))] if is_broken else []

    def backward_unplanned(self, graph: UnplannedGraph, args: list[Any], reached: Set[int]) -> list[Any]:
        """Run the backward of a graph whose forward ran without a plan; gradients stay apart from chunks."""
        with self.ranks.agreement_scope():
            self.settle()
            self._refuse_scaling_parts()
            graded = graph.graded_params
            own = self.requested.of_rank(graded, reached)
            goes_on = self._check_backward(graph, own)
            numbers = self.ranks.agree(
                Kind.BACKWARD,
                lambda: [
                    *self._graph_lines(graph),
                    *(f"makes the gradient of {self.name_of(i)}" for i in graded),
                    *self.assigned(graded),
                    *self.requested.frozen(graded),
                ],
                number=self.requested.number(own),
            )
            requested = self.requested.of_any(own, numbers)
        with self.ranks.collective_section("a backward without a plan", self.device.synchronize):
            self.to_cold()
            with self.changing(AtStake.GRADIENTS):
                self._begin_backward(graph, goes_on=goes_on)
            self.accounting.begin_backward()
            try:
                outputs, made = graph.backward(args, self.read_param)
                self.accounting.end_backward(self.layout)
                self.gradients.measured = None
                for index in sorted(requested):
                    gradient = made[index] if index in own else torch.zeros_like(made[index])
                    self.gradients.add(index, self.averaged(gradient))
                self._consumed = False
                self.gradients.hand_out(graph, sorted(requested))
            except BaseException:
                self._lose_gradients()
                raise
            return outputs

    def _check_backward(self, executor: Executor | UnplannedGraph, requested: Set[int]) -> bool:
        """Refuse what would add to gradients undeclared; whether it goes on with the backward under way."""
        self._check_hooks()
        backward_rules.refuse_partial(self, left_out(self._accumulators, sorted(requested)))
        gradients, backward, call = self.gradients, current_backward(), self._call_of.get(executor, -1)
        if gradients.joins(backward, call, executor, max(1, self.ran.count(executor))):
            return True
        if self.accumulate > 1:
            problem = backward_rules.refuse_more(self, sorted(requested), is_under_way=gradients.is_under_way(backward))
        else:
            problem = backward_rules.refuse_undeclared(
                self, sorted(requested), is_under_way=gradients.is_under_way(backward)
            )
        if problem is not None:
            if gradients.is_under_way(backward) and problem.loses_gradients:
                self._lose_gradients()
            raise AccumulationError(problem.text)
        return False

    def _begin_backward(self, executor: Executor | UnplannedGraph, *, goes_on: bool) -> None:
        """It goes on with the backward under way, or begins one."""
        if goes_on:
            return
        if self.accumulate > 1:
            self._prepare_to_add()
        elif self.gradients.pending:
            self.to_cold()
            self._uncover()
        self.gradients.begin(current_backward(), self._call_of.get(executor, -1))

    # Step.

    def prepare_step(self, stepped: Collection[int]) -> None:
        """Make the plans of graphs that ran without one; an exception leaves a model without them.

        Raises:
            ChunkcError: before the first forward of the model, when there is no plan for the parameters ``stepped``.
        """
        if self._executor is None and self.plan_recorded is not None:
            self.plan_recorded()
        if self._executor is None:
            backward_rules.refuse_unplanned(self, sorted(stepped))

    def step(self, hypers: Mapping[int, Hyper], steps: Mapping[int, int]) -> StepDecision | None:
        """Launch the step program and raise the autograd version of every parameter that it changes.

        Called in a transaction, after `prepare_step`.

        Returns:
            What becomes of it, where it may be skipped because a gradient is infinite or NaN.
        """
        assigned = [i for i in hypers if not self.gradients.is_handle(i)]
        self.ranks.agree(Kind.STEP, lambda: step_lines(hypers, steps, assigned, self.name_of))
        self._is_foreign_step([i for i in self.gradients.unshown() if i not in hypers])
        with self.ranks.collective_section("a step", self.device.synchronize):
            return self._step(hypers, steps)

    def _step(self, hypers: Mapping[int, Hyper], steps: Mapping[int, int]) -> StepDecision | None:
        """`step`, on which all ranks have agreed."""
        self.reduce_gradients()
        self._num_expected = self.gradients.num_micro_batches or self._num_expected
        if self.outcome is not None:
            self.outcome.is_skipped()  # before the next decision stands where it stood
        self._take_assigned(hypers)
        executor, gradients, scale = self._running(), self.gradients, self.own_scale
        self.is_scaled_outside = False  # until a script scales a loss again
        found = gradients.found
        if scale is not None:
            found = self._find_nonfinite(frozenset(hypers))
        if executor.norm_table is None and found is not None and bool(found):
            self._restore_landed()
            gradients.forget()
            self._consumed = True
            self.accounting.steps.end()
            self.outcome = SkippedStep()
            return self.outcome
        if executor.norm_table is None and gradients.factor is not None:
            self.device.synchronize()
            self._apply_factor()
        factor = gradients.factor
        gradients.forget()
        self._consumed = True
        self._raise_versions(hypers)
        try:
            self.outcome = executor.step(hypers, steps, factor, found, scale)
            self.accounting.steps.end()
        except BaseException:
            self._broken = True
            raise
        return self.outcome

    def _take_assigned(self, active: Mapping[int, Hyper]) -> None:
        """Plain tensors that eager operators or the user put into ``param.grad`` become gradients in chunks."""
        gradients = self.gradients
        plain = [i for i in active if not gradients.is_handle(i)]
        zeros = [i for i in active if gradients.is_handle(i) and not gradients.is_kept(i)]
        if not plain and not zeros and not gradients.apart and not self._saved:
            return
        self.join()
        self.to_cold()
        if plain:
            self._apply_factor()
        for index in zeros:
            gradients.apart[index] = self._zeros(index)
        for index in plain:
            grad = self.params[index].grad
            if grad is not None:
                gradients.landed.discard(index)
                gradients.apart[index] = self.averaged(grad.to("cpu", self.params[index].dtype).detach())
        self._move_into_chunks()

    # Between programs.

    def close_from_host(self) -> None:
        """`close`, on whichever thread the garbage collector runs."""
        self.transactions.call_from_host(partial(self.device.call_from_host, self.close))

    def close(self) -> None:
        """Give all memory back; let go by hand of what autograd holds outside the garbage collector's view."""
        try:
            self.drain()
        finally:
            self.transactions.close()
            self.gradients.close()
            self._accumulators = {}
            self._call_of.clear()
            self.ran.clear()
            self.executors.clear()
            self.ranks.close()
            if self._store is not None:
                self._store.close()
            self.accounting.unreserve()
            self._closed = True
