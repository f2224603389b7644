"""What a picture keeps of tens of thousands of bars: busy time, ends of wide ones, peaks of memory."""

import random

import numpy as np
import pytest
from costs import RATES, with_work
from plans import chain

from chunkc.cost import simulate_with
from chunkc.ir.actions import Stream
from chunkc.report.frame import Bar, Frame, Phase, Work, frame_of
from chunkc.report.lanes import Block, Lane, averaged, column_shares, lane_of, thinned, without_seams
from chunkc.report.memory_curve import Kind, memory_curve

NUM_COLUMNS = 100
PHASES = (Phase("forward", 0.0, 430.0), Phase("backward", 430.0, 1000.0))


def frame(bars: list[tuple[float, float, Work]]) -> Frame:
    made = tuple(Bar(f"f{i}", "run", Stream.COMPUTE, work, start, end) for i, (start, end, work) in enumerate(bars))
    return Frame(1000.0, True, made, PHASES, ())


def busy_by_work(lane: Lane) -> dict[Work, float]:
    found = dict.fromkeys(Work, 0.0)
    for block in lane.blocks:
        found[block.work] += block.width
    for work, shares in lane.shares.items():
        found[work] += float(shares.sum()) * 1000.0 / len(shares)
    return found


def random_bars(seed: int, count: int, longest: float) -> list[tuple[float, float, Work]]:
    draw = random.Random(seed)
    now, found = draw.uniform(0, 5), []
    for _ in range(count):
        end = now + draw.uniform(0, longest)
        found.append((now, end, draw.choice([Work.FORWARD, Work.BACKWARD, Work.OTHER])))
        now = end + draw.choice([0.0, draw.uniform(0, longest)])
    scale = 999.0 / now  # the last may pass the window's end in tests below, these do not
    return [(start * scale, end * scale, work) for start, end, work in found]


@pytest.mark.parametrize("count", [5, 50, 5000])
@pytest.mark.parametrize("seed", range(4))
def test_merging_keeps_busy_time(seed: int, count: int) -> None:
    bars = random_bars(seed, count, 1.0)
    drawn = busy_by_work(lane_of(frame(bars), Stream.COMPUTE, NUM_COLUMNS, 4.0))
    for work in Work:
        assert drawn[work] == pytest.approx(sum(end - start for start, end, w in bars if w is work), abs=0.5)


def test_many_narrow_bars_become_few_shapes() -> None:
    lane = lane_of(frame(random_bars(0, 5000, 1.0)), Stream.COMPUTE, NUM_COLUMNS, 4.0)
    assert lane.num_bars == 5000 and not lane.blocks and set(lane.shares) <= set(Work)
    total = sum(lane.shares.values())
    assert np.all(total >= 0) and np.all(total <= 1 + 1e-9)


def test_wide_bars_and_few_narrow_ones_keep_their_ends() -> None:
    bars = [(0.0, 400.0, Work.FORWARD), (405.0, 406.0, Work.OTHER), (500.0, 503.0, Work.BACKWARD)]
    lane = lane_of(frame(bars), Stream.COMPUTE, NUM_COLUMNS, 4.0)
    assert [(b.start, b.end, b.work) for b in lane.blocks] == bars and not lane.shares
    assert [b.bar.label for b in lane.blocks if b.bar is not None] == ["f0", "f1", "f2"]


def test_what_pixels_cannot_show_makes_no_line_between_blocks() -> None:
    widths = [(0.0, 40.0), (40.0, 40.2), (40.4, 90.0), (95.0, 120.0), (300.0, 300.2), (310.0, 330.0), (330.0, 331.0)]
    blocks = [Block(start, end, Work.FORWARD, None) for start, end in widths]
    shown = [(block.start, block.end) for block in without_seams(blocks, 1.0)]
    assert shown == [(0.0, 40.4), (40.4, 90.0), (95.0, 120.0), (300.0, 300.2), (310.0, 330.0), (330.0, 331.0)]
    assert without_seams([], 1.0) == []


def test_touching_narrow_bars_are_one_block_with_its_ends() -> None:
    bars = [(i * 2.0, i * 2.0 + 2.0, Work.UPDATE) for i in range(30, 200)]
    [block] = lane_of(frame(bars), Stream.COMPUTE, NUM_COLUMNS, 4.0).blocks
    assert (block.start, block.end, block.bar) == (60.0, 400.0, None)


def test_a_bar_that_passes_the_end_goes_on_at_the_beginning() -> None:
    lane = lane_of(frame([(900.0, 1050.0, Work.FORWARD)]), Stream.COMPUTE, NUM_COLUMNS, 4.0)
    assert [(b.start, b.end) for b in lane.blocks] == [(0.0, 50.0), (900.0, 1000.0)]
    assert lane.busy == 150.0


def test_column_shares_by_hand() -> None:
    found = column_shares([(30.0, 35.0), (5.0, 25.0), (36.0, 37.0)], 40.0, 4)
    assert found.tolist() == pytest.approx([0.5, 1.0, 0.5, 0.6])


def test_averages_stay_in_their_stretch_and_keep_its_sum() -> None:
    shares = np.array(random.Random(1).choices([0.0, 0.2, 1.0], k=200))
    found = averaged(shares, [0, 70, 71, 200])
    for first, end in ((0, 70), (70, 71), (71, 200)):
        assert found[first:end].sum() == pytest.approx(shares[first:end].sum())
    assert found.std() < shares.std() / 3 and found[70] == shares[70]
    assert averaged(np.full(90, 0.3), [0, 90]).tolist() == pytest.approx([0.3] * 90)


@pytest.mark.parametrize("num_cells", [10, 60])
def test_a_thinned_curve_keeps_the_peak_and_shows_true_moments(num_cells: int) -> None:
    plan = with_work(chain(300).build(), 1)
    timeline = simulate_with(plan, RATES)
    curve = memory_curve(plan, timeline)
    edges, nbytes = thinned(curve, frame_of(plan, timeline).phases, num_cells)
    assert len(edges) <= num_cells + 3 and edges[0] == 0.0 and edges[-1] == timeline.step_ms
    assert sum(nbytes.values()).max() == curve.peak_nbytes
    moments = set(zip(*(curve.nbytes[kind] for kind in curve.kinds()), strict=True))
    assert set(zip(*(nbytes[kind] for kind in curve.kinds()), strict=True)) <= moments


def test_a_short_curve_stays_as_it_is() -> None:
    plan = with_work(chain(3).build(), 1)
    curve = memory_curve(plan, None)
    edges, nbytes = thinned(curve, frame_of(plan, None).phases, 1000)
    assert tuple(edges) == curve.edges and tuple(nbytes[Kind.UNUSED]) == curve.nbytes[Kind.UNUSED]
