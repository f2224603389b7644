"""Groups of two ranks: gathered before use, reduced after the last landing, released when they leave."""

from dataclasses import replace
from itertools import groupby, pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from interleave import find_wrong
from schedules import chain, check, op, planned, planned_somewhere, requests, schedule, target, texts

from chunkc.errors import PlanError
from chunkc.ir.actions import Op, Stream
from chunkc.ir.plan import Plan
from chunkc.ir.schedule import Schedule
from chunkc.ir.verify import verify
from chunkc.passes import PlanOptions, Target, make_plan


def test_own_chunks_are_fetched_and_groups_gathered() -> None:
    """Four layers in two groups, one place of two slots; this is rank 1."""
    options = PlanOptions(chunk_numel=64, os_home="host", max_slots=2)
    result = planned(chain(4), target(world_size=2, rank=1), options)
    assert texts(result, "forward") == [
        "f0 fetch c1 -> d1 @h2d after s1",
        "f1 gather g0 @comm after b12 f0",
        "f2 run fwd.0 @compute after f1",
        "f3 release g0 @compute",
        "f4 drop c1 <- d1 @compute",
        "f5 fetch c3 -> d1 @h2d after f4",  # s1 follows s0
        "f6 gather g1 @comm after f5",  # f5 waits for f4, which f3 precedes
        "f7 run fwd.1 @compute after f6",
    ]
    assert texts(result, "backward")[:8] == [
        "b0 run bwd.0 @compute",
        "b1 stash c2 of bwd.0 @compute",
        "b2 stash c3 of bwd.0 @compute",
        "b3 reduce g1 @comm after b2",
        "b4 release g1 @comm",  # computing goes on beside the reduction
        "b5 evict c3 <- d1 @d2h after b3",
        "b6 fetch c1 -> d1 @h2d after b5",
        "b7 gather g0 @comm after b6",
    ]
    assert texts(result, "step") == ["s0 update c3 @cpu after b5", "s1 update c1 @cpu after b13"]
    assert result.plan.program("forward").exit.resident == (("c2", 0), ("c3", 1))
    assert texts(result, "abandon") == ["t0 release g1 @compute", "t1 drop c3 <- d1 @compute"]


@pytest.mark.parametrize("rank", range(3))
def test_computing_goes_on_beside_a_reduction_on_every_rank(rank: int) -> None:
    """Four chunks in two groups of three: the last two ranks own padding, in which no gradient lands."""
    options = PlanOptions(chunk_numel=64, os_home="host", max_slots=6)
    result = planned(chain(4), target(world_size=3, rank=rank), options)
    labels = dict(result.plan.program("backward").labelled())
    reduces = {label for label, action in labels.items() if action.op is Op.REDUCE}
    waiting = [a for a in labels.values() if a.stream is Stream.COMPUTE and reduces.intersection(a.waits)]
    assert len(reduces) == 2 and [a.op for a in waiting] == [Op.RELEASE], "only behind the last"


@pytest.mark.parametrize("rank", range(3))
def test_every_wait_of_a_plan_with_padding_is_needed(rank: int) -> None:
    """A collective of a group reads and writes the slots of padding too."""
    plan = planned(
        chain(4), target(world_size=3, rank=rank), PlanOptions(chunk_numel=64, os_home="host", max_slots=3)
    ).plan
    tried = 0
    for name in ("forward", "backward", "step"):
        program = plan.program(name)
        for position, action in enumerate(program.actions):
            for wait in action.waits:
                less = replace(action, waits=tuple(w for w in action.waits if w != wait))
                actions = (*program.actions[:position], less, *program.actions[position + 1 :])
                others = tuple(replace(p, actions=actions) if p is program else p for p in plan.programs)
                with pytest.raises(PlanError):
                    verify(replace(plan, programs=others))
                tried += 1
    assert tried > 8


def test_resident_plans_gather_stale_copies_again() -> None:
    result = planned(chain(4), target(world_size=2), PlanOptions(chunk_numel=64))
    assert texts(result, "forward") == [
        "f0 gather g0 @comm after s0",
        "f1 gather g1 @comm after s1",
        "f2 run fwd.0 @compute after f0",
        "f3 run fwd.1 @compute after f1",
    ]
    assert [a for p in result.plan.programs for a in p.actions if a.op in (Op.FETCH, Op.EVICT)] == []


@pytest.mark.parametrize("accumulate", [1, 2])
def test_computing_goes_on_beside_the_exchanges_of_a_resident_plan(accumulate: int) -> None:
    """40 layers in 20 groups: each of eight segments needs two or three further groups, or has had them reduced."""
    options = PlanOptions(chunk_numel=64, accumulate=accumulate)
    plan = planned(chain(40), target(world_size=2), options).plan
    gathers = {label: a.index for label, a in plan.program("forward").labelled() if a.op is Op.GATHER}
    runs = [a for a in plan.program("forward").actions if a.op is Op.RUN]
    needed = [0, *(1 + max(gathers[w] for w in run.waits if w in gathers) for run in runs)]
    assert list(gathers.values()) == list(range(20)) and needed[-1] == 20
    assert len(runs) == 8 and {b - a for a, b in pairwise(needed)} == {2, 3}
    order = [a.op for a in plan.program("backward").actions if a.op in (Op.RUN, Op.REDUCE)]
    reduced = [len(list(found)) for op, found in groupby(order) if op is Op.REDUCE]
    assert sum(reduced) == 20 and len(reduced) == 8 and set(reduced) == {2, 3}
    alone = planned(chain(40), target(), options).plan
    assert len(alone.segments) == 2, "one rank exchanges nothing"


