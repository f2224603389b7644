"""The time of one action that runs alone, from what the plan says of it and the rates of a machine.

    run, stash, add        matrix products and attention by arithmetic or bytes, what takes longer, the model's own
                           collectives by what the ranks along tp receive and a hop each, the rest by bytes
    fetch, offload, ...    latency + bytes / bandwidth
    gather, reduce         every rank receives the group's other chunks over its own link, and a node those of other
                           nodes over its network, what takes longer, and a latency for each rank (ring algorithm);
                           behind a reduction among replicas, their exchange of means in the same way
    sum                    the latency of each rank: its bytes are few
    begin, update, restore, norm   the rate of the update; of the last two by the share of its bytes that they move;
                           an update that was begun takes no time, as if it were always committed
    open, drop, release, decide, discard, allocate    bookkeeping: the host's launch

Kernels are launched by the host, which is one more place where time goes: an action ends no earlier than the host has
launched its last kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from chunkc.cost.rates import CostRates, Links, update_nbytes
from chunkc.cost.sharing import COPY_RESOURCES, FROM_DEVICE, HOST_DRAM, TO_DEVICE, Use
from chunkc.cost.spread import Dims, Spread, all_gather_ms, all_reduce_ms, parts_ms, spread_of
from chunkc.distributed.mesh import CP, DP_REPLICATE, DP_SHARD, TP
from chunkc.errors import HardwareError
from chunkc.ir.actions import Action, Op, Stream
from chunkc.ir.layout import Chunk
from chunkc.ir.plan import Plan, Segment
from chunkc.ir.schedule import DTYPE_NBYTES
from chunkc.ir.state_spec import ADAM_STATES, StateSpec
from chunkc.ir.work import Kind, Work

_PARAM32_NBYTES = 4
_SUMS_NBYTES = 2 * 8


@dataclass(frozen=True, slots=True)
class Cost:
    """One action alone.

    ``use``: of shared resources meanwhile. ``launch_ms`` and ``kernels_ms``: the host's time before it can start, and
    from then on until its last kernel is launched.
    """

    alone_ms: float
    use: Use
    launch_ms: float
    kernels_ms: float = 0.0
    nbytes: int = 0


class ActionCosts:
    """The costs of the actions of one plan on one machine."""

    def __init__(self, plan: Plan, rates: CostRates) -> None:
        self._plan, self._rates = plan, rates
        self._layout, self._dims = plan.layout, dims_of(plan)
        self._segments = {s.name: s for s in plan.segments}
        self._value_nbytes = {value.target: value.nbytes for value in plan.moves}
        self._begun = {a.target for p in plan.programs for a in p.actions if a.op is Op.BEGIN}
        self._uses: dict[tuple[Stream, str], Use] = {}
        self._landed: dict[str, dict[int, list[int]]] = {}
        self._makers: dict[Op, Callable[[Action], tuple[float, int, int]]] = {
            Op.RUN: self._run,
            Op.STASH: self._stash,
            Op.ADD: self._stash,
            Op.FETCH: self._copy,
            Op.EVICT: self._copy,
            Op.LOAD: self._copy,
            Op.STORE: self._copy,
            Op.OFFLOAD: self._copy_value,
            Op.RELOAD: self._copy_value,
            Op.GATHER: self._collective,
            Op.REDUCE: self._collective,
            Op.SUM: self._sum,
            Op.BEGIN: self._begin,
            Op.UPDATE: self._finish,
            Op.RESTORE: self._restore,
            Op.NORM: self._norm,
        }

    def of(self, action: Action) -> Cost:
        """The cost of ``action``; HardwareError for a collective where links are not known."""
        rates = self._rates
        is_compute = action.stream is Stream.COMPUTE
        launch_ms = (rates.compute_launch_us if is_compute else rates.copy_launch_us) * 1e-3
        maker = self._makers.get(action.op)
        if maker is None:
            return Cost(0.0, self._use_of(action.stream, ""), launch_ms)
        alone_ms, nbytes, num_kernels = maker(action)
        kernels_ms = num_kernels * rates.kernel_launch_us * 1e-3
        if rates.runs_inline:
            alone_ms, kernels_ms = alone_ms + kernels_ms, 0.0
        return Cost(alone_ms, self._use(action), launch_ms, kernels_ms, nbytes)

    def _use(self, action: Action) -> Use:
        if action.op is Op.NORM:
            return self._use_of(action.stream, "")
        return self._use_of(action.stream, self._chunk(action).dtype if action.stream is Stream.CPU else "float32")

    def _use_of(self, stream: Stream, dtype: str) -> Use:
        """One object for equal uses, by which speeds are found again; of no resources without a dtype."""
        if (stream, dtype) not in self._uses:
            states = self._layout.state_spec
            self._uses[stream, dtype] = stream_use(stream, self._rates, dtype, states) if dtype else Use(stream)
        return self._uses[stream, dtype]

    def _chunk(self, action: Action) -> Chunk:
        return self._layout.chunks[action.index]

    # --- each returns (milliseconds alone, bytes, kernels) ---------------------------------------------------------
    def _run(self, action: Action) -> tuple[float, int, int]:
        segment = self._segments[action.target]
        kernels = sum(work.num_kernels for work in segment.work)
        return segment_ms(segment, self._rates, self._dims), sum(work.nbytes for work in segment.work), kernels

    def _stash(self, action: Action) -> tuple[float, int, int]:
        """A copy within device memory of each gradient's part in the chunk; a sum reads what stands there too."""
        chunk = self._chunk(action)
        parts = self._landed_in(chunk.index if chunk.partner is None else chunk.partner, action.source or "")
        nbytes = sum(parts) * DTYPE_NBYTES[chunk.dtype]
        touched_nbytes = nbytes * (3 if action.op is Op.ADD else 2)
        return memory_ms(touched_nbytes, self._rates), nbytes, sum(1 for numel in parts if numel)

    def _landed_in(self, chunk: int, segment: str) -> list[int]:
        """Elements of each gradient of ``segment`` that land in ``chunk``."""
        if segment not in self._landed:
            landed = self._landed[segment] = dict[int, list[int]]()
            for param in self._segments[segment].lands:
                for index, numel in self._layout.parts_of(param):
                    landed.setdefault(index, []).append(numel)
        return self._landed[segment].get(chunk, [])

    def _copy(self, action: Action) -> tuple[float, int, int]:
        nbytes = self._layout.moved_nbytes(action)
        return self._rates.copies[action.stream].time_ms(nbytes), nbytes, 0

    def _copy_value(self, action: Action) -> tuple[float, int, int]:
        nbytes = self._value_nbytes[action.target]
        return self._rates.copies[action.stream].time_ms(nbytes), nbytes, 0

    def _links(self) -> Links:
        if self._rates.links is None:
            raise HardwareError(
                f"the plan exchanges chunks between {self._layout.world_size} ranks, but {self._rates.hw} has no rates "
                "of links between ranks"
            )
        return self._rates.links

    def _spread(self, name: str) -> Spread:
        return spread_of(sharing_dims(self._dims), name, self._links().gpus_per_node)

    def _sum(self, action: Action) -> tuple[float, int, int]:
        """Every rank has the two float64 of each, and adds them up."""
        return all_gather_ms(_SUMS_NBYTES, self._spread(DP_SHARD), self._links()), _SUMS_NBYTES, 0

    def _collective(self, action: Action) -> tuple[float, int, int]:
        links, layout = self._links(), self._layout
        nbytes = layout.chunks[layout.groups[action.index].first_chunk].nbytes
        alone_ms, moved = all_gather_ms(nbytes, self._spread(DP_SHARD), links), nbytes * (layout.world_size - 1)
        if action.op is Op.REDUCE and layout.num_replicas > 1:
            moved += layout.mirrored_nbytes(nbytes)
            alone_ms += all_reduce_ms(nbytes, self._spread(DP_REPLICATE), links)
        return alone_ms, moved, 0

    def _update(self, action: Action) -> tuple[float, int, int]:
        chunk, rates = self._chunk(action), self._rates
        on_cpu = action.stream is Stream.CPU
        table = rates.cpu_update_gparam_per_s if on_cpu else rates.gpu_update_gparam_per_s
        rate = rates.update_gparam_per_s(table, chunk.dtype, self._layout.state_spec)
        return chunk.used_numel / rate * 1e-6, self._layout.used_os_nbytes_of(chunk), 0 if on_cpu else 1

    def _begin(self, action: Action) -> tuple[float, int, int]:
        """An update that writes memory which it has not read."""
        alone_ms, nbytes, kernels = self._update(action)
        return alone_ms * self._rates.second_home_factor, nbytes, kernels

    def _finish(self, action: Action) -> tuple[float, int, int]:
        return (0.0, 0, 0) if action.target in self._begun else self._update(action)

    def _restore(self, action: Action) -> tuple[float, int, int]:
        return self._part_of_update(action, _PARAM32_NBYTES + DTYPE_NBYTES[self._chunk(action).dtype])

    def _norm(self, action: Action) -> tuple[float, int, int]:
        """Bytes of device memory are none of a link's, where ranks measure among their exchanges."""
        alone_ms, nbytes, kernels = self._part_of_update(action, DTYPE_NBYTES[self._chunk(action).dtype])
        return alone_ms, nbytes if action.stream is Stream.COMPUTE else 0, kernels

    def _part_of_update(self, action: Action, param_nbytes: int) -> tuple[float, int, int]:
        """Work that moves ``param_nbytes`` for each parameter where an update moves more, as fast by bytes."""
        chunk = self._chunk(action)
        milliseconds, _, kernels = self._update(action)
        whole_nbytes = update_nbytes(chunk.dtype, self._layout.state_spec)
        return milliseconds * param_nbytes / whole_nbytes, chunk.used_numel * param_nbytes, kernels


