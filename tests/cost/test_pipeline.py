"""Orders of pipelines are torch's; times are worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from costs import RATES, with_work
from schedules import chain, planned, target
from torch.distributed.pipelining import schedules

import chunkc
from chunkc.cost import simulate_with
from chunkc.cost.pipeline import (
    StageRun,
    StageTimes,
    most_in_flight,
    pipeline_order,
    simulate_pipeline,
)
from chunkc.passes import PlanOptions

KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B"}
"""By torch's names."""
ONE = StageTimes(forward_ms=1.0, backward_ms=2.0, step_ms=0.0)


def text_of(runs: tuple[StageRun, ...]) -> str:
    return " ".join(f"{run.kind}{run.micro_batch}" for run in runs)


def test_orders_by_hand() -> None:
    first, second = pipeline_order("1f1b", 2, 4)
    assert text_of(first) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert text_of(second) == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert {text_of(runs) for runs in pipeline_order("gpipe", 3, 2)} == {"F0 F1 B0 B1"}


class OfRank(schedules.ScheduleInterleaved1F1B):
    """The schedule without stages, which asks for its order only."""

    def __init__(self, num_ranks: int, num_own: int, num_micro_batches: int) -> None:
        self.pp_group_size, self.n_local_stages, self._n_microbatches = num_ranks, num_own, num_micro_batches
        self.microbatches_per_round = num_micro_batches // max(1, num_micro_batches // num_ranks)


@pytest.mark.parametrize("numbers", [(2, 2, 4), (4, 2, 8), (4, 3, 4), (3, 2, 12), (2, 4, 2), (4, 2, 2)], ids=str)
def test_interleaved_orders_are_those_of_torch(numbers: tuple[int, int, int]) -> None:
    num_ranks, num_own, num_micro_batches = numbers
    torchs = OfRank(*numbers)
    order = pipeline_order("interleaved", num_ranks, num_micro_batches, num_ranks * num_own)
    for rank, runs in enumerate(order):
        wanted = [action for action in torchs._calculate_single_rank_operations(rank) if action is not None]
        assert [(r.kind, r.stage, r.micro_batch) for r in runs] == [
            (KINDS[a.computation_type.name], a.stage_index, a.microbatch_index) for a in wanted
        ]


@pytest.mark.parametrize(("num_ranks", "num"), [(1, 3), (2, 4), (4, 8), (4, 2)])
def test_as_many_are_in_flight_as_stages_follow(num_ranks: int, num: int) -> None:
    order = pipeline_order("1f1b", num_ranks, num)
    assert [most_in_flight(order, stage) for stage in range(num_ranks)] == [
        min(num, num_ranks - stage) for stage in range(num_ranks)
    ]
    assert {most_in_flight(pipeline_order("gpipe", num_ranks, num), stage) for stage in range(num_ranks)} == {num}


@pytest.mark.parametrize(("num_ranks", "num"), [(2, 4), (4, 8), (4, 32)])
def test_the_bubble_is_that_of_the_papers(num_ranks: int, num: int) -> None:
    """(p - 1) / (m + p - 1) of equal stages by both, and with v stages a rank a v-th of that beside the work."""
    for schedule in ("gpipe", "1f1b"):
        found = simulate_pipeline([ONE] * num_ranks, pipeline_order(schedule, num_ranks, num))
        assert found.step_ms == pytest.approx(3 * (num + num_ranks - 1))
        assert found.bubble_share == pytest.approx((num_ranks - 1) / (num + num_ranks - 1))
    half = StageTimes(0.5, 1.0, 0.0)
    found = simulate_pipeline([half] * 2 * num_ranks, pipeline_order("interleaved", num_ranks, num, 2 * num_ranks))
    assert found.step_ms == pytest.approx(3 * num + 3 * (num_ranks - 1) / 2)


def test_a_slow_stage_and_what_is_sent_by_hand() -> None:
    """Two micro-batches; F0 of stage 0 is there at 1.5 ms; stage 1 takes 2 and 4 ms for each, and 0.5 for a step."""
    stages = [ONE, StageTimes(2.0, 4.0, 0.5)]
    found = simulate_pipeline(stages, pipeline_order("1f1b", 2, 2), sent_ms=0.5)
    assert found.step_ms == pytest.approx(1 + 0.5 + 2 * 6 + 0.5 + 2)
    assert found.rank_busy_ms == (6.0, 12.5)


def test_clipped_stages_wait_for_the_last_backward_of_all() -> None:
    """The same as above, with a norm that is known 0.25 ms later; the first stage is the last to be done before."""
    stages = [ONE, StageTimes(2.0, 4.0, 0.5)]
    found = simulate_pipeline(stages, pipeline_order("1f1b", 2, 2), sent_ms=0.5, norm_ms=0.25)
    assert found.step_ms == pytest.approx(1 + 0.5 + 2 * 6 + 0.5 + 2 + 0.25 + 0.5)
    assert found.rank_busy_ms == (6.0, 12.5)


def test_times_of_a_stage_add_up_to_its_own_step() -> None:
    """Segments of 3 ms; gradients land in 3 ms, where they add up in 4.5; three updates of 1 ms."""
    options = PlanOptions(chunk_numel=64, os_home="device", accumulate=4)
    for in_flight in (1, 2, 4):
        plan = with_work(planned(chain(3), target(), replace(options, in_flight=in_flight)).plan, 3)
        times = StageTimes.of(simulate_with(plan, RATES))
        assert times.forward_ms == pytest.approx(3.0)
        assert times.backward_ms == pytest.approx(3.0 + (3 + 3 * 4.5) / 4)
        assert times.step_ms == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("zero-bubble", 2, 4), "give one of gpipe, 1f1b, interleaved; others split backward"),
        (("1f1b", 2, 4, 4), "has one stage on each of 2 ranks"),
        (("interleaved", 2, 4, 3), "3 stages, each with 4 micro-batches, on 2 ranks"),
        (("interleaved", 2, 5, 4), "takes a multiple of 2 micro-batches, not 5"),
    ],
)
def test_what_no_schedule_has_is_refused(arguments: tuple[str, int, int], problem: str) -> None:
    with pytest.raises(chunkc.ChunkcError, match=problem):
        pipeline_order(*arguments)
