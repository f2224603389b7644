"""Modelled systems by hand: layers of 256 bytes, copied in 1 ms, updated in 2 ms on the host and 1 ms on the device."""

from dataclasses import replace

import pytest
from costs import LINKS, RATES, UNIT_NBYTES
from schedules import chain

from chunkc.baselines import POLICIES, Course, Machine, Outcome, PatrickStar
from chunkc.baselines.dos import stride
from chunkc.baselines.packing import pack
from chunkc.cost.rates import CopyLaw
from chunkc.errors import HardwareError
from chunkc.ir.actions import Stream
from chunkc.ir.schedule import GraphSchedule, Schedule

PLENTY = 1 << 20


def timed(found: Schedule, live: int = 0) -> Schedule:
    """``found`` with a layer for each operator; forward takes 1 ms of each, backward 2 ms."""

    def graph(of: GraphSchedule, units: int) -> GraphSchedule:
        ops = tuple(
            replace(o, layer=f"layers.{o.reads[0]}", nbytes=units * UNIT_NBYTES, live_nbytes=live) for o in of.operators
        )
        return replace(of, operators=ops)

    return replace(found, forward=graph(found.forward, 1), backward=graph(found.backward, 2), num_tokens=8)


def course(num_layers: int = 3, live: int = 0) -> Course:
    return Course.of(timed(chain(num_layers), live))


def machine(device: int = PLENTY, host: int = PLENTY, ranks: int = 1) -> Machine:
    return Machine("round", RATES, device, host, ranks)


def step_ms(outcome: Outcome) -> float:
    assert outcome.timeline is not None, outcome.why_not
    assert outcome.timeline.is_steady
    return outcome.timeline.step_ms


STAR = PatrickStar(sizes=(64,))
STATIC = PatrickStar("static", sizes=(64,), traced=False, os_on_device=False)


def test_stretches_are_layers() -> None:
    found = course(2)
    assert [(s.name, s.reads, s.grads) for s in found.stretches] == [
        ("fwd.0", (0,), ()),
        ("fwd.1", (1,), ()),
        ("bwd.0", (1,), (1,)),
        ("bwd.1", (0,), (0,)),
    ]
    assert found.numel == found.trained_numel == 128


def test_l2l_hides_nothing_but_updates() -> None:
    # Forward (1 + 1) * 3, backward (1 + 2 + 1) * 3; the last layer's update of 2 ms is left.
    assert step_ms(POLICIES["l2l"](course(), machine())) == pytest.approx(20)
    assert POLICIES["l2l"](course(), machine(ranks=2)).why_not == "a system for one GPU"


def test_zero_offload_updates_when_backward_is_done() -> None:
    # 3 + 6, the last gradients' copy, three updates of 2 ms, the last parameters' copy.
    found = POLICIES["zero-offload"](course(), machine())
    assert step_ms(found) == pytest.approx(9 + 1 + 6 + 1)
    assert found.moved_nbytes == 2 * 3 * 256
    assert (found.device_nbytes, found.host_nbytes) == (3 * 256, 16 * 192)


def test_zero3_offload_fetches_the_next_layer_beside_this_one() -> None:
    # The first fetch, 3 + 6, the last gradients' copy, three updates.
    found = POLICIES["zero3-offload"](course(), machine())
    assert step_ms(found) == pytest.approx(1 + 9 + 1 + 6)
    assert found.device_nbytes == 2 * 256


def test_dos_loads_every_kth_subgroup() -> None:
    assert stride(machine(), "float32") == 3  # 1 + 12 * 32e-6 / 256e-6 = 2.5
    # One subgroup, on the device: 9 of passes beside 9 of the last store, three gradients' copies behind that, 9 ms of
    # load, 3 of updates.
    assert step_ms(POLICIES["dos"](course(), machine())) == pytest.approx(9 + 3 + 9 + 3)


@pytest.mark.parametrize(
    ("update", "bandwidth", "expected"), [(1.0, 12.0, 2), (1.0, 11.9, 3), (0.1, 12.0, 2), (4, 25, 3)]
)
def test_the_stride_balances_the_link_and_the_host(update: float, bandwidth: float, expected: int) -> None:
    copy = CopyLaw(0.0, bandwidth)
    rates = replace(RATES, copies=dict.fromkeys(RATES.copies, copy), cpu_update_gparam_per_s={"float32": update})
    assert stride(replace(machine(), rates=rates), "float32") == expected


