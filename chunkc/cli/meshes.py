"""``chunkc plan --mesh auto``: the mesh with which a model trains fastest on a machine.

Candidates are what divides the machine: tensor parallelism (``tp``) within a node, and the other ranks as replicas of
nodes (``dp_replicate``) or not. All of them train on as many sequences in a step: the ranks of a line along ``tp``
compute one batch together, which is as many times larger. Each candidate is estimated by a short search, with all
layers kept and with all computed again. The fastest is tried with other shares of the layers, too, then those near to
what it comes to (`NEAR`). Those that are near to the fastest in the end are planned in full, and the fastest plan is
the answer. Sizes of ``tp`` are planned side by side, one on each core. All ranks of the machine take part, since its
rates are those of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from chunkc.cli.advice import missing
from chunkc.cli.workers import Ask, Effort, Outcome, Workers, workers
from chunkc.cost.rates import known_rates
from chunkc.distributed.mesh import DP_REPLICATE, DP_SHARD, TP
from chunkc.errors import ChunkcError, HardwareError, PlanError
from chunkc.hardware import Hardware
from chunkc.report.columns import table, wrapped
from chunkc.report.timeline import SHORT_MEANINGS, duration
from chunkc.report.units import size
from chunkc.scenarios.scenario import Answer, Estimate, Scenario, Scenarios

NEAR: Final = {Effort.SHARES: 0.02, Effort.PLAN: 0.01}
"""Share by which an estimated step may be longer than the shortest so far for more effort to be worth it."""
_PROGRESS: Final = {Effort.LOOK: "first look at mesh", Effort.SHARES: "second look at mesh", Effort.PLAN: "mesh"}
_HEADERS: Final = ("mesh", "batch", "step", "tokens/s", "device", "bound", "")


@dataclass(frozen=True, slots=True)
class Candidate:
    """One mesh: its scenario, and the answer, an estimate by a short search, or why there is neither."""

    scenario: Scenario
    answer: Answer | None = None
    estimate: Estimate | None = None
    refusal: str = ""

    @classmethod
    def of(cls, scenario: Scenario, outcome: Outcome) -> Candidate:
        """The candidate of an outcome; errors are raised that are none of this mesh alone."""
        match outcome:
            case PlanError() | HardwareError():
                raise outcome
            case ChunkcError():  # of its parallel plan, or of a model that is not captured so
                return cls(scenario, refusal=" ".join(str(outcome).split()))
            case Answer():
                if outcome.unpriced:
                    raise HardwareError(f"--mesh auto compares times: {outcome.unpriced}")
                return cls(scenario, outcome)
            case Estimate():
                return cls(scenario, estimate=outcome)

    @property
    def step_ms(self) -> float | None:
        """Simulated milliseconds of a step; None where there is no plan."""
        if self.estimate is not None:
            return self.estimate.best.step_ms
        return None if self.answer is None or self.answer.timeline is None else self.answer.timeline.step_ms

    @property
    def memory_nbytes(self) -> tuple[int, int] | None:
        """Bytes of device and host memory of a rank; None where there is no plan."""
        if self.estimate is not None:
            return self.estimate.best.device_nbytes, self.estimate.best.host_nbytes
        if self.answer is None or self.answer.plan is None:
            return None
        memory = self.answer.plan.memory
        return memory.device_peak_nbytes, memory.host_nbytes

    def to_json(self) -> dict[str, Any]:
        device_nbytes, host_nbytes = self.memory_nbytes or (None, None)
        return {
            "mesh": self.scenario.mesh,
            "batch": self.scenario.batch,
            "fits": self.memory_nbytes is not None,
            "step_ms": self.step_ms,
            "is_screened": self.estimate is not None,
            "device_peak_nbytes": device_nbytes,
            "host_nbytes": host_nbytes,
            "why_not": self.why_not,
        }

    @property
    def options(self) -> str:
        """The options of the command line that name this mesh alone."""
        return f"--mesh {self.scenario.mesh} --batch {self.scenario.batch}"

    @property
    def why_not(self) -> str:
        """Why there is no plan; empty where there is one."""
        if self.answer is None:
            return self.refusal
        return "" if self.answer.shortage is None else f"does not fit: {missing(self.answer.shortage)}"


def meshes(hw: Hardware) -> Iterator[tuple[str, int]]:
    """Texts of meshes of all devices, two or more, each with its ranks along ``tp``, the smallest first."""
    per_node = hw.gpus_per_node
    num_nodes = hw.num_gpus // per_node
    for num_tensor in (number for number in range(1, per_node + 1) if per_node % number == 0):
        for num_replicas in dict.fromkeys((1, num_nodes)):
            num_sharing = hw.num_gpus // num_tensor // num_replicas
            if num_replicas == 1 or num_sharing > 1:
                sizes = {DP_REPLICATE: num_replicas, DP_SHARD: num_sharing, TP: num_tensor}
                yield ",".join(f"{name}={number}" for name, number in sizes.items() if number > 1), num_tensor


def candidates(scenario: Scenario, scenarios: Scenarios, num_cores: int | None = None) -> list[Candidate]:
    """Plan ``scenario``, whose batch is that of one rank, with each of `meshes`.

    ``num_cores``: that plan at a time; default: all of this process.

    Raises:
        ChunkcError: when the model can be planned with none of them, rates of the machine are not known, or it has
            more devices than the job ranks, of which it has no rates.
    """
    hw = scenario.hw
    if hw.num_gpus != scenario.num_ranks:
        raise ChunkcError(
            f"--mesh auto compares times, which are known for all {hw.num_gpus} devices of {hw}, not for "
            f"{scenario.num_ranks} of them: leave --world-size away and name a machine of {scenario.num_ranks} devices"
        )
    if known_rates(hw) is None:
        raise ChunkcError(f"--mesh auto compares times, and rates of {hw} are not known: see chunkc calibrate")
    choices = [replace(scenario, mesh=mesh, batch=scenario.batch * num_tensor) for mesh, num_tensor in meshes(hw)]
    with workers(choices, scenarios, num_cores) as planners:
        found = [Candidate.of(*pair) for pair in zip(choices, _outcomes(planners, choices, Effort.LOOK), strict=True)]
        if all(candidate.refusal for candidate in found):
            raise ChunkcError(found[0].refusal)
        fastest = _near(found, 0.0)
        _try_more(planners, found, fastest, Effort.SHARES)
        others = [number for number in _near(found, NEAR[Effort.SHARES]) if number not in fastest]
        _try_more(planners, found, others, Effort.SHARES)
        near = _near(found, NEAR[Effort.PLAN])
        while near:
            _try_more(planners, found, near, Effort.PLAN)
            near = _next_estimate(found)
    if all(candidate.refusal for candidate in found):
        raise ChunkcError(found[0].refusal)
    return found


def _outcomes(planners: Workers, choices: Sequence[Scenario], effort: Effort) -> list[Outcome]:
    return planners.outcomes([Ask(choice, effort) for choice in choices], _PROGRESS[effort])


def _try_more(planners: Workers, found: list[Candidate], numbers: Sequence[int], effort: Effort) -> None:
    """Replace those of ``found`` at ``numbers`` by what more effort finds."""
    scenarios = [found[number].scenario for number in numbers]
    for number, outcome in zip(numbers, _outcomes(planners, scenarios, effort), strict=True):
        found[number] = Candidate.of(found[number].scenario, outcome)


def _near(found: Sequence[Candidate], share: float) -> list[int]:
    """The candidates whose steps are at most so much longer than the shortest."""
    bar_ms = min((c.step_ms for c in found if c.step_ms is not None), default=0.0) * (1 + share)
    return [number for number, c in enumerate(found) if c.step_ms is not None and c.step_ms <= bar_ms]


def _next_estimate(found: Sequence[Candidate]) -> list[int]:
    """The candidate to plan in full next: the fastest estimate, where none that was planned in full fits."""
    if any(candidate.step_ms is not None and candidate.estimate is None for candidate in found):
        return []
    estimated = [number for number, candidate in enumerate(found) if candidate.estimate is not None]
    return sorted(estimated, key=lambda number: found[number].step_ms or 0.0)[:1]


def best_of(found: Sequence[Candidate]) -> Candidate:
    """The fastest that was searched in full; where none fits, the one that misses least. It has an answer."""
    fitting = [candidate for candidate in found if candidate.step_ms is not None and candidate.estimate is None]
    if fitting:
        return min(fitting, key=lambda candidate: candidate.step_ms or 0.0)
    return min((c for c in found if c.answer is not None), key=_missing_nbytes)


def _missing_nbytes(candidate: Candidate) -> int:
    shortage = None if candidate.answer is None else candidate.answer.shortage
    return 0 if shortage is None else shortage.missing_nbytes


def render(found: Sequence[Candidate], best: Candidate) -> str:
    """A table of all candidates, why some have no plan, and the options that name the choice alone."""
    rows = table(_HEADERS, [_cells(candidate, candidate is best) for candidate in found], "lrrrrll")
    reasons = [wrapped(f"{c.scenario.mesh}: {c.why_not}", "  ") for c in found if c.why_not]
    if any(candidate.estimate is not None for candidate in found):
        reasons.append("~ by a short search: no longer one was worth it")
    kind = "the one that misses least" if best.step_ms is None else "the fastest"
    verdict = f"a step has as many sequences with each mesh; {kind}, below, is that of\n  {best.options}"
    return "\n\n".join(part for part in (rows, "\n".join(reasons), verdict) if part)


def _cells(candidate: Candidate, is_best: bool) -> tuple[str, ...]:
    name = (candidate.scenario.mesh, str(candidate.scenario.batch))
    if candidate.step_ms is None or candidate.memory_nbytes is None:
        return (*name, "", "", "", "no plan", "")
    num_tokens, bound, about = _facts(candidate)
    speed = f"{num_tokens / candidate.step_ms * 1e3:,.0f}" if num_tokens else ""
    row = (about + duration(candidate.step_ms), speed, size(candidate.memory_nbytes[0]), SHORT_MEANINGS[bound])
    return (*name, *row, "<" if is_best else "")


def _facts(candidate: Candidate) -> tuple[int, str, str]:
    """Tokens of a step, what bounds it, and a sign before times of a short search."""
    if candidate.estimate is not None:
        return candidate.estimate.num_tokens, candidate.estimate.best.bound, "~"
    timeline = None if candidate.answer is None else candidate.answer.timeline
    if timeline is None:
        raise ValueError(f"{candidate.options} has no step")
    return timeline.num_tokens, timeline.bound, ""
