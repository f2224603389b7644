"""Which triples stay and which pass through: evenly over the step, the same groups on all ranks."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedules import chain, gpt_like, op, param, planned, schedule, schedules, target

from chunkc.ir.layout import Layout
from chunkc.ir.schedule import Schedule
from chunkc.ir.tiers import Tier
from chunkc.passes import PlanOptions
from chunkc.passes.liveness import analyse
from chunkc.passes.support.draft import Liveness
from chunkc.passes.support.resident_states import residence_order, spread, state_order, states_nbytes, streamed_chunks

ON_HOST = PlanOptions(chunk_numel=64, os_home="host")


def laid_out(found: Schedule, world_size: int = 1, rank: int = 0) -> tuple[Layout, Liveness]:
    layout = planned(found, target(world_size=world_size, rank=rank), ON_HOST).plan.layout
    return layout, analyse(found)


@given(st.integers(1, 300), st.integers(0, 300))
def test_spread_has_a_fractional_stride(count: int, chosen: int) -> None:
    chosen = min(chosen, count)
    found = spread(count, chosen)
    assert len(set(found)) == chosen and all(0 <= p < count for p in found)
    gaps = {b - a for a, b in pairwise(found)}
    assert gaps <= {count // max(1, chosen), -(-count // max(1, chosen))}


@pytest.mark.parametrize(
    ("count", "chosen", "positions"),
    [(10, 4, (1, 3, 6, 8)), (5, 2, (1, 3)), (4, 4, (0, 1, 2, 3)), (7, 1, (3,)), (3, 0, ()), (0, 0, ())],
)
def test_spread_of_a_few(count: int, chosen: int, positions: tuple[int, ...]) -> None:
    assert spread(count, chosen) == positions


def test_the_first_residents_are_spread_evenly_and_more_room_moves_none() -> None:
    layout, liveness = laid_out(chain(8))
    assert residence_order(layout, liveness) == (0, 4, 2, 6, 1, 5, 3, 7)
    layout, liveness = laid_out(chain(6))
    assert residence_order(layout, liveness) == (0, 4, 2, 1, 5, 3)
    for num in range(1, 7):
        stays = sorted(residence_order(layout, liveness)[:num])
        assert max(b - a for a, b in pairwise([-1, *stays, 6])) <= -(-6 // num) + 2


@given(schedules(), st.sampled_from([2, 3, 4]))
def test_all_ranks_choose_the_same_groups_of_the_same_bytes(found: Schedule, world_size: int) -> None:
    views = [laid_out(found, world_size, rank) for rank in range(world_size)]
    for choose in (state_order, residence_order, lambda *a: streamed_chunks(*a, 0.4)):
        groups = [[layout.group_of(c).index for c in choose(layout, liveness)] for layout, liveness in views]
        assert groups == [groups[0]] * world_size
    assert len({states_nbytes(layout, liveness) for layout, liveness in views}) == 1
    layout, liveness = views[0]
    assert states_nbytes(layout, liveness)[-1] == layout.os_nbytes()


def test_the_order_is_that_of_the_next_forward() -> None:
    params = [param("a", 64), param("half", 128, dtype="bfloat16"), param("b", 64)]
    found = schedule(params, [op([0]), op([1]), op([2])], [op([0, 1, 2], [0, 1, 2])])
    assert state_order(*laid_out(found)) == (0, 2, 1)


@pytest.mark.parametrize(("share", "wanted"), [(0.0, 0), (0.3, 2), (0.4, 3), (0.5, 4), (1.0, 7)])
def test_the_share_is_of_those_at_home_on_the_host(share: float, wanted: int) -> None:
    options = PlanOptions(chunk_numel=64, os_home="host", num_resident_states=3)
    layout = planned(chain(10), target(), options).plan.layout
    streamed = streamed_chunks(layout, analyse(chain(10)), share)
    assert len(streamed) == wanted
    assert all(layout.chunks[c].os_home is Tier.HOST for c in streamed)


def test_shares_of_large_models_are_exact_to_half_a_chunk() -> None:
    found = gpt_like(24, 256)
    layout = planned(found, target(), PlanOptions(os_home="host")).plan.layout
    count = len(state_order(layout, analyse(found)))
    for share in (0.1, 0.37, 0.5, 0.9):
        assert abs(len(streamed_chunks(layout, analyse(found), share)) - share * count) <= 0.5


@pytest.mark.parametrize("wrong", [{"num_resident_states": -1}, {"streamed_share": 1.01}, {"streamed_share": -0.1}])
def test_options_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must"):
        PlanOptions(**wrong)