def test_patrickstar_with_room_for_all_moves_nothing() -> None:
    # Forward and backward, 1 ms for each layer's gradients to land, 1 ms of update a chunk.
    found = STAR(course(), machine())
    assert step_ms(found) == pytest.approx(9 + 3 + 3)
    assert found.moved_nbytes == 0 and found.host_nbytes == 0


def test_patrickstar_without_a_margin_takes_its_turns() -> None:
    # Each chunk: to the host, 2 ms of update, and back when forward asks for it.
    assert step_ms(STAR(course(), machine(device=3 * 256))) == pytest.approx(9 + 3 + 3 * (1 + 2 + 1))


def test_patrickstar_evicts_what_is_used_last() -> None:
    # Room for two: forward evicts 0 for 2, backward 2 for 0; 0 and 1 leave for their updates.
    found = STAR(course(), machine(device=2 * 256))
    assert step_ms(found) == pytest.approx(9 + 3 + 4 + 4 + 6)
    names = [s.action for s in found.timeline.slices if s.stream is Stream.D2H] if found.timeline else []
    assert names == ["evict group 0", "evict group 2", "evict group 0", "evict group 1"]


def test_static_evicts_in_list_order_from_a_fifth_of_the_memory() -> None:
    found = STATIC(course(4), machine(device=5 * 2 * 256))
    assert found.timeline is not None
    names = [s.action for s in found.timeline.slices if s.stream is Stream.D2H]
    # Forward: 0, 1; backward has 2 and 3, fetches 1 for 2 and 0 for 1.
    assert names[:4] == ["evict group 0", "evict group 1", "evict group 2", "evict group 1"]


def test_triples_fill_the_margin_by_the_formula() -> None:
    triple, payload = 12 * 64, 256
    for triples in range(4):
        room = 3 * payload + triples * triple + 100
        found = STAR(course(live=100), machine(device=room))
        assert found.notes[1] == f"{triples} of 3 optimizer-state chunks on the device"
    packing = pack(course(), 64)
    assert packing is not None
    assert STAR.margin(course(live=100), machine(device=3 * payload + 100), packing) == 0
    assert STAR.margin(course(live=100), machine(device=100 + 3 * payload - triple), packing) == -1


def test_all_chunks_fit_into_the_warm_up_share_and_the_host() -> None:
    total = 3 * (256 + 12 * 64)
    assert STAR(course(), machine(device=5120, host=total - 1024)).fits
    found = STAR(course(), machine(device=5120, host=total - 1025))
    assert not found.fits and found.missing_nbytes == 1


@pytest.mark.parametrize("name", ["zero-offload", "zero3-offload", "l2l", "dos"])
def test_one_byte_less_does_not_fit(name: str) -> None:
    found = POLICIES[name](course(live=40), machine())
    needs = (found.device_nbytes, found.host_nbytes)
    assert POLICIES[name](course(live=40), machine(*needs)).fits
    for device, host in ((needs[0] - 1, needs[1]), (needs[0], needs[1] - 1)):
        refused = POLICIES[name](course(live=40), machine(device, host))
        assert not refused.fits and refused.missing_nbytes == 1
        assert ("device" if device < needs[0] else "host") in refused.why_not


@pytest.mark.parametrize("name", ["static", "patrickstar", "zero-offload", "zero3-offload", "dos"])
def test_more_ranks_need_links(name: str) -> None:
    policy = POLICIES[name] if name not in ("static", "patrickstar") else {"static": STATIC, "patrickstar": STAR}[name]
    assert policy(course(4), machine(ranks=2)).fits
    nowhere = replace(machine(ranks=2), rates=replace(RATES, links=None))
    with pytest.raises(HardwareError, match="no rates of links"):
        policy(course(4), nowhere)


def test_an_exchange_costs_what_it_costs_a_plan() -> None:
    # Two groups of two chunks: gathered twice and reduced once, 1 ms each; updates on the device, 1 ms a group.
    rates = replace(RATES, links=replace(LINKS, hop_us=0.0))
    found = STAR(course(4), replace(machine(ranks=2), rates=rates))
    assert step_ms(found) == pytest.approx(4 + 8 + 4 + 3 * 2 + 2)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_is_labelled_as_a_model(name: str) -> None:
    assert POLICIES[name](course(), machine()).to_json()["modelled"] is True