@pytest.mark.parametrize("rank", range(2))
def test_a_group_that_is_still_read_is_reduced_later(rank: int) -> None:
    """Another graph over a resident layout reads layer 0 only, which it does not train, after layer 1 has landed."""
    layers, uses = chain(6), (1, 2, 3, 0, 4, 5)
    backward = [op([i], [i] if i else []) for i in uses]
    where, options = target(world_size=2, rank=rank), PlanOptions(chunk_numel=64)
    layout = planned(layers, where, options).plan.layout
    other = schedule(layers.params, [op([i]) for i in reversed(uses)], backward)
    plan = make_plan(other, where, options, layout=layout, check=check).plan
    segments = plan.graph_segments("backward")
    last_read = max(s.index for s in segments if 0 in s.reads)
    assert any(1 in s.lands and s.index < last_read for s in segments)
    order = [str(a).split(" @")[0] for a in plan.program("backward").actions]
    assert order.index(f"run bwd.{last_read}") < order.index("reduce g0") < order.index("release g0")


def tied(numel: int = 64) -> Schedule:
    """A chain whose first weight makes the loss too, so that its gradient is final when nothing reads it any more."""
    layers = chain(4, numel)
    backward = [op([0]), *(op([i], [i]) for i in (3, 2, 1)), op([], [0])]
    return schedule(layers.params, [op([i]) for i in (0, 1, 2, 3, 0)], backward)


def of_first_group(plan: Plan) -> list[Op]:
    """Exchanges of group 0 in backward, and openings."""
    actions = plan.program("backward").actions
    return [a.op for a in actions if a.target == "g0" or a.op is Op.OPEN]


def test_a_group_that_comes_back_for_gradients_is_opened() -> None:
    """Each weight spans the two chunks of a group, and there is room for one; this is rank 1."""
    options = PlanOptions(chunk_numel=64, os_home="host", max_slots=2)
    result = planned(tied(numel=128), target(world_size=2, rank=1), options)
    last = [text.split(" ", 1)[1].split(" after ")[0] for text in texts(result, "backward")][-8:]
    assert last == [
        "open c0 -> d0 @h2d",
        "fetch c1 -> d1 @h2d",
        "run bwd.4 @compute",
        "stash c0 of bwd.4 @compute",
        "stash c1 of bwd.4 @compute",
        "reduce g0 @comm",
        "release g0 @compute",
        "evict c1 <- d1 @d2h",
    ]
    assert of_first_group(result.plan) == [Op.RELEASE, Op.OPEN, Op.REDUCE, Op.RELEASE]


def test_a_group_of_which_a_segment_reads_is_gathered_again() -> None:
    """Two weights in each group: the second one is read when the group comes back for both gradients."""
    options = PlanOptions(chunk_numel=64, os_home="host", max_slots=2)
    result = planned(tied(), target(world_size=2, rank=1), options)
    assert of_first_group(result.plan) == [Op.RELEASE, Op.GATHER, Op.REDUCE, Op.RELEASE]


@pytest.mark.parametrize("rank", range(3))
def test_opened_padding_holds_what_it_should_in_every_interleaving(rank: int) -> None:
    """Three ranks and room for a group: the weight that comes back is used last in forward, with padding behind it."""
    params = [replace(info, shape=(128 if i == 0 else 192,)) for i, info in enumerate(tied().params)]
    options = PlanOptions(chunk_numel=64, os_home="host", max_slots=3)
    found = schedule(params, [op([i]) for i in (1, 2, 3, 0)], tied().backward.operators)
    plan = planned(found, target(world_size=3, rank=rank), options).plan
    opened = {a.index for a in plan.program("backward").actions if a.op is Op.OPEN}
    assert opened == {9, 10, 11} - {9 + rank} and not any(11 in p.chunks for p in plan.layout.placements)
    assert find_wrong(plan, range(40)) == []


@pytest.mark.parametrize("rank", range(2))
def test_groups_that_come_in_forward_are_gathered(rank: int) -> None:
    """One tensor in two groups, with another weight behind it, which alone is read while both stand there."""
    params = [replace(chain(1, numel).params[0], name=name) for name, numel in (("a", 192), ("b", 64), ("e", 192))]
    found = schedule(params, [op([0, 1]), op([2]), op([1])], [op([1]), op([], [0, 1]), op([2], [2])])
    options = PlanOptions(chunk_numel=64, os_home="host", max_slots=4)
    plan = planned(found, target(world_size=2, rank=rank), options).plan
    assert not any(a.op is Op.OPEN for p in plan.programs for a in p.actions)
    forward = [a.target for a in plan.program("forward").actions if a.op is Op.GATHER]
    assert forward.count("g0") == 2, "it comes a second time in forward, and stays until its gradients land"