def stream_use(stream: Stream, rates: CostRates, dtype: str = "float32", states: StateSpec = ADAM_STATES) -> Use:
    """Demand of an action on ``stream`` at full speed; ``dtype``, ``states``: what a host update writes."""
    if stream in rates.copies:
        return Use(stream, tuple((resource, rates.copies[stream].gb_per_s) for resource in COPY_RESOURCES[stream]))
    if stream is Stream.CPU:
        rate = rates.update_gparam_per_s(rates.cpu_update_gparam_per_s, dtype, states)
        return Use(stream, ((HOST_DRAM, rate * update_nbytes(dtype, states)),))
    if stream is Stream.COMM and rates.links is not None and rates.links.is_host_link:
        demand = rates.links.gpu_gb_per_s
        return Use(stream, ((TO_DEVICE, demand), (FROM_DEVICE, demand)))
    return Use(stream)


def dims_of(plan: Plan) -> Dims:
    """The mesh of the ranks of ``plan``."""
    layout = plan.layout
    return plan.mesh or ((DP_REPLICATE, layout.num_replicas), (DP_SHARD, layout.world_size))


def sharing_dims(dims: Dims) -> Dims:
    """``dims`` with ranks along ``cp``, which stand within those along ``dp_shard``, as ranks along that."""
    sizes = dict(dims)
    num_context = sizes.pop(CP, 1)
    if num_context == 1:
        return dims
    if DP_SHARD in sizes:
        return tuple((name, size * num_context if name == DP_SHARD else size) for name, size in sizes.items())
    return tuple((DP_SHARD if name == CP else name, size) for name, size in dims)


