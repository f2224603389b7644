"""Pipelines of stages: orders in which ranks compute micro-batches, what is in flight, the bubble.

The orders are those of ``torch.distributed.pipelining`` (Narayanan et al., SC 2021), here with two ranks and four
micro-batches; a backward takes twice as long as a forward, and dots are the bubble:

    1f1b     rank 0   F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3
             rank 1   .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .  .
    gpipe    rank 0   F0 F1 F2 F3 .  ...

A stage takes as long for a forward, a backward and its step as its own plan does without any other stage: its copies
hide beside its own computing only, and not in the bubble. So what is simulated is not too fast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Literal

from chunkc.cost.timeline import Timeline
from chunkc.errors import ChunkcError
from chunkc.ir.actions import Stream

Kind = Literal["F", "B"]


@dataclass(frozen=True, slots=True)
class StageRun:
    """A forward (``F``) or backward (``B``) of one micro-batch in one stage."""

    kind: Kind
    stage: int
    micro_batch: int


Order = tuple[tuple[StageRun, ...], ...]
"""What each rank computes, one after another."""


def pipeline_order(schedule: str, num_ranks: int, num_micro_batches: int, num_stages: int | None = None) -> Order:
    """The order in which every rank computes by ``schedule``.

    Args:
        schedule: ``gpipe``, ``1f1b`` or ``interleaved`` (1F1B with several stages on each rank).
        num_stages: a multiple of ``num_ranks``, stage ``s`` on rank ``s % num_ranks``; None: one for each rank.

    Raises:
        ChunkcError: for a schedule that is not one of these, or numbers that it cannot have.
    """
    num_stages = num_ranks if num_stages is None else num_stages
    if schedule not in _ORDERS:
        raise ChunkcError(
            f"schedule={schedule!r}: give one of {', '.join(_ORDERS)}; others split backward in two parts"
        )
    if min(num_ranks, num_micro_batches, num_stages) < 1 or num_stages % num_ranks:
        raise ChunkcError(f"{num_stages} stages, each with {num_micro_batches} micro-batches, on {num_ranks} ranks")
    if schedule != "interleaved" and num_stages != num_ranks:
        raise ChunkcError(f"schedule={schedule!r} has one stage on each of {num_ranks} ranks, not {num_stages} in all")
    return tuple(_ORDERS[schedule](rank, num_ranks, num_micro_batches, num_stages) for rank in range(num_ranks))


def most_in_flight(order: Order, stage: int) -> int:
    """Most micro-batches of ``stage`` between forward and backward: ``in_flight=`` of `chunkc.compile`."""
    own = next(runs for runs in order if any(run.stage == stage for run in runs))
    return max(accumulate(1 if run.kind == "F" else -1 for run in own if run.stage == stage))


def _gpipe(rank: int, num_ranks: int, num_micro_batches: int, num_stages: int) -> tuple[StageRun, ...]:
    return tuple(StageRun(kind, rank, m) for kind in _KINDS for m in range(num_micro_batches))


def _1f1b(rank: int, num_ranks: int, num_micro_batches: int, num_stages: int) -> tuple[StageRun, ...]:
    return _interleaved_runs(rank, num_ranks, num_micro_batches, 1, min(num_micro_batches, num_ranks - rank) - 1)


def _interleaved(rank: int, num_ranks: int, num_micro_batches: int, num_stages: int) -> tuple[StageRun, ...]:
    num_own, num_rounds = num_stages // num_ranks, max(1, num_micro_batches // num_ranks)
    if num_micro_batches % num_rounds:
        raise ChunkcError(f"interleaved 1F1B takes a multiple of {num_rounds} micro-batches, not {num_micro_batches}")
    in_round = num_micro_batches // num_rounds
    warm_up = (num_own - 1) * in_round + 2 * (num_ranks - 1 - rank)
    warm_up = min(warm_up, num_own * num_micro_batches)
    return _interleaved_runs(rank, num_ranks, num_micro_batches, num_own, warm_up)


def _interleaved_runs(
    rank: int, num_ranks: int, num_micro_batches: int, num_own: int, warm_up: int
) -> tuple[StageRun, ...]:
    """``warm_up`` forwards, then a forward and a backward by turns, then what backwards are left."""
    in_round = num_micro_batches // max(1, num_micro_batches // num_ranks) if num_own > 1 else 1
    total, done = num_own * num_micro_batches, dict[tuple[Kind, int], int]()

    def run(kind: Kind, number: int) -> StageRun:
        local = (number // in_round) % num_own
        stage = (local if kind == "F" else num_own - 1 - local) * num_ranks + rank
        micro_batch = done[kind, stage] = done.get((kind, stage), -1) + 1
        return StageRun(kind, stage, micro_batch)

    runs = [run("F", number) for number in range(warm_up)]
    for number in range(total):
        runs += [run("F", number + warm_up)] if number + warm_up < total else []
        runs.append(run("B", number))
    return tuple(runs)


_KINDS: Final[tuple[Kind, Kind]] = ("F", "B")
_ORDERS: Final[Mapping[str, Callable[[int, int, int, int], tuple[StageRun, ...]]]] = {
    "gpipe": _gpipe,
    "1f1b": _1f1b,
    "interleaved": _interleaved,
}


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Milliseconds of one forward, of one backward, and of the step behind the last."""

    forward_ms: float
    backward_ms: float
    step_ms: float

    @staticmethod
    def of(timeline: Timeline) -> StageTimes:
        """The times of a stage by the simulated iteration of its plan: each program's part of the period.

        A program's part begins when the compute stream has ended the one before it, and waits in it count.
        """
        ends: dict[str, list[float]] = {}
        for each in timeline.slices:
            if each.stream is Stream.COMPUTE:
                number = each.label.rpartition(":")[0] or "1"
                ends.setdefault(f"{_kind_of(each.program)} {number}", []).append(each.end_ms)
        last, parts = 0.0, dict[str, list[float]]()
        for name, end_ms in sorted(((name, max(of)) for name, of in ends.items()), key=lambda pair: pair[1]):
            parts.setdefault(name.split()[0], []).append(end_ms - last)
            last = end_ms
        forward_ms, backward_ms = (sum(parts.get(kind, ())) / len(parts.get(kind, "1")) for kind in _KINDS)
        num = len(parts.get("B", ()))
        return StageTimes(forward_ms, backward_ms, max(0.0, timeline.step_ms - num * (forward_ms + backward_ms)))


