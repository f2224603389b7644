"""Plans of one runner that differ only in where things lie, and the identity plan to hold each against.

The identity plan keeps everything on the device, with the cuts and the update arithmetic of the other plan.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pair import CHUNK_SIZE
from plan_runner import Cuts, PlanRunner, Setup, cuts_of, spans_of
from training import PLACEMENT, Recipe, Trained, assert_same_bits

from chunkc.ir.actions import Op, Stream
from chunkc.ir.layout import ChunkList
from chunkc.ir.plan import Plan
from chunkc.ir.tiers import Tier
from chunkc.passes import PlanOptions
from chunkc.runtime.devices.debug_settings import DebugSettings

MakeSetup = Callable[[PlanRunner], Setup]


SPANNING_NUMEL = 4096
"""Elements per chunk of which the larger parameters of ``models.Odd`` take several."""


def smallest(runner: PlanRunner) -> Setup:
    memory = smallest_plan(runner).memory
    return Setup(options_of(runner), device_nbytes=memory.device_budget_nbytes, host_nbytes=memory.host_budget_nbytes)


def options_of(runner: PlanRunner) -> PlanOptions:
    """The search decides, but for the models that most cases train."""
    numel = {"odd": SPANNING_NUMEL, "gpt2": CHUNK_SIZE, "gpt2_small": CHUNK_SIZE}.get(runner.case.name)
    return PlanOptions(chunk_numel=numel)


def smallest_plan(runner: PlanRunner) -> Plan:
    """The plan for the least memory that works; the other placements take its chunk size and cuts."""
    if "smallest" not in runner.plans:
        options = options_of(runner)
        device_nbytes, host_nbytes = runner.smallest(options)
        runner.reset(Setup(options, device_nbytes=device_nbytes, host_nbytes=host_nbytes))
        runner.plans["smallest"] = runner.next_plan
    return runner.plans["smallest"]


def coarse(runner: PlanRunner) -> Setup:
    """The least memory that works with chunks of a quarter of the model: few segments, quickly compiled."""
    numel = sum(info.numel for info in runner.captured.schedule.params)
    options = PlanOptions(chunk_numel=numel // 4)
    device_nbytes, host_nbytes = runner.smallest(options)
    return Setup(options, device_nbytes=device_nbytes, host_nbytes=host_nbytes)


def half_evicted(runner: PlanRunner) -> Setup:
    """States on the host, and half of the payload slots that everything would take, or the fewest that work."""
    tight = smallest_plan(runner)
    everything = sum(1 for c in tight.layout.chunks if c.list is not ChunkList.UNUSED)
    slots = max(len(tight.layout.slots), everything // 2)
    return Setup(replace(all_on_host(runner).options, max_slots=slots))


def all_on_host(runner: PlanRunner) -> Setup:
    """All homes on the host; every payload is fetched once in forward and stays until its gradient has landed."""
    tight = smallest_plan(runner)
    return Setup(PlanOptions(chunk_numel=tight.layout.chunk_numel, os_home="host", cuts=cuts_of(tight)))


def all_on_device(runner: PlanRunner) -> Setup:
    """Nothing moves; small chunks, and cuts where the smallest budget has them."""
    tight = smallest_plan(runner)
    chunk_numel = max(64, tight.layout.chunk_numel // 3)
    return Setup(PlanOptions(chunk_numel=chunk_numel, os_home="device", cuts=cuts_of(tight)))


PLACEMENTS: dict[str, MakeSetup] = {
    "smallest": smallest,
    "half_evicted": half_evicted,
    "all_on_host": all_on_host,
    "all_on_device": all_on_device,
}


def mixed(
    num_resident_states: int = 0,
    streamed_share: float = 0.0,
    *,
    few_slots: bool = True,
    keeps_payloads: bool = False,
    num_second_homes: int = 0,
) -> MakeSetup:
    """Triples in all places, with chunks enough to tell apart; all updates compute what those of the host compute.

    ``keeps_payloads``: of a third of the chunks, the first ones, but for those of tensors that are larger than a chunk.
    """

    def make(runner: PlanRunner) -> Setup:
        tight = smallest_plan(runner)
        chunk_numel = max(64, tight.layout.chunk_numel // 3)
        options = PlanOptions(chunk_numel=chunk_numel, os_home="host", cuts=cuts_of(tight))
        slots = max(3 * len(tight.layout.slots), FEW_SLOTS) if few_slots else None
        num = (
            sum(c.list is not ChunkList.UNUSED for c in tight.layout.chunks) if keeps_payloads else num_resident_states
        )
        wishes: dict[str, Any] = {"num_resident_states": num, "streamed_share": streamed_share}
        wishes |= {"keeps_payloads": keeps_payloads, "num_second_homes": num_second_homes}
        return Setup(replace(options, max_slots=slots, **wishes), host_arithmetic=True)

    return make


FEW_SLOTS = 8  # one buffer in bf16, two in fp32
ALL = 1 << 20
MIXED: dict[str, MakeSetup] = {
    "some_resident": mixed(2),
    "some_whole": mixed(keeps_payloads=True),
    "all_resident": mixed(ALL),
    "some_streamed": mixed(0, 0.4),
    "all_streamed": mixed(0, 1.0),
    "all_streamed_with_room": mixed(0, 1.0, few_slots=False),
    "some_of_each": mixed(2, 0.4),
    "whole_and_streamed": mixed(streamed_share=0.4, keeps_payloads=True),
    "none_on_the_host": mixed(2, 1.0),
    "some_begun": mixed(2, 0.4, num_second_homes=3),
    "all_begun": mixed(num_second_homes=ALL),
}


class Identities:
    def __init__(self) -> None:
        self._runs: dict[tuple[int, Recipe, Cuts, bool], Trained] = {}

    def of(
        self, runner: PlanRunner, plan: Plan, recipe: Recipe = PLACEMENT, *, host_arithmetic: bool = False
    ) -> Trained:
        """The run to which a run of ``plan`` must be equal; ``host_arithmetic`` if all its updates had it."""
        cuts = cuts_of(plan)
        on_host = host_arithmetic or any(c.os_home is Tier.HOST for c in plan.layout.chunks)
        key = id(runner), recipe, cuts, on_host
        if key not in self._runs:
            options = PlanOptions(os_home="device", cuts=cuts)
            setup = Setup(options, settings=DebugSettings(), host_arithmetic=on_host)
            self._runs[key] = runner.train(setup, recipe)
            assert spans_of(runner.plan) == spans_of(plan), "the identity plan is cut elsewhere"
            assert_is_identity(runner.plan)
        return self._runs[key]


def assert_is_identity(plan: Plan) -> None:
    """Everything that a graph uses is on the device and no action moves anything."""
    moves = [str(a) for p in plan.programs for a in p.actions if a.op not in (Op.RUN, Op.STASH, Op.UPDATE, Op.RESTORE)]
    assert not moves, f"the identity plan moves: {moves[:3]}"
    assert all(c.os_home in (None, Tier.DEVICE) for c in plan.layout.chunks)


def check_placement(runner: PlanRunner, placement: str, identities: Identities) -> None:
    """Acceptance (a) for one placement."""
    found = runner.train(PLACEMENTS[placement](runner), PLACEMENT)
    plan, stats = runner.plan, runner.stats()
    assert (moved(plan) == 0) == (placement == "all_on_device"), "this placement is not what its name says"
    assert stats["h2d_nbytes"] + stats["d2h_nbytes"] == moved(plan)
    assert_same_bits(found, identities.of(runner, plan))


def check_mixed(runner: PlanRunner, placement: str, identities: Identities, recipe: Recipe) -> None:
    """Acceptance (a) for one placement of `MIXED`."""
    found = runner.train(MIXED[placement](runner), recipe)
    plan, stats = runner.plan, runner.stats()
    _assert_mixed(plan, placement)
    assert stats["h2d_nbytes"] + stats["d2h_nbytes"] == moved(plan)
    assert_same_bits(found, identities.of(runner, plan, recipe, host_arithmetic=True))


def _assert_mixed(plan: Plan, placement: str) -> None:
    """The step updates chunks in the places that the placement's name says, and in no others."""
    resident = sum(c.os_home is Tier.DEVICE for c in plan.layout.chunks)
    step = plan.program("step").actions
    streamed = sum(a.op is Op.LOAD for a in step)
    host = sum(a.stream is Stream.CPU for a in step)
    assert resident + streamed + host == sum(a.op is Op.UPDATE for a in step) > 4
    present = {"resident": resident > 0, "streamed": streamed > 0, "host": host > 0}
    wanted = {
        "some_resident": {"resident", "host"},
        "all_resident": {"resident"},
        "some_streamed": {"streamed", "host"},
        "all_streamed": {"streamed"},
        "all_streamed_with_room": {"streamed"},
        "some_of_each": {"resident", "streamed", "host"},
        "some_whole": {"resident", "host"},
        "whole_and_streamed": {"resident", "streamed", "host"},
        "none_on_the_host": {"resident", "streamed"},
        "some_begun": {"resident", "streamed", "host"},
        "all_begun": {"host"},
    }[placement]
    assert {kind for kind, is_there in present.items() if is_there} == wanted
    assert any(c.home is Tier.DEVICE for c in plan.layout.chunks) == ("whole" in placement)
    begun = sum(a.op is Op.BEGIN for a in plan.program("backward").actions)
    assert (begun > 0) == ("begun" in placement) and (placement != "all_begun" or begun == host)


def moved(plan: Plan) -> int:
    return plan.moved_nbytes(Stream.H2D) + plan.moved_nbytes(Stream.D2H)


def train_moved_and_kept(runner: PlanRunner, moving: Setup, recipe: Recipe) -> tuple[Trained, Trained]:
    """A run that moves saved values, and one that keeps them with the same segments and chunks.

    ``runner.plans["moved"]`` and ``["kept"]`` are their plans.
    """
    found = runner.train(moving, recipe)
    plan = runner.plans["moved"] = runner.plan
    assert plan.moves and any(a.op is Op.RELOAD for p in plan.iteration() for a in p.actions)
    options = replace(moving.options, moved_share=0.0, fixed_moves=(), cuts=cuts_of(plan))
    options = replace(options, chunk_numel=plan.layout.chunk_numel)
    kept = runner.train(replace(moving, options=options, device_nbytes=1 << 30), recipe)
    runner.plans["kept"] = runner.plan
    assert not runner.plan.moves
    return found, kept
