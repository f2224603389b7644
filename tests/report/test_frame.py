"""The window of one period: folding, phases, waits, and the order of actions where times are unknown."""

import pytest
from costs import RATES, with_work
from plans import SPECS, distributed, evicting, grad_chunk
from schedules import chain, planned, target

from chunkc.cost import simulate_with
from chunkc.ir.actions import Stream
from chunkc.passes import PlanOptions
from chunkc.report.frame import Phase, Work, frame_of, pieces

PLAN = with_work(evicting().build(), 3)
TIMELINE = simulate_with(PLAN, RATES)


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (2.0, 5.0, [(2.0, 5.0)]),
        (7.0, 12.0, [(7.0, 10.0), (0.0, 2.0)]),
        (-1.0, 2.0, [(9.0, 10.0), (0.0, 2.0)]),
        (13.0, 14.0, [(3.0, 4.0)]),
        (-1.0, 0.0, [(9.0, 10.0)]),
        (5.0, 28.0, [(5.0, 10.0), (0.0, 10.0), (0.0, 8.0)]),
        (4.0, 4.0, []),
    ],
)
def test_pieces(start: float, end: float, expected: list[tuple[float, float]]) -> None:
    assert list(pieces(start, end, 10.0)) == expected


@pytest.mark.parametrize("name", SPECS)
def test_every_action_is_a_bar_and_streams_keep_their_busy_time(name: str) -> None:
    plan = with_work(SPECS[name].build(), 3)
    timeline = simulate_with(plan, RATES)
    frame = frame_of(plan, timeline)
    labels = [label for _, label, _ in plan.labelled()]
    assert sorted(bar.label for bar in frame.bars) == sorted(labels)
    for stream in frame.streams:
        parts = [part for bar in frame.lane(stream) for part in frame.pieces(bar)]
        assert sum(end - start for start, end in parts) == pytest.approx(timeline.stream(stream).busy_ms)
        assert all(0.0 <= start < end <= frame.period for start, end in parts)


def test_the_window_begins_with_the_first_segment() -> None:
    frame = frame_of(PLAN, TIMELINE)
    assert frame.in_ms and frame.period == TIMELINE.step_ms
    bars = {bar.label: bar for bar in frame.bars}
    assert bars["f1"].start == 0.0 and bars["f1"].text == "run fwd.0 @compute"
    assert (bars["f0"].start, bars["f0"].end) == (28.0, 29.0)


def test_phases_and_waits() -> None:
    """The compute stream: 3 of 3 ms, 1 ms of waiting, backward with its stashes, and 4 ms for update and copies."""
    frame = frame_of(PLAN, TIMELINE)
    backward = sum(bar.duration for bar in frame.bars if bar.label[0] == "b" and bar.stream is Stream.COMPUTE)
    assert [phase.name for phase in frame.phases] == ["forward", "backward", "step"]
    assert frame.phases[0].end == frame.phases[1].start and frame.phases[1].end == frame.phases[2].start
    assert frame.phases[1].end - frame.phases[1].start == pytest.approx(backward)
    assert frame.phases[2].end == frame.period
    assert sum(end - start for start, end in frame.waits) == pytest.approx(sum(s.stall_ms for s in TIMELINE.stalls))
    assert frame.waits[-1] == (25.0, 29.0)


def test_every_micro_batch_has_its_phases() -> None:
    """Resident: six times 3 ms of segments, three gradients that land in 1 ms each or in 1.5 where they are added, and
    three updates of 1 ms."""
    found = planned(chain(3), target(), PlanOptions(chunk_numel=64, os_home="device", accumulate=3)).plan
    plan = with_work(found, 3)
    frame = frame_of(plan, simulate_with(plan, RATES))
    names = ["forward", "backward", "forward", "accumulate", "forward", "accumulate", "step"]
    assert [phase.name for phase in frame.phases] == names == [p.name for p in frame_of(plan, None).phases]
    widths = [phase.end - phase.start for phase in frame.phases]
    assert widths == pytest.approx([3, 6, 3, 7.5, 3, 7.5, 3])
    assert frame.phases[-1].end == frame.period


def test_without_times_actions_stand_in_order() -> None:
    frame = frame_of(PLAN, None)
    assert not frame.in_ms and frame.period == 22 and frame.waits == ()
    assert frame.phases == (Phase("forward", 0, 7), Phase("backward", 7, 19), Phase("step", 19, 22))
    assert [bar.label for bar in sorted(frame.bars, key=lambda bar: bar.start)][:8] == [
        *(f"f{i}" for i in range(7)),
        "b0",
    ]


def test_work_is_told_apart() -> None:
    works = {bar.label: bar.work for bar in frame_of(PLAN, None).bars}
    assert works["f1"] is Work.FORWARD and works["b0"] is Work.BACKWARD and works["b1"] is Work.OTHER
    assert works["f0"] is Work.PARAMETERS and works["b2"] is Work.GRADIENTS and works["s0"] is Work.UPDATE
    ranks = {bar.work for bar in frame_of(distributed().build(), None).bars}
    assert {Work.GATHER, Work.REDUCE} <= ranks
    apart = {bar.label: bar.work for bar in frame_of(grad_chunk().build(), None).bars}
    assert apart["b0"] is Work.GRADIENTS and apart["f0"] is Work.PARAMETERS
