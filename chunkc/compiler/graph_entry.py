"""Entries from compiled code into the runtime: one for each captured graph pair and its sizes.

Executors take memory, so they are made at the first call and not while torch is tracing. Entries stand in Dynamo's
tables until the model is deleted, so they must not hold on to the model.

A graph that was captured for its sizes alone has one entry. Of a symbolic graph, an entry is made at the first call
with its sizes, over a copy of the graph. Where the backend compiles segments, those of new sizes are interpreted, since
compiling takes longer than many steps; those of sizes that come again are compiled:

    sizes    17  12  17  9  12        entries are kept for the newest sizes
    segments  i   i   c  i   c        interpreted, compiled
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import is_
from typing import Any

from torch.fx import Node

from chunkc._torch_compat.core import without_modes
from chunkc._torch_compat.saved_tensors import has_saved_tensors_hooks
from chunkc.capture.graphs import Captured
from chunkc.capture.joined import saved_nbytes
from chunkc.capture.symbolic import Sizes
from chunkc.capture.tangents import Tangents
from chunkc.compiler.build import CompiledPlan
from chunkc.compiler.shape_cache import MAX_PROGRAMS
from chunkc.errors import ChunkcError
from chunkc.ir.plan import Plan
from chunkc.ir.schedule import GraphKind
from chunkc.progress import stage
from chunkc.runtime.execution.bound_action import CompiledGraph
from chunkc.runtime.execution.executor import Executor
from chunkc.runtime.execution.warmup_graph import UnplannedGraph
from chunkc.runtime.model.memory_accounting import Held, LiveForward
from chunkc.runtime.model.model import ModelRuntime
from chunkc.runtime.storage.parameter_io import static_slots

MAX_SIZES = MAX_PROGRAMS
"""Combinations of sizes that one graph keeps plans for; a further one takes the place of that used longest ago."""

MAX_COMPILED_SIZES = MAX_PROGRAMS
"""Combinations of sizes for which the segments of one graph are compiled, and stay so."""


class NotPlannedYet(ChunkcError):
    """A graph was called whose plan is made later, with those of others."""


class RuntimeReference:
    """A weak reference from compiled code to the runtime of its model."""

    def __init__(self) -> None:
        self._runtime_of: Callable[[], ModelRuntime | None] = lambda: None

    def refer_to(self, runtime: ModelRuntime) -> None:
        self._runtime_of = weakref.ref(runtime)

    def runtime(self) -> ModelRuntime:
        """The runtime; ChunkcError when it is gone."""
        runtime = self._runtime_of()
        if runtime is None:
            raise ChunkcError("the compiled model was deleted before its forward or backward ran")
        return runtime


Fit = Callable[["GraphEntry", Callable[[], int]], int]
"""Lets an entry run beside so many bytes of live forwards; returns how many it may run beside from now on."""

Widen = Callable[["GraphEntry", int], Captured]
"""Plans the iteration of an entry with all tangents, beside so many bytes that come back first, and returns it."""


class GraphEntry(RuntimeReference):
    """The functions behind compiled code of one graph pair; ``unplanned`` runs while there is no plan.

    ``family``: one object for the entries of one captured graph, whatever sizes each is for.
    """

    def __init__(self, family: object = None) -> None:
        super().__init__()
        self.family = family or object()
        self.unplanned: UnplannedGraph | None = None
        self.plan: Plan | None = None
        self._built: CompiledPlan | None = None
        self._graphs: Mapping[GraphKind, CompiledGraph] = {}
        self._held = Held()
        self._fit: Fit | None = None
        self._widen: Widen | None = None
        self._most_beside_nbytes = self._more_nbytes = 0
        self._params: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
        self._tangents: Tangents | None = None

    def attach(
        self,
        runtime: ModelRuntime,
        captured: Captured,
        fit: Fit,
        unplanned: UnplannedGraph | None = None,
        widen: Widen | None = None,
    ) -> None:
        """Run the graphs of ``captured`` by ``runtime``, and by ``unplanned`` while there is no plan.

        ``fit`` lets this entry run beside live forwards; ``widen`` gives it a backward with all tangents.
        """
        self.refer_to(runtime)
        self.unplanned, self._fit, self._most_beside_nbytes = unplanned, fit, 0
        self._widen = widen
        inputs, params = captured.forward.module.graph.find_nodes(op="placeholder"), captured.forward.params
        positions = tuple(i for i, n in enumerate(inputs) if n.name in params)
        self._params = positions, tuple(params[inputs[i].name] for i in positions)
        self._held = _held_by(captured)
        self._tangents = captured.tangents

    def plan_by(self, built: CompiledPlan) -> None:
        self._replace_plan(built.plan)
        self._built, self._graphs, self._more_nbytes = built, built.graphs, 0
        if built.plan.in_flight > 1:
            self._held = replace(self._held, saved_nbytes=built.plan.waiting_nbytes + built.plan.copies_nbytes)

    def count_more(self, plan: Plan, nbytes: int) -> None:
        """Run by ``plan``, which counts ``nbytes`` more of other forwards than the one before."""
        self._replace_plan(plan)
        self._more_nbytes += nbytes

    def _replace_plan(self, plan: Plan) -> None:
        self.plan = plan
        if self in self.runtime().executors:
            self.runtime().state.release(self)

    def install(self) -> Executor:
        """The executor of the plan; made, with the memory that it takes, unless there is one."""
        runtime, plan = self.runtime(), self.plan
        if self not in runtime.executors:
            if plan is None:
                raise ChunkcError("a captured graph was to run by its plan before it had one")
            stage("moving the parameters into chunks" if runtime.layout is None else "starting the plan")
            runtime.accounting.reserve(plan.memory.device_peak_nbytes)
            static = static_slots(plan.layout, plan.program("forward").entry.resident)
            with without_modes():
                store = runtime.adopt(plan.layout, static)
                runtime.accounting.copies.prepare(plan)
                runtime.executors[self] = Executor(
                    plan, store, runtime.device, self._graphs, runtime.ranks, self.family
                )
        return runtime.executors[self]

    def uninstall(self) -> bool:
        """Give back what `install` made, unless it runs now; return whether it did."""
        return self.runtime().forget(self, self.unplanned)

    def forward(self, args: list[Any]) -> list[Any]:
        """Outputs of the forward graph; empties ``args``."""
        runtime = self.runtime()
        if self._tangents is None and self.unplanned is not None:
            return self.unplanned.forward(args, runtime.parameters.read_param)  # nothing of it is trained
        self._check_own(runtime, args)
        if self.plan is None and self.unplanned is None:
            raise NotPlannedYet("a captured graph was to run by its plan before it had one")
        self._make_fit(runtime)
        if self.plan is None and self.unplanned is not None:
            return runtime.forward_unplanned(self.unplanned, args, self._held)
        self._measure(runtime)
        if self.plan is not None and self.plan.moves and has_saved_tensors_hooks():
            raise ChunkcError(
                "torch.autograd.graph.saved_tensors_hooks (save_on_cpu, a checkpoint around the model) would be given "
                "saved values whose elements are in host memory already: the plan moves activations. Leave the hooks "
                "away, or pass activations='keep' or 'recompute' to chunkc.compile"
            )
        return runtime.forward(self.install(), args, self._held)

    def backward(self, args: list[Any]) -> list[Any]:
        """Outputs of the backward graph, None for those that nobody asks for; empties ``args``."""
        runtime, tangents = self.runtime(), self._tangents or Tangents()
        forward = runtime.live.find(self.family, args)
        if tangents.has_unread(args):
            tangents = self._take_all_tangents(runtime)
        positions = tangents.fill(args)
        reached = tangents.params_of(positions)
        self._make_fit(runtime, forward)
        if self.plan is None and self.unplanned is not None:
            outputs = runtime.backward_unplanned(self.unplanned, args, reached, forward)
        else:
            outputs = runtime.backward(self.install(), args, reached, forward)
        return [output if i in positions else None for i, output in enumerate(outputs)]

    def _take_all_tangents(self, runtime: ModelRuntime) -> Tangents:
        """Plan for tangents of all outputs, since one is given that the plan leaves out, or raise BudgetError.

        Values that are away have other numbers in the new plan, so those of all live forwards come back.
        """
        if self._widen is None:
            raise ChunkcError("a gradient of an output is given that backward does not read; please report this")
        runtime.settle()
        with without_modes():
            captured = self._widen(self, runtime.live.away_nbytes(self.family))
        self._tangents = captured.tangents
        runtime.live.bring_home(self.family)
        return captured.tangents or Tangents()

    def _make_fit(self, runtime: ModelRuntime, own: LiveForward | None = None) -> None:
        """Plan for the forwards that are alive but for ``own``, where there are more of them than ever."""
        beside_nbytes = runtime.live.nbytes(other_than=own)
        is_left = self.plan is not None and not runtime.parameters.accepts(self.plan.layout)
        if self._fit is None or (beside_nbytes <= self._most_beside_nbytes and not is_left):
            return
        runtime.settle()
        with without_modes():
            self._most_beside_nbytes = self._fit(self, partial(runtime.live.nbytes, other_than=own))

    def _check_own(self, runtime: ModelRuntime, args: list[Any]) -> None:
        """Check that compiled code runs on the parameters of the model that it was compiled for.

        Where Dynamo may compile no more, it runs any code whose guards hold, also that of another model of the class.
        """
        shells, (positions, indexes) = runtime.parameters.shells, self._params
        if all(map(is_, map(args.__getitem__, positions), map(shells.__getitem__, indexes))):
            return
        for position, index in zip(positions, indexes, strict=True):
            if args[position] is not shells[index]:
                name = runtime.parameters.name_of(index)
                raise ChunkcError(
                    f"compiled code was run on a tensor that is not {name} of the model that it was "
                    "compiled for; torch.compile has been told to compile no more (torch.compiler.set_stance, or a "
                    "recompile limit). Let it compile this call"
                )

    def _measure(self, runtime: ModelRuntime) -> None:
        """Go over to a plan that measures gradients where somebody asks for norms and there is room."""
        if runtime.tracks_grad_norm and self._built is not None:
            plan, self._built = self._built.measuring(self._more_nbytes), None
            if plan is not None and runtime.accounting.can_reserve(plan.memory.device_peak_nbytes):
                self._replace_plan(plan)


EntryMaker = Callable[[Captured, object, bool], GraphEntry]
"""Makes the entry of a graph at some sizes, of a family.

