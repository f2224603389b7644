"""Frozen facts about one model on one target that passes hand on, decided one after another.

Words used by all passes:

* A *chunk block* is what residency moves as a whole: a communication group of chunks (one chunk where one rank trains),
  or all groups that a tensor larger than a chunk spans, because such a tensor must be contiguous on the device.
* A *slot range* is ``world_size`` consecutive slots: what one group occupies. A block takes as many as it has groups.
* A *step* of residency is a base segment: the forward ones, then the backward ones, in one numbering.
* A *residency interval* of a block: fetched before step ``begin``, last used in step ``end``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Literal, TypeVar

from chunkc.cost.rates import CostRates
from chunkc.hardware import Hardware
from chunkc.hardware.usable_memory import Budget, UsableMemory
from chunkc.ir.actions import Action
from chunkc.ir.layout import Layout
from chunkc.ir.plan import MAX_MICRO_BATCHES, MovedValue, Program, Segment, StageRecord
from chunkc.ir.schedule import GraphKind, Schedule
from chunkc.ir.state_spec import ADAM_STATES, StateSpec
from chunkc.ir.tiers import Tier

T = TypeVar("T")
Facts = tuple[object, ...]
BlockNeeds = tuple[Sequence[tuple[int, ...]], Sequence[tuple[int, ...]]]
"""Per graph, per operator: the chunk blocks that it needs."""
Activations = Literal["auto", "keep", "recompute", "offload"]
ACTIVATIONS: tuple[Activations, ...] = ("auto", "keep", "recompute", "offload")


@dataclass(frozen=True, slots=True)
class Target:
    """The model, the hardware and the ranks that the plan is made for.

    Budgets are those of one rank; reserved are ``reserve=``, other models, and what CUDA and the system keep. Without
    ``rates`` decisions go by bytes. ``world_size``, ``rank`` and ``num_replicas`` are those of a `Layout`.
    ``runs_inline``: the device computes on the thread that launches, which launches nothing of a step before backward
    has ended. ``mesh``: as of a `Plan`.
    """

    model: str
    hw: str
    budgets: Mapping[Tier, Budget]
    world_size: int = 1
    rank: int = 0
    rates: CostRates | None = None
    num_replicas: int = 1
    runs_inline: bool = False
    mesh: tuple[tuple[str, int], ...] = ()

    def budget_nbytes(self, tier: Tier) -> int:
        return self.budgets[tier].nbytes

    def short_tier(self, needs: Mapping[Tier, int]) -> Tier | None:
        """The fastest tier whose budget is less than it needs, if any."""
        return next((tier for tier in Tier if needs[tier] > self.budgets[tier].nbytes), None)

    def memory_nbytes(self, needs: Mapping[Tier, int]) -> dict[Tier, int]:
        """The least memories with budgets of ``needs``."""
        return {tier: budget.memory_nbytes(needs[tier]) for tier, budget in self.budgets.items()}

    def with_budget(self, tier: Tier, nbytes: int) -> Target:
        return replace(self, budgets={**self.budgets, tier: replace(self.budgets[tier], nbytes=nbytes)})

    def less(self, taken: Mapping[Tier, int]) -> Target:
        """This target when others have ``taken`` bytes of its budgets."""
        return replace(self, budgets={tier: budget.less(taken.get(tier, 0)) for tier, budget in self.budgets.items()})

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} of world_size {self.world_size} does not exist")


def budgets_of(hw: Hardware) -> dict[Tier, Budget]:
    """The budgets of one rank of ``hw``."""
    usable = UsableMemory.of(hw)
    return {Tier.DEVICE: usable.device, Tier.HOST: usable.host}


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Wishes of the caller.

    Attributes:
        chunk_numel: rounded up to multiples of 256 bytes (Inductor clones less aligned inputs); None: search.
        os_home: of optimizer states; ``auto``: on the device where everything fits.
        cuts: operator indexes at which a segment must start, for forward and backward.
        num_resident_states: of this rank, on the device for good; more where the host lacks room for the others.
        keeps_payloads: theirs too, where one rank trains, in chunks that no larger tensor spans, and if all fit.
        streamed_share: of the states at home on the host, the share in [0, 1] that each step updates on the device.
        num_second_homes: chunks of this rank with a second home, at most; fewer where host memory has less room.
        num_exchanges: segments of each graph of a resident plan over several ranks, about: the share that exchanges
            before the first begins and after the last ends, where nothing hides it, is one of so many.
        accumulate: micro-batches of a step, at most. With more than one, gradients have chunks of their own.
        in_flight: micro-batches whose forward has begun and whose backward has not ended, at most.
        tracks_grad_norm: norms of gradients are taken as they land, and updates follow a decision on them.
        scales: backward multiplies its tangents by a loss scale.
        activations: what may be done with saved values; ``auto``: what simulates fastest.
        moved_share: of the layers, the share in [0, 1] whose saved values go to host memory until backward.
        fixed_moves: positions of the saved values that do, whatever the share.
    """

    chunk_numel: int | None = None
    os_home: Literal["auto", "device", "host"] = "auto"
    cuts: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    max_slots: int | None = None
    num_resident_states: int = 0
    keeps_payloads: bool = False
    streamed_share: float = 0.0
    num_second_homes: int = 0
    num_exchanges: int = 8
    accumulate: int = 1
    in_flight: int = 1
    tracks_grad_norm: bool = False
    scales: bool = False
    state_spec: StateSpec = ADAM_STATES
    activations: Activations = "auto"
    moved_share: float = 0.0
    fixed_moves: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.chunk_numel is not None and self.chunk_numel < 1:
            raise ValueError(f"chunk_numel must be at least 1, got {self.chunk_numel}")
        if self.max_slots is not None and self.max_slots < 1:
            raise ValueError(f"max_slots must be at least 1, got {self.max_slots}")
        if self.os_home not in ("auto", "device", "host"):
            raise ValueError(f"os_home must be 'auto', 'device' or 'host', got {self.os_home!r}")
        if self.num_resident_states < 0:
            raise ValueError(f"num_resident_states must not be negative, got {self.num_resident_states}")
        if self.num_second_homes < 0:
            raise ValueError(f"num_second_homes must not be negative, got {self.num_second_homes}")
        if self.num_exchanges < 1:
            raise ValueError(f"num_exchanges must be at least 1, got {self.num_exchanges}")
        if not 0.0 <= self.streamed_share <= 1.0:
            raise ValueError(f"streamed_share must lie in [0, 1], got {self.streamed_share}")
        if self.activations not in ACTIVATIONS:
            raise ValueError(f"activations must be one of {', '.join(ACTIVATIONS)}, got {self.activations!r}")
        if not 0.0 <= self.moved_share <= 1.0:
            raise ValueError(f"moved_share must lie in [0, 1], got {self.moved_share}")
        if not 1 <= self.accumulate <= MAX_MICRO_BATCHES:
            raise ValueError(f"accumulate must lie in [1, {MAX_MICRO_BATCHES}], got {self.accumulate}")
        if not 1 <= self.in_flight <= self.accumulate:
            raise ValueError(f"in_flight must lie in [1, accumulate={self.accumulate}], got {self.in_flight}")


