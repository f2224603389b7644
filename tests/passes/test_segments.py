"""Base segments and the bytes that they take."""

from hypothesis import given
from hypothesis import strategies as st
from schedules import op, param, planned_somewhere, requests, schedule, schedules

from chunkc.ir.schedule import Schedule
from chunkc.passes.chunk_mapping import blocks_of, pack
from chunkc.passes.liveness import analyse
from chunkc.passes.segments import base_segments, block_needs, segment_costs

PARAMS = [param(name, 64) for name in "abc"]


def bounds(found: Schedule, cuts: tuple[tuple[int, ...], tuple[int, ...]] | None = None) -> list[tuple[str, int, int]]:
    liveness = analyse(found)
    blocks = blocks_of(pack(found, liveness, 64))
    return [
        (s.graph, s.first_op, s.end_op)
        for s in base_segments(liveness, block_needs(liveness, blocks, keep_open=False), cuts)
    ]


def test_a_segment_starts_where_another_unit_is_needed() -> None:
    forward = [op(), op([0, 1]), op(), op([1]), op([0, 1]), op([2]), op()]
    found = bounds(schedule(PARAMS, forward, [op([2])]))
    assert found == [("forward", 0, 5), ("forward", 5, 7), ("backward", 0, 1)]


def test_segments_start_at_cuts_too() -> None:
    found = bounds(schedule(PARAMS, [op([0])] * 4, [op([0])] * 3), ((2,), (1,)))
    assert found == [("forward", 0, 2), ("forward", 2, 4), ("backward", 0, 1), ("backward", 1, 3)]


def test_gradients_count_until_the_segment_in_which_they_land_ends() -> None:
    """a's gradient (256 bytes) is final after operator 0 but lands with the last read, in operator 2."""
    backward = [op([0], [0], live=1000), op([1], live=1000, workspace=7), op([0], live=1000), op([2], live=1000)]
    costs = analyse(schedule(PARAMS, [op([0])], backward)).costs[1]
    assert segment_costs(costs, [0, 1, 2, 3]) == [(1000, 0), (1256, 7), (1256, 0), (1000, 0)]
    assert segment_costs(costs, [0]) == [(1256, 7)]


def test_gradients_of_the_last_operator_are_alive_while_they_are_stashed() -> None:
    found = schedule(PARAMS, [op([0])], [op([0], [0], live=100, after=50)])
    assert segment_costs(analyse(found).costs[1], [0]) == [(50 + 256, 0)]


def recount(found: Schedule, first: int, end: int, landed_before: set[int]) -> int:
    operators, best = found.backward.operators, 0
    for index in range(first, end):
        earlier = {p for o in operators[:index] for p in o.grads} - landed_before
        best = max(best, operators[index].live_nbytes + sum(found.params[p].nbytes for p in earlier))
    final = {p for o in operators[:end] for p in o.grads} - landed_before
    return max(best, operators[end - 1].live_after_nbytes + sum(found.params[p].nbytes for p in final))


@given(schedules(), st.sets(st.integers(1, 11)))
def test_costs_equal_an_independent_recount(found: Schedule, cuts: set[int]) -> None:
    num_ops = len(found.backward.operators)
    starts = [0, *sorted(c for c in cuts if c < num_ops)]
    liveness = analyse(found)
    landed: set[int] = set()
    expected = []
    for first, end in zip(starts, [*starts[1:], num_ops], strict=True):
        expected.append(recount(found, first, end, landed))
        landed |= {p for p in liveness.trained if first <= liveness.landing_op[p] < end}
    assert [live for live, _ in segment_costs(liveness.costs[1], starts)] == expected


@given(requests())
def test_segments_of_a_plan_cover_the_graphs_and_land_every_gradient_once(request: tuple) -> None:  # type: ignore[type-arg]
    plan = planned_somewhere(*request).plan
    for graph in request[0].graphs:
        segments = plan.graph_segments(graph.kind)
        assert [s.first_op for s in segments] == [0, *(s.end_op for s in segments[:-1])]
        assert segments[-1].end_op == len(graph.operators)
    landed = sorted(p for s in plan.segments for p in s.lands)
    assert landed == sorted(request[0].trained_params())
