"""Replay of a plan for reports: what stands where before each segment, and how many bytes that is."""

import pytest
from plans_for_report import gpt_plan

from chunkc.ir.actions import Op, parse
from chunkc.ir.verify import verify
from chunkc.report.moments import moments

PAYLOAD = 2 * 65_536  # bytes of a chunk of 64 * 1024 bfloat16 elements
TRIPLE = 12 * 65_536


@pytest.mark.parametrize("num_layers", [4, 5, 12])
def test_the_example_is_a_plan_that_the_verifier_accepts(num_layers: int) -> None:
    verify(gpt_plan(num_layers=num_layers))


def test_residents_before_each_segment() -> None:
    plan = gpt_plan(num_layers=4)
    static = (("c5", 4), ("os5", 5))
    found = {m.segment.name: m.resident for m in moments(plan, plan.program("forward"))}
    assert found == {
        "fwd.0": (("c0", 0), ("c6", 1), ("c1", 2), *static),
        "fwd.1": (("c0", 0), ("c2", 1), ("c1", 2), *static),
        "fwd.2": (("c0", 0), ("c2", 1), ("c3", 2), *static),
        "fwd.3": (("c0", 0), ("c4", 1), ("c3", 2), *static),
        "fwd.4": (("c0", 0), ("c4", 1), *static),
        "fwd.5": (("c0", 0), *static),
    }


def test_bytes_of_a_moment() -> None:
    plan = gpt_plan(num_layers=4)
    last = list(moments(plan, plan.program("forward")))[-1]
    assert last.used_nbytes == PAYLOAD + PAYLOAD + TRIPLE  # c0, c5, os5
    # whole arena: five payload slots and one for a triple; live: activations of six segments, logits; workspace
    assert last.total_nbytes == 5 * PAYLOAD + TRIPLE + 6 * 65_536 + 8 * 1000 * 64 + 512
    assert plan.program("forward").actions[last.position] == parse("run fwd.5 @compute")


def test_the_highest_moment_is_the_planned_peak() -> None:
    plan = gpt_plan()
    totals = [m.total_nbytes for p in plan.programs for m in moments(plan, p)]
    assert max(totals) == plan.memory.device_peak_nbytes


def test_moved_bytes_count_what_is_used_of_a_chunk() -> None:
    layout = gpt_plan().layout
    assert layout.moved_nbytes(parse("fetch c1 -> d2 @h2d")) == 2 * 12 * 64 * 64
    assert layout.moved_nbytes(parse("store os1 <- d2 @d2h")) == 12 * 12 * 64 * 64
    assert layout.moved_nbytes(parse("drop c1 <- d2 @compute")) == 0
    still = [op for op in Op if op not in (Op.FETCH, Op.EVICT, Op.LOAD, Op.STORE)]
    plan = gpt_plan()
    assert {layout.moved_nbytes(a) for p in plan.programs for a in p.actions if a.op in still} == {0}
