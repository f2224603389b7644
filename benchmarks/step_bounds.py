"""Lower bounds of a step: the work of each stream, and the chain through one parameter.

    compute, copies, collectives, updates    what a stream has to do, with nothing beside it
    exchange                                 from the first operator that reads a parameter to the one that makes its
                                             gradient, then its reduction, update and gathering, one after the other:
                                             the next step's first reader waits for them
    round trip                               the compute stream until a moved value is made, copies to the host until
                                             another one is away, copies to the device from the same one's return until
                                             a third one is back, and the compute stream from that one's reader on

The chain counts a parameter's own bytes, whatever chunk they stand in, and the faster of both places of an update. It
is long where a parameter is read first and its gradient made last: a tied embedding. It bounds plans that exchange and
update a parameter in one piece; in pieces, updates could hide behind the exchange of others, and that alone.

The round trip counts nothing beside the copies, no room on the device, and each stream's actions in the plan's order.
It is long where copies of activations outlast both graphs: what goes last in forward comes first in backward.

    compute      0 1 |                     | 1 0
    to host          0 0 0 1 1 1           |
    to device                    1 1 1 0 0 0
"""

from __future__ import annotations

from dataclasses import dataclass, field

from chunkc.cost.actions import ActionCosts, dims_of, segment_ms
from chunkc.cost.rates import CostRates, cost_rates
from chunkc.cost.spread import all_gather_ms, spread_of
from chunkc.cost.timeline import Timeline
from chunkc.distributed.mesh import DP_SHARD
from chunkc.hardware import Hardware
from chunkc.ir.actions import VALUE_COPIES, Op, Stream
from chunkc.ir.plan import Plan

STREAMS = {
    "compute": (Stream.COMPUTE,),
    "copies": (Stream.H2D, Stream.D2H),
    "collectives": (Stream.COMM,),
    "updates": (Stream.CPU,),
}


@dataclass(frozen=True)
class Step:
    """A simulated step with ``bounds_ms``.

    ``num_second_homes`` of ``num_updated_below`` chunks whose states are below the device have a second home;
    ``host_left_nbytes``: of one rank's host memory, what the plan leaves.
    """

    timeline: Timeline
    bounds_ms: dict[str, float] = field(default_factory=dict)
    num_second_homes: int = 0
    num_updated_below: int = 0
    host_left_nbytes: int = 0

    @classmethod
    def of(cls, timeline: Timeline, plan: Plan, hw: Hardware) -> Step:
        """The step of ``plan`` on ``hw``."""
        bounds_ms = {name: max(timeline.stream(s).alone_ms for s in found) for name, found in STREAMS.items()}
        rates = cost_rates(hw)
        bounds_ms |= {"exchange": exchange_ms(plan, rates), "round trip": round_trip_ms(plan, rates)}
        below = [chunk for chunk in plan.layout.chunks if chunk.has_os_below]
        left_nbytes = plan.memory.host_budget_nbytes - plan.memory.host_nbytes
        return cls(timeline, bounds_ms, sum(chunk.has_second_home for chunk in below), len(below), left_nbytes)

    @property
    def largest_bound(self) -> str:
        """Name of the bound that the step is compared with."""
        return max(self.bounds_ms, key=self.bounds_ms.__getitem__)

    @property
    def excess(self) -> float:
        """Share by which the step is longer than its largest bound."""
        return self.timeline.step_ms / self.bounds_ms[self.largest_bound] - 1


def exchange_ms(plan: Plan, rates: CostRates) -> float:
    """Milliseconds of the longest chain through one trained parameter of ``plan``; 0 on one rank."""
    layout = plan.layout
    if layout.world_size == 1 or rates.links is None:
        return 0.0
    dims = dims_of(plan)
    durations = [segment_ms(segment, rates, dims) for segment in plan.segments]
    spread = spread_of(dims, DP_SHARD, rates.links.gpus_per_node)
    readers, makers = dict[int, int](), dict[int, int]()
    for number, segment in enumerate(plan.segments):
        for param in segment.reads:
            readers.setdefault(param, number)
        makers |= dict.fromkeys(segment.lands, number)
    longest_ms = 0.0
    for param in readers.keys() & makers.keys():
        info = layout.params[param]
        own_nbytes, own_numel = info.nbytes // layout.world_size, info.numel / layout.world_size
        places = (rates.gpu_update_gparam_per_s, rates.cpu_update_gparam_per_s)
        rate = max(rates.update_gparam_per_s(place, info.dtype, layout.state_spec) for place in places)
        between_ms = sum(durations[readers[param] : makers[param] + 1])
        exchanged_ms = 2 * all_gather_ms(own_nbytes, spread, rates.links)
        longest_ms = max(longest_ms, between_ms + exchanged_ms + own_numel / rate * 1e-6)
    return longest_ms


@dataclass(frozen=True)
class _Trip:
    """One moved value in an iteration whose streams wait for nothing: milliseconds of a stream's work.

    ``made_ms``: of computing, until the value is made. ``offload_ms``, ``reload_ms``: of copying in its direction,
    before it and with it. ``left_ms``: of computing, from its first reader in backward to the end.
    """

    made_ms: float
    offload_ms: tuple[float, float]
    reload_ms: tuple[float, float]
    left_ms: float


def round_trip_ms(plan: Plan, rates: CostRates) -> float:
    """Milliseconds of the longest chain through values that move; 0 without, and for micro-batches."""
    if not plan.moves or plan.accumulate > 1:
        return 0.0
    trips = _trips(plan, rates)
    longest_ms = 0.0
    for trip in trips:
        (_, away_ms), (back_ms, _) = trip.offload_ms, trip.reload_ms
        before_ms = max(t.made_ms + away_ms - t.offload_ms[0] for t in trips if t.offload_ms <= trip.offload_ms)
        after_ms = max(t.reload_ms[1] - back_ms + t.left_ms for t in trips if t.reload_ms >= trip.reload_ms)
        longest_ms = max(longest_ms, before_ms + after_ms)
    return longest_ms


def _trips(plan: Plan, rates: CostRates) -> list[_Trip]:
    """The trips of all values that move."""
    costs, values = ActionCosts(plan, rates), {value.target: value for value in plan.moves}
    worked_ms, copied_ms = dict.fromkeys(Stream, 0.0), dict[tuple[Op, str], tuple[float, float]]()
    made_ms, read_ms = dict[str, float](), dict[str, float]()
    for _, _, action in plan.labelled():
        before_ms = worked_ms[action.stream]
        worked_ms[action.stream] = after_ms = before_ms + costs.of(action).alone_ms
        if action.op in VALUE_COPIES:
            copied_ms[action.op, action.target] = (before_ms, after_ms)
        elif action.op is Op.RUN:
            segment = plan.segment(action.target)
            made_ms |= {t: after_ms for t, value in values.items() if value.is_made_in(segment)}
            if segment.graph == "backward":
                used = (t for t, value in values.items() if value.is_used_in(segment))
                read_ms = dict.fromkeys(used, before_ms) | read_ms
    computed_ms = worked_ms[Stream.COMPUTE]
    return [
        _Trip(made_ms[t], copied_ms[Op.OFFLOAD, t], copied_ms[Op.RELOAD, t], computed_ms - read_ms[t]) for t in values
    ]
