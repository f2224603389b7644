"""Callables that stand for captured graphs in compiled code, and the executors behind them.

Executors take memory, so they are made at the first call and not while torch is tracing. The callables stand in
Dynamo's tables until the model is deleted, so they must not hold on to the model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from chunkc._torch_compat.core import without_modes
from chunkc.capture.backend import BoxedCallable, Compiled
from chunkc.capture.graphs import Captured
from chunkc.capture.tangents import Tangents
from chunkc.errors import ChunkcError
from chunkc.ir.plan import Plan
from chunkc.ir.schedule import GraphKind
from chunkc.runtime.execution.bound_action import CompiledGraph
from chunkc.runtime.execution.executor import Executor
from chunkc.runtime.execution.warmup_graph import UnplannedGraph
from chunkc.runtime.model.model import ModelRuntime
from chunkc.runtime.params.managed_tensor import inner_of
from chunkc.runtime.storage.parameter_io import static_slots


@dataclass(slots=True)
class GraphSlot:
    """One captured graph pair: ``graphs`` run as ``plan`` says; while there is none, ``unplanned`` runs.

    ``measuring`` makes the same plan with programs that measure gradients as they land; None where ``plan`` does,
    or where that plan does not fit.

    ``held_nbytes`` are bytes of its inputs and buffers that are alive before its forward begins; ``params`` says which
    of its inputs stand for which parameters, as (position, index). ``tangents`` say which gradients depend on which
    output of its forward.
    """

    held_nbytes: int
    params: tuple[tuple[int, int], ...]
    tangents: Tangents
    plan: Plan | None = None
    measuring: Callable[[], Plan | None] | None = None
    graphs: Mapping[GraphKind, CompiledGraph] | None = None
    unplanned: UnplannedGraph | None = None


def slot_of(captured: Captured) -> GraphSlot:
    """An empty slot for a captured graph pair."""
    inputs = captured.forward.module.graph.find_nodes(op="placeholder")
    names = captured.forward.params
    params = tuple((i, names[n.name]) for i, n in enumerate(inputs) if n.name in names)
    return GraphSlot(captured.held_at_start_nbytes, params, captured.tangents)


def _check_own(slot: GraphSlot, runtime: ModelRuntime, args: list[Any]) -> None:
    """Check that compiled code runs on the parameters of the model that it was compiled for.

    Where Dynamo may compile no more, Dynamo runs any code whose guards hold, also that of another model of the class.
    """
    for position, index in slot.params:
        if args[position] is not inner_of(runtime.params[index]):
            name = runtime.parameters.name_of(index)
            raise ChunkcError(
                f"compiled code was run on a tensor that is not {name} of the model that it was compiled for; "
                "torch.compile has been told to compile no more (torch.compiler.set_stance, or a recompile limit). Let "
                "it compile this call"
            )


def _measure(runtime: ModelRuntime, slot: GraphSlot) -> None:
    """Let a slot run by a plan that measures gradients.

    The slot does so where somebody asks for the norm of gradients and there is room for what measuring takes. Nothing
    else differs.
    """
    if runtime.tracks_grad_norm and slot.measuring is not None:
        plan, slot.measuring = slot.measuring(), None
        if plan is not None and runtime.accounting.can_reserve(plan.memory.device_peak_nbytes):
            slot.plan = plan
            runtime.executors.pop(id(slot), None)


def install(runtime: ModelRuntime, slot: GraphSlot) -> Executor:
    """The executor of a planned slot; made, with the memory that it takes, unless there is one.

    Raises:
        ChunkcError: when the slot has no plan.
    """
    key = id(slot)
    if key not in runtime.executors:
        if slot.plan is None or slot.graphs is None:
            raise ChunkcError("a captured graph was to run by its plan before it had one")
        plan, graphs = slot.plan, slot.graphs
        runtime.accounting.reserve(plan.memory.device_peak_nbytes)
        static = static_slots(plan.layout, plan.program("forward").entry.resident)
        with without_modes():
            store = runtime.parameters.adopt(plan.layout, static)
            runtime.executors[key] = Executor(plan, store, runtime.device, graphs, runtime.ranks)
    return runtime.executors[key]


def callables(slot: GraphSlot, runtime: ModelRuntime) -> Compiled:
    """Return the callables that run the graphs of ``slot``, planned or not."""
    runtime_of = weakref.ref(runtime)

    def alive() -> ModelRuntime:
        found = runtime_of()
        if found is None:
            raise ChunkcError("the compiled model was deleted before its forward or backward ran")
        return found

    def forward(args: list[Any]) -> list[Any]:
        runtime = alive()
        _check_own(slot, runtime, args)
        if slot.plan is None and slot.unplanned is not None:
            return runtime.forward_unplanned(slot.unplanned, args, slot.held_nbytes)
        _measure(runtime, slot)
        return runtime.forward(install(runtime, slot), args, slot.held_nbytes)

    def backward(args: list[Any]) -> list[Any]:
        runtime, positions = alive(), slot.tangents.fill(args)
        reached = slot.tangents.params_of(positions)
        if slot.plan is None and slot.unplanned is not None:
            outputs = runtime.backward_unplanned(slot.unplanned, args, reached)
        else:
            outputs = runtime.backward(install(runtime, slot), args, reached)
        return [output if i in positions else None for i, output in enumerate(outputs)]

    return Compiled(forward, backward)


def frozen_callable(graphs: Mapping[GraphKind, CompiledGraph], runtime: ModelRuntime) -> BoxedCallable:
    """Return a callable that runs a graph without a backward, operator by operator, outside the plan."""
    runtime_of, unplanned = weakref.ref(runtime), UnplannedGraph(graphs)

    def forward(args: list[Any]) -> list[Any]:
        found = runtime_of()
        if found is None:
            raise ChunkcError("the compiled model was deleted before its forward ran")
        return unplanned.forward(args, found.parameters.read_param)

    return forward