def segment_ms(segment: Segment, rates: CostRates, dims: Dims = ()) -> float:
    """Milliseconds of a segment of a plan for the mesh ``dims``."""
    return sum(work_ms(work, rates, dims) for work in segment.work)


def exchanged_ms(plan: Plan, rates: CostRates) -> float:
    """Milliseconds of the model's own collectives in an iteration of ``plan``, each alone."""
    works = [work for segment in plan.segments for work in segment.work if work.kind is Kind.LINK]
    return plan.accumulate * sum(work_ms(work, rates, dims_of(plan)) for work in works)


def work_ms(work: Work, rates: CostRates, dims: Dims = ()) -> float:
    """Milliseconds of operators of one kind, their kernels one after the other."""
    if work.kind is Kind.LINK:
        return _exchange_ms(work, rates, dims)
    by_bytes = memory_ms(work.nbytes, rates)
    if work.kind is Kind.MEMORY:
        return by_bytes
    table = rates.matmul_tflops if work.kind is Kind.MATMUL else rates.attention_tflops
    return max(work.flops / rates.of_dtype(table, work.dtype) * 1e-9, by_bytes)


def _exchange_ms(work: Work, rates: CostRates, dims: Dims) -> float:
    """Milliseconds of collectives along ``tp``, or ``cp``, or, without either, between devices of a node."""
    links = rates.links
    if links is None:
        raise HardwareError(f"the model exchanges values between ranks, but {rates.hw} has no rates of links")
    line = spread_of(dims, CP if CP in dict(dims) else TP, links.gpus_per_node)
    if line.num_ranks == 1:
        line = Spread(2, shares_node=True, num_received=0)
    return parts_ms(work.nbytes / (line.num_ranks - 1), line, links) + work.num_kernels * links.hop_us * 1e-3


def memory_ms(nbytes: int, rates: CostRates) -> float:
    """Milliseconds of reading and writing ``nbytes`` of device memory in all."""
    return nbytes / rates.device_memory_gb_per_s * 1e-6