def _kind_of(program: str) -> str:
    return "F" if program.startswith("forward") else "S" if program == "step" else "B"


@dataclass(frozen=True, slots=True)
class PipelineTime:
    """One step of a pipeline; ``bubble_share``: of the time of all ranks, that with nothing to do."""

    step_ms: float
    bubble_share: float
    rank_busy_ms: tuple[float, ...]


def simulate_pipeline(
    stages: Sequence[StageTimes], order: Order, sent_ms: float = 0.0, norm_ms: float | None = None
) -> PipelineTime:
    """Simulate one step: a run starts when its rank is free and what it needs of other stages has come.

    Args:
        stages: times of each stage.
        order: of `pipeline_order`.
        sent_ms: from the end of a run to when the next stage's rank has what it made.
        norm_ms: where gradients are clipped, from the last backward of all stages to when each knows their norm, which
            its update waits for; None: they are not clipped.

    Raises:
        ChunkcError: where the order does not come to an end.
    """
    ended: dict[StageRun, float] = {}
    free_ms, busy_ms, position = [0.0] * len(order), [0.0] * len(order), [0] * len(order)
    left = sum(map(len, order))
    while left:
        before = left
        for rank, runs in enumerate(order):
            while position[rank] < len(runs):
                run = runs[position[rank]]
                ready_ms = _ready_ms(run, len(stages), len(order), ended, sent_ms)
                if ready_ms is None:
                    break
                times = stages[run.stage]
                took_ms = times.forward_ms if run.kind == "F" else times.backward_ms
                ended[run] = free_ms[rank] = max(free_ms[rank], ready_ms) + took_ms
                busy_ms[rank] += took_ms
                position[rank] += 1
                left -= 1
        if left == before:
            raise ChunkcError("the order of a pipeline waits for itself")
    if norm_ms is not None:
        free_ms = [max(free_ms) + norm_ms] * len(order)
    for rank in range(len(order)):
        own_ms = sum(times.step_ms for stage, times in enumerate(stages) if stage % len(order) == rank)
        free_ms[rank] += own_ms
        busy_ms[rank] += own_ms
    step_ms = max(free_ms)
    return PipelineTime(step_ms, 1 - sum(busy_ms) / (step_ms * len(order)) if step_ms else 0.0, tuple(busy_ms))


def _ready_ms(
    run: StageRun, num_stages: int, num_ranks: int, ended: Mapping[StageRun, float], sent_ms: float
) -> float | None:
    """When ``run`` has all that it needs; None while that is not known."""
    if run.kind == "F":
        needs = [StageRun("F", run.stage - 1, run.micro_batch)] if run.stage else []
    elif run.stage + 1 < num_stages:
        needs = [StageRun("B", run.stage + 1, run.micro_batch)]
    else:
        needs = [StageRun("F", run.stage, run.micro_batch)]
    if any(need not in ended for need in needs):
        return None
    return max((ended[n] + (sent_ms if (n.stage - run.stage) % num_ranks else 0.0) for n in needs), default=0.0)
