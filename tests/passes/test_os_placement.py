"""Optimizer states are on the device exactly where everything fits."""

from dataclasses import replace

from hypothesis import given
from schedules import chain, op, param, planned, schedule, schedules, target

from chunkc.ir.actions import Stream
from chunkc.ir.layout import ChunkList
from chunkc.ir.schedule import Schedule
from chunkc.ir.tiers import Tier
from chunkc.passes import PlanOptions
from chunkc.passes.support.arena import static_states


@given(schedules())
def test_the_last_byte_decides(found: Schedule) -> None:
    options = PlanOptions(chunk_numel=256)
    plan = planned(found, target(), options).plan
    need = plan.memory.device_peak_nbytes
    assert planned(found, target(need), options).plan.layout == plan.layout
    if plan.layout.os_nbytes():
        less = planned(found, target(need - 1), options).plan
        assert {c.os_home for c in less.layout.chunks} == {None, Tier.HOST} - (
            {None} if all(c.list is ChunkList.TRAINED for c in less.layout.chunks) else set()
        )


def test_payload_slots_come_first_and_adjacent_then_the_triples() -> None:
    params = [param("w", 100), param("frozen", 64), param("unused", 64)]
    plan = planned(schedule(params, [op([0, 1])], [op([0], [0])]), target(), PlanOptions(chunk_numel=64)).plan
    assert [(s.offset, s.nbytes) for s in plan.layout.slots] == [
        (0, 256), (256, 256), (512, 256), (768, 768), (1536, 768),
    ]  # fmt: skip
    assert plan.layout.arena_nbytes == 2304
    assert static_states(plan.layout) == {0: 3, 1: 4}
    assert [c.home for c in plan.layout.chunks] == [Tier.DEVICE] * 3 + [Tier.HOST]


def test_payloads_that_fit_without_their_states_go_up_and_down_once() -> None:
    plan = planned(chain(4), target(4 * 256 + 1024), PlanOptions(chunk_numel=64)).plan
    total = 4 * 256
    assert plan.moved_nbytes(Stream.H2D) == plan.moved_nbytes(Stream.D2H) == total
    assert {c.os_home for c in plan.layout.chunks} == {Tier.HOST}


def test_wishes_are_honoured() -> None:
    wish = PlanOptions(chunk_numel=64)
    assert planned(chain(2), target(), replace(wish, os_home="host")).drafts[-1][1].os_home is Tier.HOST
    assert planned(chain(2), target(), replace(wish, os_home="device")).drafts[-1][1].os_home is Tier.DEVICE
    assert planned(chain(2), target(), replace(wish, max_slots=1)).drafts[-1][1].os_home is Tier.HOST