@dataclass(frozen=True, slots=True)
class GraphCosts:
    """Bytes per operator of one graph: non-model bytes, and gradients that become final or land there.

    ``crossing``: `Operator.crossing_nbytes`; () where no value is fused away. ``away``: of moved values that are not on
    the device; they are no part of the others.
    """

    live: tuple[int, ...]
    live_after: tuple[int, ...]
    workspace: tuple[int, ...]
    made: tuple[int, ...]
    landed: tuple[int, ...]
    crossing: tuple[int, ...] = ()
    away: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Liveness:
    """When parameters and gradients are used. Tuples over parameters hold -1 for "never".

    Attributes:
        use_order: parameters in order of first use, forward graph first.
        final_op: operator of backward after which the gradient is final.
        landing_op: operator of backward at whose segment's end it lands in the payload or gradient chunk.
        needs: per graph, per operator: the parameters that it reads or whose gradient lands over them there.
        has_grad_chunks: gradients land in chunks of their own, as soon as they are final.
    """

    use_order: tuple[int, ...]
    trained: tuple[int, ...]
    last_read_op: tuple[int, ...]
    final_op: tuple[int, ...]
    landing_op: tuple[int, ...]
    needs: tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]
    costs: tuple[GraphCosts, GraphCosts]
    has_grad_chunks: bool = False


@dataclass(frozen=True, slots=True)
class ChunkBlocks:
    """The chunk blocks of a layout, and those of each parameter and its gradient.

    ``of_param``: -1 where a parameter takes no bytes or no graph uses it.
    """

    first_group: tuple[int, ...]
    num_groups: tuple[int, ...]
    of_param: tuple[int, ...]
    of_grad: tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class Kept(Generic[T]):
    """Values by key, each with the facts that it was made of."""

    _found: dict[Facts, tuple[Facts, T]] = field(default_factory=dict)

    def of(self, key: Facts, facts: Facts, make: Callable[[], T]) -> T:
        """The one kept under ``key`` if it was made of equal ``facts``, or the one that ``make`` makes."""
        found = self._found.get(key)
        if found is None or found[0] != facts:
            found = self._found[key] = (facts, make())
        return found[1]


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """A layout without homes, packed with a look-back of so many groups, and its chunk blocks."""

    lookback: int
    layout: Layout
    blocks: ChunkBlocks