Its segments are compiled, or else interpreted where the budget allows.
"""


class SizedEntries:
    """Entries by sizes, of one family: an object by which the runtime knows that they are of one graph."""

    def __init__(self, make: EntryMaker, let_go: Callable[[GraphEntry], bool], *, compiles: bool) -> None:
        """``let_go`` forgets an entry, unless it runs now, and returns whether it did.

        ``compiles``: whether segments that are compiled run otherwise than interpreted ones.
        """
        self._make, self._let_go = make, let_go
        self._compiles = compiles
        self._family = object()
        self._captured: Captured | None = None
        self._entries: OrderedDict[Sizes, GraphEntry] = OrderedDict()
        self._compiled: set[Sizes] = set()
        self._replaced: list[GraphEntry] = []

    def start(self, captured: Captured) -> None:
        """Begin with a graph that was captured now; of one for its sizes alone, make the entry."""
        self._captured = captured
        if captured.symbolic is None:
            self._put((), captured, compiles=True)

    def forward(self, args: list[Any]) -> list[Any]:
        """Outputs of the forward graph; empties ``args``."""
        symbolic = self._graph.symbolic
        sizes = self._sizes(args, () if symbolic is None else symbolic.forward_sizes)
        entry = self._entries.get(sizes)
        if entry is None or self._should_compile(sizes):
            entry = self._put_at(sizes, compiles=self._should_compile(sizes))
        self._entries.move_to_end(sizes)
        return entry.forward(args)

    def backward(self, args: list[Any]) -> list[Any]:
        """Outputs of the backward graph, None for those that nobody asks for; empties ``args``."""
        symbolic = self._graph.symbolic
        sizes = self._sizes(args, () if symbolic is None else symbolic.backward_sizes)
        entry = self._entries.get(sizes)
        if entry is None:  # its forward ran so long ago that others have taken its place
            entry = self._put_at(sizes, compiles=sizes in self._compiled)
        return entry.backward(args)

    @staticmethod
    def _sizes(args: Sequence[Any], positions: Sequence[int]) -> Sizes:
        return tuple(args[position] for position in positions)

    def _put_at(self, sizes: Sizes, *, compiles: bool) -> GraphEntry:
        """Keep a new entry for ``sizes``, which were not those of the call that was captured."""
        captured = self._graph
        with without_modes():
            captured = captured if captured.symbolic is None else captured.symbolic.at(sizes)
            return self._put(sizes, captured, compiles=compiles)

    def _should_compile(self, sizes: Sizes) -> bool:
        """Whether ``sizes`` have come before, are interpreted, and are to be compiled; or were compiled once."""
        if self._graph.symbolic is None or not self._compiles:
            return False
        if sizes in self._compiled:
            return sizes not in self._entries
        return sizes in self._entries and len(self._compiled) < MAX_COMPILED_SIZES

    def _put(self, sizes: Sizes, captured: Captured, *, compiles: bool) -> GraphEntry:
        """Keep a new entry for ``sizes``, and let go of those whose place it takes."""
        entry = self._make(captured, self._family, compiles)
        replaced = self._entries.pop(sizes, None)
        leaving = self._replaced if replaced is None else [*self._replaced, replaced]
        self._entries[sizes] = entry
        if compiles:
            self._compiled.add(sizes)
        while len(self._entries) > MAX_SIZES:
            leaving = [*leaving, self._entries.popitem(last=False)[1]]
        self._replaced = [left for left in leaving if not self._let_go(left)]
        return entry

    @property
    def _graph(self) -> Captured:
        if self._captured is None:
            raise ChunkcError("a graph was to run before it was captured")
        return self._captured


def _held_by(captured: Captured) -> Held:
    """The bytes of the device that ``captured``, which stands beside nothing, holds."""
    outputs, given = captured.forward.outputs(), set(captured.user_outputs)
    saved = tuple(i for i, n in enumerate(outputs) if isinstance(n, Node) and n.name not in given)
    return Held(captured.held_at_start_nbytes, saved_nbytes(captured.schedule, captured.concurrent_nbytes), saved)
