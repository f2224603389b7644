"""Pipelines of models given as data: a plan of every stage, and the step that they make together.

Each stage is a scenario of its own, whose plan is that of the ranks which train the stage. By their times the step is
simulated by 1F1B, one stage on each place along ``pp``, with what goes between stages. Where gradients are clipped,
updates wait for the last backward of all stages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from chunkc.cost.pipeline import PipelineTime, StageTimes, pipeline_order, simulate_pipeline
from chunkc.cost.rates import cost_rates
from chunkc.cost.spread import send_ms
from chunkc.scenarios.models import Stage
from chunkc.scenarios.scenario import Answer, Scenario, Scenarios

SCHEDULE = "1f1b"


@dataclass(frozen=True, slots=True)
class StageAnswer:
    """One stage with the outcome of its plan.

    ``times``: None where there is no plan, or no rates. ``buffers_nbytes``: kept of the device beside the plan.
    """

    stage: Stage
    answer: Answer
    times: StageTimes | None
    buffers_nbytes: int


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The outcome of all stages.

    Attributes:
        scenario: of the whole model.
        stages: the first stage first.
        time: of a step; None where a stage does not fit, and where rates are not known, as ``unpriced`` says.
        sent_ms: from the end of a stage's run to when the next stage has what it made.
        num_lines: ranks, or lines of ranks along ``tp``, that take batches of their own.
    """

    scenario: Scenario
    stages: tuple[StageAnswer, ...]
    time: PipelineTime | None
    unpriced: str
    sent_ms: float
    num_lines: int

    @property
    def fits(self) -> bool:
        return all(each.answer.fits for each in self.stages)

    @property
    def num_samples(self) -> int:
        """Sequences of a step, of all ranks."""
        return self.scenario.batch * self.scenario.accumulate * self.num_lines

    @property
    def samples_per_s(self) -> float | None:
        """Of all ranks together; None without a time."""
        return None if self.time is None else self.num_samples / self.time.step_ms * 1e3

    @property
    def tokens_per_s(self) -> float | None:
        """Of all ranks together; None without a time."""
        return None if self.samples_per_s is None else self.samples_per_s * self.scenario.sequence

    @property
    def model_tflops(self) -> float | None:
        """1e12 operations of the model per second, the mean of all ranks; None without a time."""
        timelines = [each.answer.timeline for each in self.stages if each.answer.timeline is not None]
        if self.time is None:
            return None
        return sum(timeline.flops.model for timeline in timelines) / len(self.stages) / self.time.step_ms * 1e-9


def pipelined(scenario: Scenario, num_stages: int, scenarios: Scenarios) -> Pipeline:
    """Plan every stage of ``scenario``, whose mesh has ``num_stages`` along ``pp``, and simulate a step.

    Raises:
        ChunkcError: for a model that is not divided into so many stages, and as `Scenarios.answer`.
    """
    stages = [Stage.of(scenario.model, number, num_stages) for number in range(num_stages)]
    found = [_answered(replace(scenario, model=stage), stage, scenarios) for stage in stages]
    ranks = replace(scenario, model=stages[0]).ranks
    unpriced = next((each.answer.unpriced for each in found if each.answer.unpriced), "")
    times = [each.times for each in found if each.times is not None]
    num_lines = ranks.num_replicas * ranks.num_sharing
    if len(times) < num_stages:
        return Pipeline(scenario, tuple(found), None, unpriced, 0.0, num_lines)
    links = cost_rates(scenario.hw).links
    hidden_nbytes = stages[0].hidden_nbytes(scenario.batch, scenario.sequence, scenario.dtype, scenario.hw)
    sent_ms = 0.0 if links is None else send_ms(hidden_nbytes, num_stages, len(ranks.ranks), links)
    hops_ms = 0.0 if links is None else (num_stages - 1) * links.hop_us * 1e-3
    order = pipeline_order(SCHEDULE, num_stages, scenario.accumulate)
    time = simulate_pipeline(times, order, sent_ms, hops_ms if scenario.tracks_grad_norm else None)
    return Pipeline(scenario, tuple(found), time, unpriced, sent_ms, num_lines)


def _answered(scenario: Scenario, stage: Stage, scenarios: Scenarios) -> StageAnswer:
    answer = scenarios.answer(scenario)
    times = None if answer.timeline is None else StageTimes.of(answer.timeline)
    return StageAnswer(stage, answer, times, scenario.buffers_nbytes)
