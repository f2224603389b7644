"""The executor, which carries out the programs of one plan, action by action, on a device.

The executor decides nothing. All actions are bound to memory when it is made, so that a step allocates nothing.
Values of the graphs live in an environment by name and leave it at their last use.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from chunkc.distributed.agreement import Kind, digest_lines, drawing_line
from chunkc.distributed.process_group import Ranks
from chunkc.errors import DeviceMemoryError
from chunkc.ir.actions import Op, Stream
from chunkc.ir.plan import Plan, Position, Program, Role
from chunkc.ir.schedule import GraphKind
from chunkc.ir.work import Kind as WorkKind
from chunkc.runtime.devices.protocol import Device, Event, launch_each
from chunkc.runtime.execution.binder import Binder
from chunkc.runtime.execution.bound_action import BoundProgram, CompiledGraph, RunEnvironment, ValueTable
from chunkc.runtime.execution.grad_norm import GradNormTable, StepDecision
from chunkc.runtime.execution.moment_text import moment_text
from chunkc.runtime.execution.warmup_graph import UnplannedGraph
from chunkc.runtime.storage.chunk_store import ChunkStore
from chunkc.runtime.storage.saved_copies import SavedCopies
from chunkc.runtime.update.begun import BegunStep
from chunkc.runtime.update.loss_scale import LossScale, scale_tangents, times
from chunkc.runtime.update.rules import Hyper
from chunkc.runtime.update.update_inputs import StepInputs

T = TypeVar("T")
ExpectedInputs = tuple[Mapping[int, Hyper], Mapping[int, int]]
"""Hyperparameters and step counts by parameter, as of `StepInputs`."""


def _graph_of(program: BoundProgram) -> GraphKind | None:
    role = program.planned.role
    return role if role == "backward" else "forward" if role in ("forward", "evaluate") else None


class Executor:
    """Runs the programs of ``plan`` over the memory of ``store``.

    Attributes:
        defers_reduction: as of the plan.
        graded_params: indexes of the parameters whose gradients land in its backward.
        used_params: those and the ones that its backward reads.
        num_actions: actions launched so far.
        norm_table: what its backward measures of gradients, and the decision of its step; None where the plan has none.
        trace: set it to a list to record the text of every action launched.
        step_number: of the step for which it ran forward last, as ``enter_step`` was told.
        family: one object for the executors of one captured graph, whatever sizes each is for.
    """

    def __init__(
        self,
        plan: Plan,
        store: ChunkStore,
        device: Device,
        graphs: Mapping[GraphKind, CompiledGraph],
        ranks: Ranks | None = None,
        family: object = None,
    ) -> None:
        self.plan = plan
        self.family = family or object()
        self.defers_reduction = plan.defers_reduction
        self.num_actions = 0
        self.trace: list[str] | None = None
        self.graded_params = tuple(sorted(p for s in plan.segments for p in s.lands))
        self.used_params = frozenset(p for s in plan.graph_segments("backward") for p in (*s.reads, *s.lands))
        self._ranks = ranks or Ranks()
        self.norm_table: GradNormTable | None = None
        if plan.tracks_grad_norm:
            num_chunks, size = len(plan.layout.chunks), plan.layout.world_size
            self.norm_table = GradNormTable(num_chunks, device.torch_device, size, self._sum_of_norms)
        self._store = store
        self._decide = next((label for p in plan.programs for label, a in p.labelled() if a.op is Op.DECIDE), "")
        self._device = device
        self._paced_launch = device.paced_launch(plan)
        self._graphs = graphs
        self._exchange_digests: dict[str, tuple[int, int]] = {}
        self._env = RunEnvironment()
        self._events: dict[str, Event] = {}
        self.step_number = -1
        self._counted_programs: set[str] = set()
        self._has_second_homes = any(c.has_second_home for c in plan.layout.owned())
        binders = [
            Binder(plan, store, device, self._graphs, self._env, self.norm_table, self._ranks, side)
            for side in range(1 + self._has_second_homes)
        ]
        self._programs = [{p.key: BoundProgram.of(p, binder.bind(p)) for p in plan.programs} for binder in binders]
        self._recoveries = [tuple(binder.recoveries.values()) for binder in binders]
        self._tables = {name: ValueTable.of(compiled) for name, compiled in self._graphs.items()}

    def program(self, role: Role, position: Position = "first", reduces: bool = True) -> BoundProgram:
        """The program of that key, bound to where chunks are at home now."""
        return self._of_side(self._programs)[role, position, reduces]

    def close(self) -> None:
        """Let go of bound programs, and with them of the memory they read; nothing runs any more."""
        self._programs, self._recoveries = [], []

    def _of_side(self, by_side: Sequence[T]) -> T:
        return by_side[self._store.side if self._has_second_homes else 0]

    def enter_step(self, number: int) -> None:
        """Note that the next forward is one of step ``number``: bytes moved by its micro-batches add up."""
        if number != self.step_number:
            self.step_number = number
            self._counted_programs.clear()

    def moved_nbytes(self, stream: Stream) -> int:
        """Bytes that copies on ``stream`` moved in the latest iteration, or for all its micro-batches."""
        in_flight = () if self.plan.in_flight == 1 else ("abandon", "resume")
        counted = [p.name for p in self.plan.programs if p.is_repeated or p.name in in_flight]
        if self.plan.accumulate > 1:
            counted = [name for name in counted if name in self._counted_programs]
        return sum(self._env.moved_nbytes.get((name, stream), 0) for name in counted)

    def exchanges(self, program: BoundProgram) -> list[str]:
        """List what all ranks must have alike in a program: collectives in order, and gradients that land."""
        lines = [str(replace(a, waits=())) for a in program.planned.actions if a.stream is Stream.COMM]
        if program.planned.role == "backward":
            lines += [f"makes the gradient of {self.plan.layout.params[p].name}" for p in self.graded_params]
        return [line for line in lines if not line.startswith(("release", "drop", "norm"))]

    def exchanges_of_model(self, program: BoundProgram) -> list[str]:
        """List what ranks that compute one forward together must have alike: the model's own collectives."""
        graph = _graph_of(program)
        segments = () if graph is None else self.plan.graph_segments(graph)
        works = [(s.name, w) for s in segments for w in s.work if w.kind is WorkKind.LINK]
        return [f"segment {name} receives {w.nbytes} bytes by {w.num_kernels} collectives" for name, w in works]

    def agree(self, kind: Kind, program: BoundProgram, state: Sequence[str] = (), number: int = 0) -> list[int]:
        """Agree with all ranks on ``state`` and on running ``program``; return ``number`` of every rank.

        Raises:
            RankError: when they do other things, or exchange other chunks.
        """
        if self._ranks.job_size == 1:
            return [number]
        if program.name not in self._exchange_digests:
            of_plan, of_model = self.exchanges(program), self.exchanges_of_model(program)
            self._exchange_digests[program.name] = digest_lines(of_plan), digest_lines(of_model)
        of_plan_digest, of_model_digest = self._exchange_digests[program.name]
        digest = digest_lines([*state, str(of_plan_digest)])
        drawn = self._drawn(program)
        if drawn:
            of_model_digest = digest_lines([*drawn, str(of_model_digest)])
        return self._ranks.agree_digest(
            kind,
            digest,
            lambda: [*state, *self.exchanges(program), *self.exchanges_of_model(program), *drawn],
            number=number,
            of_tensor_ranks=of_model_digest,
        )

    def _drawn(self, program: BoundProgram) -> list[str]:
        """Say from what state a forward draws random numbers, if others compute it with this rank."""
        if self._ranks.tensor_size == 1 or _graph_of(program) != "forward" or not self._graphs["forward"].draws:
            return []
        device = self._device.torch_device
        state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
        return [drawing_line(zlib.crc32(state.numpy().tobytes()))]

    def _sum_of_norms(self, totals: torch.Tensor) -> None:
        """Add up norms over ranks that compute one forward together; no action of a plan for one rank does it."""
        if self._ranks.tensor_size > 1:
            self._ranks.total(totals, "the sum of norms")

    def forward(self, program: BoundProgram, args: list[Any], copies: SavedCopies | None = None) -> list[Any]:
        """Run a forward program on its graph's inputs; empties ``args``; moved values go to ``copies``."""
        return self._run_graph(program, "forward", args, copies=copies)

    def evaluate(self, args: list[Any]) -> list[Any]:
        """Run the evaluate program on the inputs of its graph, and join; empties ``args``."""
        outputs = self._run_graph(self.program("evaluate"), "forward", args)
        self.join()
        return outputs

    def backward(
        self,
        program: BoundProgram,
        args: list[Any],
        accumulated: Set[int] = frozenset(),
        loss_scale: LossScale | None = None,
        withheld: Set[int] = frozenset(),
        expected: ExpectedInputs | None = None,
        copies: SavedCopies | None = None,
    ) -> list[Any]:
        """Run a backward program; gradients of parameters land in chunks and come back as None.

        Updates begin where a step with inputs ``expected`` will follow. Moved values come back from ``copies``.

        Gradients of parameters ``accumulated`` are added to those in their chunks; of those ``withheld`` zeros land.
        Under a ``loss_scale`` tangents are multiplied by the scale, and so are the gradients in chunks; those that come
        back are not.
        """
        self._env.accumulated, self._env.withheld = accumulated, withheld
        begun = self._expect(program, expected)
        if loss_scale is None:
            return self._run_graph(program, "backward", args, begun, copies)
        scale_tangents(self._graphs["backward"].graph.inputs, args, loss_scale.scale)
        outputs, inverse = self._run_graph(program, "backward", args, begun, copies), loss_scale.inverse()
        return [times(g, inverse) if isinstance(g, torch.Tensor) else g for g in outputs]

    def _expect(self, program: BoundProgram, inputs: ExpectedInputs | None) -> BegunStep | None:
        """The step that ``inputs`` describe, if updates begin in ``program`` and that has been worthwhile."""
        store = self._store
        if store.begun is not None:  # of a micro-batch that was taken for the last
            store.drop_begun()
            self.join()
        if program.without_begins is None or inputs is None:
            return None
        seen = None if self.norm_table is None else self.norm_table.host_expected
        counts = store.begun_counts
        store.begun = BegunStep(*inputs, len(self.plan.layout.params), seen, counts, is_begun=counts.is_worthwhile)
        return store.begun

    def step(
        self,
        hypers: Mapping[int, Hyper],
        steps: Mapping[int, int],
        factor: torch.Tensor | None = None,
        found: torch.Tensor | None = None,
        loss_scale: LossScale | None = None,
    ) -> StepDecision | None:
        """Launch the step program with arguments of `StepInputs`; host updates run while the caller goes on.

        Returns the decision where ``found`` may have the step skipped. The last three are only for plans with norms.
        """
        table, num_params, begun = self.norm_table, len(self.plan.layout.params), self._store.begun
        begun = begun if begun is not None and begun.expects(hypers, steps) else None
        if table is None:
            inputs = StepInputs(hypers, steps, num_params, begun=begun)
        else:
            seen = table.control, table.host_control
            inputs = StepInputs(hypers, steps, num_params, factor, *seen, found, loss_scale, begun)
        self._launch(self.program("step"), inputs)
        if self._has_second_homes:
            self._store.change_sides()
        if table is None:
            return None
        return None if found is None else StepDecision(self._events[self._decide], table.host_control)

    def drop_begun(self) -> None:
        """Let the next step compute all updates by itself."""
        self._store.drop_begun()

    def restore(self) -> None:
        """Launch the restore program: param16 from param32, gradients are discarded."""
        self._store.drop_begun()
        self._launch(self.program("restore"))

    def abandon(self) -> None:
        """Go from the forward's exit state to cold, joined."""
        self._launch(self.program("abandon"))
        self.join()

    def resume(self) -> None:
        """Go from cold, joined, to the forward's exit state."""
        self.join()
        self._launch(self.program("resume"))
        self.join()

    def reduce_all(self) -> None:
        """Reduce what micro-batches have left unreduced, joined."""
        self.join()
        self._launch(self.program("reduce_all"))
        self.join()

    def recover(self) -> None:
        """Join after an interrupted program, and cast every payload at its home from its param32 again."""
        with suppress(Exception):  # the exception that led here is already on its way to the caller
            self._device.synchronize()
        self.forget_launched()
        self._store.drop_begun()
        for recover in self._of_side(self._recoveries):
            recover()

    def forget_launched(self) -> None:
        """Let go of values of the graphs, and of the events of launches."""
        self._env.values = []
        self._events.clear()

    def join(self) -> None:
        """Wait for all streams and forget their events."""
        try:
            self._device.synchronize()
        finally:
            self._events.clear()

    def _run_graph(
        self,
        program: BoundProgram,
        graph: GraphKind,
        args: list[Any],
        begun: BegunStep | None = None,
        copies: SavedCopies | None = None,
    ) -> list[Any]:
        env, table = self._env, self._tables[graph]
        env.values, env.copies = table.begin(args), copies
        try:
            self._launch(program, begun)
            return table.end(env.values)
        finally:
            env.values, env.copies = [], None

    def _launch(self, program: BoundProgram, inputs: StepInputs | BegunStep | None = None) -> None:
        if program.without_begins is not None and not (isinstance(inputs, BegunStep) and inputs.is_begun):
            program, inputs = program.without_begins, None
        events, device = self._events, self._device
        self._count_from_zero(program.name)
        works = program.works_with(inputs, self._env.copies)
        try:
            if self._paced_launch is None:
                device.launch_all(program.launches, works, events)
            else:
                launch_each(self._paced_launch, program.launches, works, events)
        except torch.OutOfMemoryError as error:
            position = min(program.num_launched(events), len(program.actions) - 1)
            raise self._out_of_memory(program.planned, position, error) from error
        finally:
            if self.trace is not None:
                self.trace.extend(launch.text for launch in program.launches[: program.num_launched(events)])
        if program.sums and self.norm_table is not None:
            self.norm_table.ready = (events[program.sums[-1]],)
        if self._ranks.size > 1:
            device.enqueue_exchanges()
        self.num_actions += len(program.launches)

    def _count_from_zero(self, name: str) -> None:
        """Forget the bytes that a program moved, unless it runs again for the same step."""
        if self.plan.accumulate == 1 or name not in self._counted_programs:
            moved = self._env.moved_nbytes
            moved.update({(name, stream): 0 for stream in (Stream.H2D, Stream.D2H, Stream.COMM)})
        self._counted_programs.add(name)

    def _out_of_memory(self, program: Program, position: int, error: torch.OutOfMemoryError) -> DeviceMemoryError:
        return DeviceMemoryError(
            f"{self._device.name} ran out of memory in `{program.actions[position]}` ({program.name} "
            f"{program.label(position)} of plan {self.plan.digest()}). The plan's own account of this moment:\n"
            f"{moment_text(self.plan, program, position)}\n"
            f"  {self._device.memory_text()}\n"
            f"What is more is held by others, in fragments of the allocator (PYTORCH_ALLOC_CONF="
            f"expandable_segments:True helps), or by kernels that take more than was planned: pass reserve=<bytes> to "
            f"chunkc.compile. torch says: {error}"
        )


@dataclass(frozen=True, slots=True, eq=False)
class RanGraph:
    """A graph that has run forward, without holding on to the executor, which has views of the arena.

    ``plan`` is None for an `UnplannedGraph`; ``graph`` gives the object while it lives.
    """

    family: object
    graded_params: tuple[int, ...]
    plan: Plan | None
    graph: weakref.ref[Executor | UnplannedGraph]

    @staticmethod
    def of(graph: Executor | UnplannedGraph) -> RanGraph:
        plan = graph.plan if isinstance(graph, Executor) else None
        return RanGraph(graph.family, graph.graded_params, plan, weakref.ref(graph))