@dataclass(frozen=True, slots=True)
class Packing:
    """A packed layout and what operators need in it."""

    packed: PackedLayout
    needs: BlockNeeds


@dataclass(slots=True)
class Packings:
    """Packings by chunk size, kept for plans of one model on as many ranks.

    Layouts depend on the order in which parameters are used, so schedules that compute other layers again share them.
    What operators need is kept for one schedule at a time.
    """

    layouts: Kept[tuple[PackedLayout, ...]] = field(default_factory=lambda: Kept[tuple[PackedLayout, ...]]())
    needs: Kept[tuple[BlockNeeds, ...]] = field(default_factory=lambda: Kept[tuple[BlockNeeds, ...]]())


@dataclass(frozen=True, slots=True)
class BaseSegment:
    """Operators ``first_op:end_op`` of a graph that need the same ``blocks``."""

    graph: GraphKind
    first_op: int
    end_op: int
    blocks: tuple[int, ...]
    lands: tuple[int, ...]
    landed_nbytes: int
    live_nbytes: int
    workspace_nbytes: int

    @property
    def nonmodel_nbytes(self) -> int:
        return self.live_nbytes + self.workspace_nbytes


@dataclass(frozen=True, slots=True)
class ResidencyInterval:
    """Steps ``begin`` to ``end`` of ``block``; ``dirty``: gradients landed, it ends with a write-back."""

    block: int
    slot_range: int
    begin: int
    end: int
    dirty: bool


@dataclass(frozen=True, slots=True)
class Demand:
    """The demand of a layout: its chunk blocks and the base segments of forward and backward."""

    blocks: ChunkBlocks
    steps: tuple[BaseSegment, ...]
    min_ranges: int
    peak_nbytes: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """One graph's merged segments with the intervals fetched before each and freed after each."""

    graph: GraphKind
    segments: tuple[Segment, ...]
    fetches: tuple[tuple[ResidencyInterval, ...], ...]
    frees: tuple[tuple[ResidencyInterval, ...], ...]


@dataclass(frozen=True, slots=True)
class TimedMove:
    """One moved value, and the operators before which it is copied, goes, and has memory again.

    The first two are forward's, ``discard_at`` may be its end; ``allocate_at`` is backward's.
    """

    value: MovedValue
    offload_at: int
    discard_at: int
    allocate_at: int


@dataclass(frozen=True, slots=True)
class ActionAccess:
    """An action without waits, and its resources: ``d3`` slot, ``h7`` home, ``o7`` states, ``s7`` second."""

    action: Action
    reads: tuple[str, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Draft:
    """All facts so far; None where no pass has decided yet.

    ``waiting_nbytes``: as of `chunkc.ir.plan.Plan`. ``packings``: shared by drafts of one request.
    """

    schedule: Schedule
    target: Target
    options: PlanOptions
    fixed_layout: Layout | None = None
    packings: Packings = field(default_factory=Packings, repr=False, compare=False)
    note: str = ""
    stages: tuple[StageRecord, ...] = ()
    moves: tuple[TimedMove, ...] = ()
    waiting_nbytes: int = 0
    liveness: Liveness | None = None
    chunk_numel: int | None = None
    fitting_numels: tuple[int, ...] = ()
    lookback: int = 0
    layout: Layout | None = None
    os_home: Tier | None = None
    demand: Demand | None = None
    overlays: tuple[Overlay, ...] | None = None
    intervals: tuple[ResidencyInterval, ...] | None = None
    timelines: tuple[Timeline, Timeline] | None = None
    accesses: tuple[tuple[ActionAccess, ...], tuple[ActionAccess, ...]] | None = None
    programs: tuple[Program, ...] | None = None

    @property
    def is_resident(self) -> bool:
        """Whether payloads and optimizer states all stay on the device."""
        return self.os_home is not None and self.os_home.is_fastest

    def with_stage(self, record: StageRecord) -> Draft:
        return replace(self, stages=(*self.stages, record), note="")


@dataclass(frozen=True, slots=True)
class Overlay:
    """The proof that grad16 may take the bytes of param16 once its producer and last reader have run."""

    param: int
    final_op: int
    last_read_op: int
    landing_op: int


def decided(fact: T | None, name: str) -> T:
    """``fact``, which the contract says is decided; ValueError when no pass has decided it."""
    if fact is None:
        raise ValueError(f"no pass has decided {name!r} yet; check the order of the passes")
    return fact
