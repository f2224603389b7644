"""Lower bounds of a step: the work of each stream, and the chain through one parameter.

    compute, copies, collectives, updates    what a stream has to do, with nothing beside it
    exchange                                 from the first operator that reads a parameter to the one that makes its
                                             gradient, then its reduction, update and gathering, one after the other:
                                             the next step's first reader waits for them

The chain counts a parameter's own bytes, whatever chunk they stand in, and the faster of both places of an update. It
is long where a parameter is read first and its gradient made last: a tied embedding. It bounds plans that exchange and
update a parameter in one piece; in pieces, updates could hide behind the exchange of others, and that alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from chunkc.cost.actions import dims_of, segment_ms
from chunkc.cost.rates import CostRates, cost_rates
from chunkc.cost.spread import all_gather_ms, spread_of
from chunkc.cost.timeline import Timeline
from chunkc.distributed.mesh import DP_SHARD
from chunkc.hardware import Hardware
from chunkc.ir.actions import Stream
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
        bounds_ms["exchange"] = exchange_ms(plan, cost_rates(hw))
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
