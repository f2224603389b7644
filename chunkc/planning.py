"""From a captured iteration to a verified plan and compiled segments: everything between capture and the first call.

Nothing here touches a device or a model: what was captured, the target and an earlier layout go in; the plan, its
compiled graphs and their readable code come out, or an error before anything has changed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from chunkc.capture.graphs import Captured, CapturedGraph
from chunkc.devices import check_free_memory
from chunkc.ir.layout import Layout
from chunkc.ir.plan import Plan
from chunkc.ir.schedule import GraphKind
from chunkc.ir.verify import verify
from chunkc.passes import Options, Pass, Planned, Target, make_evaluation_plan, make_plan
from chunkc.passes.lower import LoweredGraph, lower
from chunkc.runtime.bind import CompiledGraph
from chunkc.segments import SegmentCompiler

logger = logging.getLogger("chunkc")


@dataclass(frozen=True, slots=True)
class Request:
    """What to plan for.

    Attributes:
        target: hardware and budgets in bytes of one rank.
        options: wishes.
        passes: the pipeline, or None for the default one.
        layout: the model's layout once there is one; it is kept as it is.
        held_nbytes: bytes of host memory that the chunks take over from the model as they fill.
    """

    target: Target
    options: Options = Options()  # noqa: RUF009 - frozen
    passes: Sequence[Pass] | None = None
    layout: Layout | None = None
    held_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Built:
    """A plan that can run: ``graphs`` by graph kind, ``code`` by segment name."""

    planned: Planned
    graphs: Mapping[GraphKind, CompiledGraph]
    code: Mapping[str, str]


def build(captured: Captured, request: Request, compiler: SegmentCompiler) -> Built:
    """Plan ``captured``, check the plan, and compile its segments.

    Raises:
        BudgetError: when the budgets do not suffice; the ones that it names do.
        HardwareError: when this machine's free memory does not.
        PlanError: when the verifier refuses the plan.
    """
    started = time.perf_counter()
    planned = _plan(captured, request)
    plan = planned.plan
    verify(plan)
    chunks_nbytes = 0 if request.layout is None else request.layout.arena_nbytes + request.layout.host_nbytes()
    check_free_memory(plan, request.held_nbytes + chunks_nbytes)
    logger.info("planned %s in %.1f s", plan.digest(), time.perf_counter() - started)
    started = time.perf_counter()
    sources: dict[GraphKind, CapturedGraph] = {"forward": captured.forward, "backward": captured.backward}
    lowered = {kind: lower_graph(graph, plan, kind) for kind, graph in sources.items()}
    graphs = {kind: CompiledGraph(low, compiler.compile(low), sources[kind].gradients) for kind, low in lowered.items()}
    logger.info("compiled %d segments in %.1f s", len(plan.segments), time.perf_counter() - started)
    code = {s.name: s.module.code.strip() for low in lowered.values() for s in low.segments}
    return Built(planned, graphs, code)


def _plan(captured: Captured, request: Request) -> Planned:
    schedule, target, options, layout, passes = (
        captured.schedule, request.target, request.options, request.layout, request.passes
    )  # fmt: skip
    if not schedule.is_evaluation:
        return make_plan(schedule, target, options, layout=layout, passes=passes)
    if layout is None:
        raise ValueError("an evaluation is planned in the layout of training, and there is none yet")
    return make_evaluation_plan(schedule, target, replace(options, cuts=None), layout=layout, passes=passes)


def lower_graph(graph: CapturedGraph, plan: Plan, kind: GraphKind) -> LoweredGraph:
    """``graph`` cut at the boundaries of the plan's segments of ``kind``."""
    operators = [b.nodes for b in graph.bundles]
    return lower(graph.module, operators, plan.graph_segments(kind), graph.params)
