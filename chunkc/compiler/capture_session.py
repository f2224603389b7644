"""The capture session of one model: the way of each graph from Dynamo to its executor.

    Dynamo ─ capture (choose what is kept) ─ plan ─ compile ─ entry ─ executor, made at the first call

`CaptureSession.compile_graph` is Dynamo's entry for forwards that are one graph. Those that break
(`chunkc.compiler.graph_breaks`), and those without gradients (`chunkc.compiler.evaluation`), have entries of their own
over the same session.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from chunkc.capture.backend import ModelTensors, capture_graph
from chunkc.capture.graphs import Captured
from chunkc.capture.tracing import TracingOptions
from chunkc.compiler.build import CompiledPlan, PlanRequest, budget_chooser, kept_choices
from chunkc.compiler.graph_entry import MAX_COMPILED_SIZES, GraphEntry, SizedEntries
from chunkc.compiler.graph_set import GraphSet, RecordedGraph
from chunkc.compiler.keep_fp32 import Fp32Modules
from chunkc.compiler.segment_compiler import SegmentCompiler
from chunkc.compiler.shape_cache import MAX_PROGRAMS, ShapeTable, entry_maker, weakly
from chunkc.compiler.validation import Example
from chunkc.distributed.agreement import Kind
from chunkc.ir.tiers import Tier
from chunkc.passes import Pass, Planned, PlanOptions, Target
from chunkc.passes.support.choices import key_of
from chunkc.runtime.model.model import ModelRuntime

logger = logging.getLogger("chunkc")


@dataclass(slots=True)
class Settings:
    """The resolved settings of one ``compile``; ``in_fp32`` modules cast the inputs that they take.

    ``examples`` are inputs whose plans are still to be made before the first forward.
    """

    target: Target
    options: PlanOptions
    cast_inputs: torch.dtype | None
    compiler: SegmentCompiler
    passes: Sequence[Pass] | None = None
    fullgraph: bool = False
    ranks_per_node: int = 1
    in_fp32: Fp32Modules = field(default_factory=Fp32Modules)
    examples: tuple[Example, ...] = ()


class CaptureSession:
    """Captures, plans and compiles the graphs of one model.

    Attributes:
        tensors: the model's; whoever casts inputs notes the copies there.
        shapes: training programs by the signature of a call.
        graphs: what was captured, and how it is planned.
        planned: the newest plans; ``num_planned`` counts all that were made.
        started_s: when the call under way began to be captured.
        is_declaring: whether graphs are captured only, to be planned together.
    """

    def __init__(self, model: nn.Module, runtime: ModelRuntime, settings: Settings, planner: Planner) -> None:
        """``planner`` plans each captured iteration, for example `CaptureSession.plan`."""
        self.model = model
        self.runtime = runtime
        self.settings = settings
        self.tensors = ModelTensors(model, runtime.params, runtime.infos)
        self.shapes = ShapeTable(entry_maker(model, self.compile_graph))
        self.graphs = GraphSet(runtime, weakly(self.request), weakly(self.install))
        self.planned: list[Planned] = []
        self.num_planned = 0
        self.started_s = 0.0
        self.is_declaring = False
        self._planner = planner
        self._least: dict[Tier, int] = {}
        settings.compiler.begin(runtime.device.torch_device)

    @property
    def tracing(self) -> TracingOptions:
        """How graphs of this model are traced on this rank."""
        return replace(self.settings.compiler.tracing, context=self.runtime.ranks.context)

    def compile_graph(self, module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Capture, plan and compile a forward that is one graph; return the code that stands in for it."""
        compiler = self.settings.compiler
        entries = SizedEntries(weakly(self._make), weakly(self.graphs.let_go), compiles=compiler.fuses)
        request = self.request()
        captured, code = capture_graph(
            *(module, example_inputs, self.tensors, self.tracing, entries.forward, entries.backward),
            choose=budget_chooser(request),
            kept_by=kept_by(request) if compiler.fuses else None,
            trains_scalar=self.graphs.trains_scalar,
        )
        self.shapes.check_room()
        self.log(captured)
        entries.start(captured)
        self.shapes.captured(any_size=captured.symbolic is not None)
        return code

    def _make(self, captured: Captured, family: object, compiles: bool) -> GraphEntry:
        """A new entry of a forward that is one graph, at some sizes."""
        if not self.graphs.trains_scalar and captured.general is not None:
            captured = captured.with_all_tangents()
            self.runtime.live.bring_home(family)  # a plan for fewer tangents numbers saved values otherwise
        entry = GraphEntry(family)
        entry.attach(self.runtime, captured, weakly(self.graphs.fit), widen=weakly(self.graphs.widen))
        recorded = self.recorded(captured, compiles=compiles)
        if self.is_declaring:
            self.graphs.add(entry, recorded)
        else:
            with self.runtime.ranks.agreement_scope():
                self._planner(self, recorded, entry)
        return entry

    def plan(self, recorded: RecordedGraph, entry: GraphEntry) -> None:
        """Plan and compile a whole iteration, and let ``entry`` run it; errors as `GraphSet.plan`."""
        self.graphs.add(entry, recorded)
        try:
            self.graphs.plan(entry)
        except BaseException:
            self.graphs.remove(entry)
            raise

    def recorded(self, captured: Captured, *, compiles: bool) -> RecordedGraph:
        """A captured graph, and how it is planned: where it may not come again, operator by operator."""
        compiler, is_compiled = self.settings.compiler, compiles or captured.draws_by_seed
        recorded = RecordedGraph(captured, compiler, scales=self.settings.options.scales)
        if is_compiled:
            return recorded
        compiled_by = compiler if compiler.fuses else None
        if compiler.fuses:
            recorded = replace(recorded, captured=captured.one_by_one())
        return replace(recorded, compiler=compiler.interpreter(), compiled_by=compiled_by, log_level=logging.DEBUG)

    def install(self, built: CompiledPlan, entry: GraphEntry) -> None:
        entry.plan_by(built)
        self.planned = [*self.planned[1 - MAX_PROGRAMS :], built.planned]
        self.num_planned += 1
        built.explain()

    def log(self, captured: Captured, kind: str = "") -> None:
        """Log how much was captured in which time."""
        num_ops = sum(len(g.operators) for g in captured.schedule.graphs)
        logger.info("captured %d operators%s in %.1f s", num_ops, kind, time.perf_counter() - self.started_s)
        if captured.symbolic is not None:
            logger.info(
                "its inputs change in size from call to call: a size is planned when it comes, from the graph captured "
                "now, and compiled when it comes again (%d sizes at most)",
                MAX_COMPILED_SIZES,
            )

    def request(self) -> PlanRequest:
        """Return the request for a plan made now, with the budgets that other models leave."""
        settings, runtime = self.settings, self.runtime
        accounting, layout = runtime.accounting, runtime.parameters.next_layout
        if any(accounting.others_nbytes(layout).values()):
            gc.collect()  # a model that nobody holds any more, such as that of a notebook cell run again, still has it
        target = settings.target.less(accounting.others_nbytes(layout))
        target = target.less({tier: max(0, target.budget_nbytes(tier) - n) for tier, n in self._least.items()})
        held_nbytes, is_host = runtime.parameters.staging.nbytes(), runtime.device.torch_device.type == "cpu"
        has_norms = any(executor.norm_table is not None for executor in runtime.executors.values())
        wanted = runtime.tracks_grad_norm and (layout is None or has_norms)
        wanted = settings.options.tracks_grad_norm or wanted
        options = replace(settings.options, tracks_grad_norm=wanted, state_spec=runtime.parameters.state_spec)
        return PlanRequest(
            *(target, options, settings.passes, layout, held_nbytes, is_host, settings.ranks_per_node),
            choices=kept_choices(),
        )

    def agree_on_budgets(self) -> None:
        """Take the least budgets of all ranks, by which their first plans lay out the same chunks."""
        self._least = {}
        target, ranks = self.request().target, self.runtime.ranks
        self._least = {
            tier: min(ranks.agree(Kind.PLAN, lambda: [target.model], number=budget.nbytes))
            for tier, budget in target.budgets.items()
        }


def kept_by(request: PlanRequest) -> str | None:
    """The text by which graphs for ``request`` are kept; None beside a layout or a user's passes."""
    if request.choices is None or request.layout is not None or request.passes is not None:
        return None
    return repr((key_of("", request.target, request.options, 0), request.target.rank))


Planner = Callable[[CaptureSession, RecordedGraph, GraphEntry], None]
"""Plans a captured iteration, now or later, and lets its entry run by the plan."""
