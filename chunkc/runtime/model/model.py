"""Run the programs of one compiled model, in every order that autograd allows.

Gradients overlay payloads until they are stepped or discarded; discarding restores payloads from param32. An order that
adds up gradients of more backwards than were declared is refused before anything has changed. With several, gradients
have chunks of their own, and forwards and evaluations may come in between. An exception inside a program brings the
model to the cold state with the parameters of the last step; inside a backward, gradients since then are gone.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.autograd.graph import Node

from chunkc._torch_compat.core import current_backward, engine_runs
from chunkc.distributed.agreement import Kind, backward_line
from chunkc.distributed.process_group import Ranks
from chunkc.errors import AccumulationError
from chunkc.ir.actions import Stream
from chunkc.ir.layout import Layout
from chunkc.ir.schedule import ParamInfo
from chunkc.runtime.devices.protocol import Device
from chunkc.runtime.devices.requested import RequestedGradients
from chunkc.runtime.execution.bound_action import BoundProgram
from chunkc.runtime.execution.executor import Executor, RanGraph
from chunkc.runtime.execution.warmup_graph import UnplannedGraph
from chunkc.runtime.model import backward_rules
from chunkc.runtime.model.grad_clipping import GradClipping
from chunkc.runtime.model.gradient_values import GradientValues
from chunkc.runtime.model.memory_accounting import Accounting, Held, LiveForward, LiveForwards, Storage
from chunkc.runtime.model.optimizer_steps import OptimizerSteps
from chunkc.runtime.model.parameters import Parameters
from chunkc.runtime.model.program_state import AtStake, ModelPhase, ProgramState
from chunkc.runtime.params.autograd_coverage import find_accumulators
from chunkc.runtime.params.gradients import Gradients
from chunkc.runtime.storage.chunk_store import ChunkStore


class ModelRuntime:
    """The programs of one model over its memory; see the module docstring.

    ``infos``: all parameters by index, in compute dtype; ``params`` are the same and become managed. ``accumulate``:
    backwards whose gradients one step may take.

    Attributes:
        gradients: where they stand; ``gradient_values``: what they are.
        requested: which gradients backwards are asked for.
        saving: the latest checkpoint, done or under way (kept by what saves them).
        ran: what has run forward in the latest call.
        live: forwards that wait for their backward.
        tracks_grad_norm: ``clipping.wants_norms`` as the call under way found it.
    """

    def __init__(
        self,
        infos: Sequence[ParamInfo],
        params: Sequence[nn.Parameter],
        device: Device,
        accumulate: int = 1,
        ranks: Ranks | None = None,
    ) -> None:
        self.device, self.ranks, self.accumulate = device, ranks or Ranks(), accumulate
        self.accounting = Accounting(device)
        self.gradients = Gradients(params, accumulate)
        self.state = ProgramState(device, self.ranks, self.gradients)
        self.parameters = Parameters(infos, params, self.state, self.accounting)
        self.parameters.runtime = self
        self.gradient_values = GradientValues(self.parameters, self.state)
        self.clipping = GradClipping(self.gradient_values, self.state)
        self.requested = RequestedGradients(self.ranks, self.parameters.params, self.parameters.name_of)
        self.steps = OptimizerSteps(self.gradient_values, self.clipping, self.state)
        self.infos, self.params = self.parameters.infos, self.parameters.params
        self.transactions, self.executors = self.state.transactions, self.state.executors
        self.saving: Future[Path] | None = None
        self.num_forwards = 0
        self.ran: list[RanGraph] = []
        self.tracks_grad_norm = False
        self._num_calls = 0
        self.live = LiveForwards()
        self._families: set[object] = set()
        self._accumulators: dict[int, Node] = {}
        self._watched = WeakSet[Executor | UnplannedGraph]()

    @property
    def executor(self) -> Executor | None:
        return self.state.executor

    @property
    def layout(self) -> Layout | None:
        return self.parameters.layout

    def settle(self) -> None:
        """Wait for a transaction that its caller has left, and undo a change that an exception has ended."""
        self.state.settle()

    def moved_nbytes(self, stream: Stream) -> int:
        """Bytes copied on ``stream`` by the latest executor; with micro-batches, by all executors of its step."""
        latest = self.state.running
        executors = self.executors.values() if self.accumulate > 1 else (latest,)
        return sum(e.moved_nbytes(stream) for e in executors if e.step_number == latest.step_number)

    @property
    def can_evaluate(self) -> bool:
        """Whether an evaluation may run from cold: chunks hold every parameter, and no gradient lies over one."""
        self.settle()
        is_ready = self.layout is not None and self.state.phase is not ModelPhase.BROKEN
        is_ready = is_ready and not self.parameters.is_between_layouts
        return is_ready and not self.gradients.overlaid and not self.parameters.staging.nbytes()

    def before_forward(self) -> None:
        """Check what must hold before a training forward; AccumulationError where gradients wait, ChunkcError
        for a parameter with hooks or without a value."""
        self.settle()
        self._check_trainable()
        if self.parameters.staging.blank:
            self.parameters.staging.check_complete()
        if self.parameters.foreign.has_read:
            kept = {*self.gradients.chunk_grads, *self.gradients.host_grads}
            discarded = kept if self.accumulate == 1 else self.gradients.unshown()
            if self.parameters.foreign.end_gradients(discarded, self.parameters.names):
                self.steps.log.end()
        waiting = self.gradients.waiting() if self.gradients.pending and self.accumulate == 1 else []
        if waiting:
            raise AccumulationError(
                f"gradients of {self.parameters.names(waiting)} were neither stepped nor zeroed before the next "
                "forward, and accumulation over micro-batches was not declared. Call optimizer.step() or zero_grad() "
                "first, or declare it with chunkc.compile(..., accumulate=N)"
            )
        self._num_calls += 1
        self.tracks_grad_norm = self.clipping.wants_norms
        self.ran.clear()

    def _check_trainable(self) -> None:
        if self.state.phase is ModelPhase.BROKEN:
            backward_rules.refuse_broken()
        if self.parameters.has_hooks():
            backward_rules.refuse_hooks(self.parameters)

    def forward(self, executor: Executor, args: list[Any], held: Held) -> list[Any]:
        """Run a forward program from wherever the last call left the model; RankError when ranks differ."""
        program = self.state.forward_program(executor)
        copies = self.accounting.copies.begin(executor.plan) if executor.plan.moves else None
        executor.agree(Kind.FORWARD, program)

        def run() -> list[Any]:
            outputs = executor.forward(program, args, copies)
            storages = Storage.behind(outputs)
            self.accounting.end_forward(self.layout, storages, is_first=is_first)
            if program.planned.entry.phase == "cold":
                self.state.enter(ModelPhase.SAVED)
            self._count_forward(executor, held, storages)
            self.live.keep(copies)
            return outputs

        with self.state.collective("a forward"), self.state.changing(AtStake.DEVICE):
            if program.planned.entry.phase == "cold":
                self.state.to_cold()
            self.state.discard_overlaid()
            self.state.switch_to(executor)
            executor.enter_step(self.steps.log.num_steps)
            is_first = executor.num_actions == 0
            self.accounting.start(held.at_start_nbytes, args)
            return self.state.guarded(run)

    def forward_unplanned(self, graph: UnplannedGraph, args: list[Any], held: Held) -> list[Any]:
        self.ranks.agree(Kind.FORWARD, lambda: [f"a graph of {len(graph.used_params)} parameters, not planned yet"])
        with self.state.collective("a forward without a plan"):
            self.state.to_cold()
            with self.state.changing(AtStake.DEVICE):
                self.state.discard_overlaid()
            self.accounting.start(held.at_start_nbytes, args)
            outputs = graph.forward(args, self.parameters.read_param)
            storages = Storage.behind(outputs)
            self.accounting.end_forward(self.layout, storages, is_first=graph.family not in self._families)
            self._count_forward(graph, held, storages)
            return outputs

    def _count_forward(self, graph: Executor | UnplannedGraph, held: Held, outputs: Sequence[Storage | None]) -> None:
        self._families.add(graph.family)
        self.live.add(graph.family, self._num_calls, held, outputs, self.accounting.input_addresses())
        self.ran.append(RanGraph.of(graph))
        self.num_forwards += 1

    def adopt(self, layout: Layout, static: dict[str, int]) -> ChunkStore:
        """The chunks of ``layout``, into which values and gradients move unless they stand there."""
        is_new = self.layout is not layout
        store = self.parameters.adopt(layout, static)
        if is_new and self.accumulate > 1:
            with self.state.changing(AtStake.GRADIENTS):
                self.transactions.run(self.gradient_values.move_into_chunks)
        return store

    def leave_layout(self, target: Layout) -> None:
        """Get ready for ``target``, in a transaction; values move when its first plan is installed."""
        self.state.to_cold()
        self.parameters.join()
        with self.state.changing(AtStake.GRADIENTS):
            self.gradient_values.leave_chunks()
        self.state.close_executors()
        self.parameters.leave_layout(target)

    def forget(self, key: object, unplanned: UnplannedGraph | None) -> bool:
        """Let go of the executor by ``key`` and of ``unplanned``; False where one of them runs now."""
        executor = self.executors.get(key)
        graphs = [graph for graph in (executor, unplanned) if graph is not None]
        if self.executor in graphs or any(ran.graph() in graphs for ran in self.ran):
            return False
        self.executors.pop(key, None)
        return True

    def watch(self, outputs: Any) -> None:
        """Learn from the outputs of a forward how to tell that a backward asks for all gradients."""
        for ran in self.ran:
            graph = ran.graph()
            if graph is not None and graph not in self._watched:
                self._watched.add(graph)
                wanted = {i: self.params[i] for i in ran.graded_params if i not in self._accumulators}
                self._accumulators |= find_accumulators(outputs, wanted)

    def backward(
        self, executor: Executor, args: list[Any], reached: Set[int], forward: LiveForward | None
    ) -> list[Any]:
        """Run the backward program of ``forward``; RankError when ranks do other things.

        Every trained parameter that the loss has ``reached`` then has its landed gradient as ``grad``.
        """
        graded = frozenset(executor.graded_params)
        own = self.requested.of_rank(executor.graded_params, reached)
        with self.ranks.agreement_scope():
            self.settle()
            goes_on = self._check_backward(forward, own)
            number = self.gradients.num_micro_batches + (not goes_on)
            program = self.state.backward_program(executor, number, self.clipping.is_unscaled)
            requested = own if self.ranks.job_size == 1 else self._agree_on_backward(executor, program, own)

        def run() -> list[Any]:
            outputs = executor.backward(program, args, added_to, scale, graded - own, expected, copies)
            self.accounting.end_backward(self.layout)
            is_unreduced = program.planned.exit.phase == "unreduced"
            self.state.enter(ModelPhase.UNREDUCED if is_unreduced else ModelPhase.COLD)
            self.state.norm_table = None if is_unreduced else executor.norm_table
            self.gradients.land(graded)
            scaled_by = None if scale is None else scale.scale
            values = self.gradient_values
            self.gradients.publish(values, values.averaged, sorted(requested), scaled_by)
            self.gradients.note_landed(graded, scale, is_measured=self.state.norm_table is not None)
            return outputs

        with self.state.collective("a backward"), self.state.changing(AtStake.GRADIENTS):
            if program.planned.entry.phase != "unreduced":
                self.state.reduce_gradients()
            self._begin_backward(forward, goes_on=goes_on)
            self._enter_backward(executor, program)
            self.accounting.begin_backward()
            added_to = self.gradients.accumulated
            scale = None if self.clipping.loss_scale is None else self.clipping.own_scale
            expected = self.steps.expect(requested) if program.without_begins and len(self.ran) == 1 else None
            with self.live.returned(forward, program.moved) as copies:
                return self.state.guarded(run)

    def _agree_on_backward(self, executor: Executor, program: BoundProgram, own: frozenset[int]) -> frozenset[int]:
        """Agree on ``program`` and return the parameters whose gradients any rank asks for."""
        state, added_to = program.name, self.gradients.accumulated
        if program.planned.entry.phase == "saved":
            follows = self.state.phase is ModelPhase.SAVED and self.executor is executor
            state = f"{program.name}, {'right after its forward' if follows else 'after something else'}"
        overlaid = [self.parameters.name_of(i) for i in sorted(self.gradients.overlaid & executor.used_params)]
        begun = [i for i in executor.graded_params if i not in added_to] if added_to else []
        anew = [f"the gradient of {self.parameters.name_of(i)} begins anew" for i in begun]
        graded = executor.graded_params
        lines = [
            *self._graph_lines(executor),
            state,
            *overlaid,
            *anew,
            *self.clipping.assigned(graded),
            *self.requested.frozen(graded),
        ]
        return self.requested.of_any(own, executor.agree(Kind.BACKWARD, program, lines, self.requested.number(own)))

    def _graph_lines(self, graph: Executor | UnplannedGraph) -> list[str]:
        families = [ran.family for ran in self.ran]
        is_broken = len(families) > 1 and graph.family in families
        return [backward_line(families.index(graph.family), len(families))] if is_broken else []

    def backward_unplanned(
        self, graph: UnplannedGraph, args: list[Any], reached: Set[int], forward: LiveForward | None
    ) -> list[Any]:
        """Run the backward of a graph whose forward ran without a plan; gradients stay apart from chunks."""
        with self.ranks.agreement_scope():
            self.settle()
            backward_rules.refuse_scaling_parts(self.clipping.own_scale)
            graded = graph.graded_params
            own = self.requested.of_rank(graded, reached)
            goes_on = self._check_backward(forward, own)
            numbers = self.ranks.agree(
                Kind.BACKWARD,
                lambda: [
                    *self._graph_lines(graph),
                    *(f"makes the gradient of {self.parameters.name_of(i)}" for i in graded),
                    *self.clipping.assigned(graded),
                    *self.requested.frozen(graded),
                ],
                number=self.requested.number(own),
            )
            requested = self.requested.of_any(own, numbers)
        with self.state.collective("a backward without a plan"):
            self.state.to_cold()
            with self.state.changing(AtStake.GRADIENTS):
                self._begin_backward(forward, goes_on=goes_on)
            self.accounting.begin_backward()
            try:
                outputs, made = graph.backward(args, self.parameters.read_param)
                self.accounting.end_backward(self.layout)
                self.gradients.measured = None
                values = self.gradient_values
                for index in sorted(requested):
                    gradient = made[index] if index in own else torch.zeros_like(made[index])
                    self.gradients.add(index, values.averaged(gradient))
                self.gradients.publish(values, values.averaged, sorted(requested))
            except BaseException:
                self.state.lose_gradients()
                raise
            return outputs

    def _check_backward(self, forward: LiveForward | None, requested: Set[int]) -> bool:
        """Refuse what would add to gradients undeclared; whether it goes on with the backward under way."""
        self._check_trainable()
        missing = [i for i in requested if i in self._accumulators and not engine_runs(self._accumulators[i])]
        if missing:
            backward_rules.refuse_partial(self.parameters, sorted(missing))
        gradients, backward = self.gradients, current_backward()
        if forward is not None and backward not in forward.backwards and gradients.joins(backward, forward.call):
            return True
        is_under_way = gradients.is_under_way(backward)
        if self.accumulate == 1 and not is_under_way and all(self.params[i].grad is None for i in requested):
            return False
        rule = backward_rules.refuse_more if self.accumulate > 1 else backward_rules.refuse_undeclared
        problem = rule(self.parameters, gradients, sorted(requested), is_under_way=is_under_way)
        if problem is not None:
            if is_under_way and problem.loses_gradients:
                self.state.lose_gradients()
            raise AccumulationError(problem.text)
        return False

    def _begin_backward(self, forward: LiveForward | None, *, goes_on: bool) -> None:
        backward = current_backward()
        if forward is not None:
            forward.backwards.add(backward)
        if goes_on:
            return
        if self.accumulate > 1:
            self.clipping.prepare_to_add()
        elif self.gradients.pending:
            self.state.to_cold()
            self.state.discard_overlaid()
        self.gradients.begin(backward, -1 if forward is None else forward.call)

    def _enter_backward(self, executor: Executor, program: BoundProgram) -> None:
        """Bring the chunks to where the backward program begins, with param16 in all that it needs."""
        state = self.state
        if program.planned.entry.phase == "unreduced":
            state.switch_to(executor)
            return
        overlaid = sorted(self.gradients.overlaid & executor.used_params)
        if state.phase is ModelPhase.SAVED and state.executor is executor and not overlaid:
            return
        state.to_cold()
        state.switch_to(executor)
        self.parameters.join()
        self.gradient_values.spill(overlaid)
        state.resume()

    def close_from_host(self) -> None:
        """`close`, on whichever thread the garbage collector runs."""
        self.transactions.call_from_host(partial(self.device.call_from_host, self.close))

    def close(self) -> None:
        """Give all memory back; let go by hand of what autograd holds outside the garbage collector's view."""
        try:
            self.parameters.drain()
        finally:
            self.transactions.close()
            self.gradients.close()
            self._accumulators = {}
            self.live.clear()
            self.ran.clear()
            self.state.close_executors()
            self.ranks.close()
            self.parameters.close()
            self.accounting.close()
            self.state.enter(ModelPhase.CLOSED)