@pytest.mark.parametrize("rank", range(2))
def test_a_group_with_a_parameter_that_never_lands_is_gathered_again(rank: int) -> None:
    """Another graph over the layout trains less: zeros would be averaged with a weight of another rank."""
    layers, where = tied(), target(world_size=2, rank=rank)
    options = PlanOptions(chunk_numel=64, os_home="host", max_slots=2)
    layout = planned(layers, where, options).plan.layout
    backward = [op([0]), op([3], [3]), op([2], [2]), op([], [0])]
    plan = make_plan(
        schedule(layers.params, layers.forward.operators, backward), where, options, layout=layout, check=check
    ).plan
    assert of_first_group(plan) == [Op.RELEASE, Op.GATHER, Op.REDUCE, Op.RELEASE]


def test_gradient_chunks_of_other_ranks_are_opened_and_reduced() -> None:
    """Two layers in one group, states on the host; this is rank 1. The first micro-batch opens its own chunk too."""
    options = PlanOptions(chunk_numel=64, os_home="host", max_slots=4, accumulate=2)
    result = planned(chain(2), target(world_size=2, rank=1), options)
    moves = [text.split(" after ")[0] for text in texts(result, "accumulate")]
    assert moves == [
        "b0 open c2 -> d2 @h2d",
        "b1 fetch c3 -> d3 @h2d",
        "b2 run bwd.0 @compute",
        "b3 add c2 of bwd.0 @compute",
        "b4 add c3 of bwd.0 @compute",
        "b5 reduce g1 @comm",
        "b6 release g1 @compute",
        "b7 evict c3 <- d3 @d2h",
        "b8 release g0 @compute",
        "b9 drop c1 <- d1 @compute",
    ]
    assert texts(result, "backward")[1].startswith("b1 open c3 -> d3 @h2d")


def test_resident_gradient_chunks_are_reduced_where_they_stand() -> None:
    result = planned(chain(2), target(world_size=2), PlanOptions(chunk_numel=64, accumulate=2))
    assert texts(result, "accumulate") == [
        "b0 open c3 -> d3 @h2d after f0",
        "b1 run bwd.0 @compute",
        "b2 add c2 of bwd.0 @compute",
        "b3 add c3 of bwd.0 @compute after b0",
        "b4 reduce g1 @comm after b3",
        "b5 release g1 @comm",
        "b6 release g0 @compute",
    ]


@pytest.mark.long
@given(requests(), st.integers(1, 3), st.integers(2, 4))
def test_replicas_plan_as_one_of_them_alone(
    request: tuple[Schedule, Target, PlanOptions], accumulate: int, num_replicas: int
) -> None:
    """The same chunks, actions and memory; each reduction also brings the means of the other replicas."""
    found, where, options = request
    assume(where.world_size > 1)
    options = replace(options, accumulate=accumulate)
    alone = planned_somewhere(found, where, options).plan
    plan = planned_somewhere(found, replace(where, num_replicas=num_replicas), options).plan
    assert replace(plan.layout, num_replicas=1) == alone.layout
    assert (plan.programs, plan.memory) == (alone.programs, alone.memory)
    reduced = [a.index * where.world_size for _, _, a in plan.labelled() if a.op is Op.REDUCE]
    between = sum(2 * (num_replicas - 1) * plan.layout.chunks[c].nbytes // num_replicas for c in reduced)
    assert plan.moved_nbytes(Stream.COMM) == alone.moved_nbytes(Stream.COMM) + between
    assert Plan.from_json(plan.to_json()) == plan and plan.digest() != alone.digest()


def test_a_layout_of_other_replicas_is_refused() -> None:
    where = target(world_size=2)
    layout = planned(chain(4), where, PlanOptions(chunk_numel=64)).plan.layout
    with pytest.raises(ValueError, match="rank 0 of 2, the target is rank 0 of 2 in each of 3 replicas"):
        make_plan(chain(4), replace(where, num_replicas=3), layout=layout)


@given(requests(), st.integers(1, 3))
def test_all_ranks_carry_out_the_same_collectives(
    request: tuple[Schedule, Target, PlanOptions], accumulate: int
) -> None:
    found, where, options = request
    options = replace(options, accumulate=accumulate)
    mine = planned_somewhere(found, where, options).plan
    budgets = (mine.memory.device_budget_nbytes, mine.memory.host_budget_nbytes)
    for rank in range(where.world_size):
        other = planned_somewhere(found, target(*budgets, where.world_size, rank), options).plan
        assert other.layout.placements == mine.layout.placements
        for key in (p.key for p in mine.programs):
            kinds = (Op.GATHER, Op.RELEASE, Op.REDUCE)
            calls = [[(a.op, a.target) for a in p.program(*key).actions if a.op in kinds] for p in (mine, other)]
            assert calls[0] == calls[1]
