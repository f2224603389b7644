"""``chunkc plan --mesh auto``: the mesh with which a model trains fastest on a machine.

Candidates are what divides the machine: tensor parallelism (``tp``) within a node, and the other ranks as replicas of
nodes (``dp_replicate``) or not. All of them train on as many sequences in a step: the ranks of a line along ``tp``
compute one batch together, which is as many times larger. Each candidate is planned by a short search and simulated;
those that come near the fastest are searched in full, and the fastest of them is the answer. All ranks of the machine
take part, since its rates are those of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from chunkc.cli.advice import missing
from chunkc.cost.rates import known_rates
from chunkc.distributed.mesh import DP_REPLICATE, DP_SHARD, TP
from chunkc.errors import ChunkcError, HardwareError, PlanError
from chunkc.hardware import Hardware
from chunkc.passes.search import SCREENING_ACTIONS
from chunkc.progress import within
from chunkc.report.columns import table, wrapped
from chunkc.report.timeline import SHORT_MEANINGS, duration
from chunkc.report.units import size
from chunkc.scenarios.scenario import Answer, Scenario, Scenarios

AUTO: Final = "auto"
WORTH_SEARCHING: Final = 0.1
"""Share by which a step may be longer than the fastest, each of a short search, to be searched in full."""
_HEADERS: Final = ("mesh", "batch", "step", "tokens/s", "device", "bound", "")


@dataclass(frozen=True, slots=True)
class Candidate:
    """One mesh: its scenario, and the answer, or why there is none; ``is_screened``: of a short search."""

    scenario: Scenario
    answer: Answer | None = None
    refusal: str = ""
    is_screened: bool = False

    @property
    def step_ms(self) -> float | None:
        """Simulated milliseconds of a step; None where there is no plan."""
        return None if self.answer is None or self.answer.timeline is None else self.answer.timeline.step_ms

    def to_json(self) -> dict[str, Any]:
        plan = None if self.answer is None else self.answer.plan
        return {
            "mesh": self.scenario.mesh,
            "batch": self.scenario.batch,
            "fits": plan is not None,
            "step_ms": self.step_ms,
            "is_screened": self.is_screened,
            "device_peak_nbytes": None if plan is None else plan.memory.device_peak_nbytes,
            "host_nbytes": None if plan is None else plan.memory.host_nbytes,
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


def candidates(scenario: Scenario, scenarios: Scenarios) -> list[Candidate]:
    """Plan ``scenario`` with each of `meshes`; its batch is that of one rank.

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
    found = [_screened(choice, f"{n}/{len(choices)}", scenarios) for n, choice in enumerate(choices, 1)]
    if all(candidate.answer is None for candidate in found):
        raise ChunkcError(found[0].refusal)
    bar_ms = min((c.step_ms for c in found if c.step_ms is not None), default=0.0) * (1 + WORTH_SEARCHING)
    return [_searched(candidate, bar_ms, scenarios) for candidate in found]


def _screened(scenario: Scenario, number: str, scenarios: Scenarios) -> Candidate:
    """The candidate of a short search."""
    try:
        with within(f"mesh {number}"):
            answer = scenarios.answer(scenario, SCREENING_ACTIONS)
        if answer.unpriced:
            raise HardwareError(f"--mesh auto compares times: {answer.unpriced}")
        return Candidate(scenario, answer, is_screened=answer.fits)
    except (PlanError, HardwareError):
        raise
    except ChunkcError as error:  # of its parallel plan, or of a model that is not captured so
        return Candidate(scenario, refusal=" ".join(str(error).split()))


def _searched(candidate: Candidate, bar_ms: float, scenarios: Scenarios) -> Candidate:
    """``candidate`` with the answer of a full search, where its step is within the bar."""
    answer = candidate.answer
    if answer is None or answer.scenario is None or candidate.step_ms is None or candidate.step_ms > bar_ms:
        return candidate
    with within(f"mesh {candidate.scenario.mesh}"):
        full = scenarios.answer(answer.scenario)
    return replace(candidate, answer=full, is_screened=False)


def best_of(found: Sequence[Candidate]) -> Candidate:
    """The fastest that was searched in full; where none fits, the one that misses least. It has an answer."""
    fitting = [candidate for candidate in found if candidate.step_ms is not None and not candidate.is_screened]
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
    if any(candidate.is_screened for candidate in found):
        reasons.append("~ by a short search: no longer one was worth it")
    kind = "the one that misses least" if best.step_ms is None else "the fastest"
    verdict = f"a step has as many sequences with each mesh; {kind}, below, is that of\n  {best.options}"
    return "\n\n".join(part for part in (rows, "\n".join(reasons), verdict) if part)


def _cells(candidate: Candidate, is_best: bool) -> tuple[str, ...]:
    answer, scenario = candidate.answer, candidate.scenario
    name = (scenario.mesh, str(scenario.batch))
    if answer is None or answer.plan is None or answer.timeline is None:
        return (*name, "", "", "", "no plan", "")
    timeline, device_nbytes = answer.timeline, answer.plan.memory.device_peak_nbytes
    speed = "" if timeline.tokens_per_s is None else f"{timeline.tokens_per_s:,.0f}"
    about = "~" if candidate.is_screened else ""
    speeds = (about + duration(timeline.step_ms), speed)
    return (*name, *speeds, size(device_nbytes), SHORT_MEANINGS[timeline.bound], "<" if is_best else "")
