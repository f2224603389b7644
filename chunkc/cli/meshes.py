"""``chunkc plan --mesh auto``: the mesh with which a model trains fastest on a machine.

Candidates are what divides the machine: tensor parallelism (``tp``) within a node, and the other ranks as replicas of
nodes (``dp_replicate``) or not. All of them train on as many sequences in a step: the ranks of a line along ``tp``
compute one batch together, which is as many times larger. Each candidate is planned and simulated in full, and the
fastest is the answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Final

from chunkc.cli.advice import missing
from chunkc.distributed.mesh import DP_REPLICATE, DP_SHARD, TP
from chunkc.errors import ChunkcError
from chunkc.hardware import Hardware
from chunkc.progress import within
from chunkc.report.columns import table, wrapped
from chunkc.report.timeline import SHORT_MEANINGS, duration
from chunkc.report.units import size
from chunkc.scenarios.scenario import Answer, Scenario, Scenarios

AUTO: Final = "auto"
_HEADERS: Final = ("mesh", "batch", "fits", "step", "tokens/s", "device", "bound", "")


@dataclass(frozen=True, slots=True)
class Candidate:
    """One mesh: its scenario, and the answer to it, or why there is none."""

    scenario: Scenario
    answer: Answer | None = None
    refusal: str = ""

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
            "device_peak_nbytes": None if plan is None else plan.memory.device_peak_nbytes,
            "host_nbytes": None if plan is None else plan.memory.host_nbytes,
            "why_not": self.why_not,
        }

    @property
    def why_not(self) -> str:
        """Why there is no plan; empty where there is one."""
        if self.answer is None:
            return self.refusal
        return "" if self.answer.shortage is None else f"does not fit: {missing(self.answer.shortage)}"


def meshes(hw: Hardware, world_size: int | None) -> Iterator[tuple[str, int]]:
    """Texts of meshes of two ranks or more, each with its ranks along ``tp``, the smallest first.

    HardwareError where the machine has fewer devices than ``world_size``.
    """
    num_ranks, per_node = hw.num_ranks(world_size), hw.gpus_per_node
    longest = num_ranks if num_ranks <= per_node else gcd(num_ranks, per_node)
    num_nodes = 1 if num_ranks % per_node else num_ranks // per_node
    for num_tensor in (number for number in range(1, longest + 1) if longest % number == 0):
        for num_replicas in dict.fromkeys((1, num_nodes)):
            num_sharing = num_ranks // num_tensor // num_replicas
            if num_replicas == 1 or num_sharing > 1:
                sizes = {DP_REPLICATE: num_replicas, DP_SHARD: num_sharing, TP: num_tensor}
                yield ",".join(f"{name}={number}" for name, number in sizes.items() if number > 1), num_tensor


def candidates(scenario: Scenario, scenarios: Scenarios) -> list[Candidate]:
    """Plan ``scenario`` with each of `meshes`; its batch is that of one rank.

    Raises:
        ChunkcError: when the model can be planned with none of them, or rates of the machine are not known.
    """
    found = []
    choices = list(meshes(scenario.hw, scenario.world_size))
    for number, (mesh, num_tensor) in enumerate(choices, 1):
        with within(f"mesh {number}/{len(choices)}"):
            found.append(_candidate(replace(scenario, mesh=mesh, batch=scenario.batch * num_tensor), scenarios))
    unpriced = next((c.answer.unpriced for c in found if c.answer is not None and c.answer.unpriced), "")
    if unpriced:
        raise ChunkcError(f"--mesh auto takes the fastest mesh, and no times are known: {unpriced}")
    if all(candidate.answer is None for candidate in found):
        raise ChunkcError(found[0].refusal)
    return found


def _candidate(scenario: Scenario, scenarios: Scenarios) -> Candidate:
    try:
        return Candidate(scenario, scenarios.answer(scenario))
    except ChunkcError as error:
        return Candidate(scenario, refusal=" ".join(str(error).split()))


def best_of(found: Sequence[Candidate]) -> Candidate:
    """The fastest candidate; where none fits, the one that misses least."""
    fitting = [candidate for candidate in found if candidate.step_ms is not None]
    if fitting:
        return min(fitting, key=lambda candidate: candidate.step_ms or 0.0)
    return min((c for c in found if c.answer is not None), key=_missing_nbytes)


def _missing_nbytes(candidate: Candidate) -> int:
    shortage = None if candidate.answer is None else candidate.answer.shortage
    return 0 if shortage is None else shortage.missing_nbytes


def render(found: Sequence[Candidate], best: Candidate) -> str:
    """A table of all candidates, why some have no plan, and the options that repeat the choice."""
    rows = table(_HEADERS, [_cells(candidate, candidate is best) for candidate in found], "lrlrrrll")
    reasons = [wrapped(f"{c.scenario.mesh}: {c.why_not}", "  ") for c in found if c.why_not]
    chosen = f"--mesh {best.scenario.mesh} --batch {best.scenario.batch}"
    verdict = f"all take as many sequences a step; the fastest alone, by:\n  {chosen}"
    return "\n\n".join(part for part in (rows, "\n".join(reasons), verdict) if part)


def _cells(candidate: Candidate, is_best: bool) -> tuple[str, ...]:
    answer, scenario = candidate.answer, candidate.scenario
    name = (scenario.mesh, str(scenario.batch))
    if answer is None or answer.plan is None or answer.timeline is None:
        return (*name, "no", "", "", "", "", "")
    timeline, device_nbytes = answer.timeline, answer.plan.memory.device_peak_nbytes
    speed = "" if timeline.tokens_per_s is None else f"{timeline.tokens_per_s:,.0f}"
    speeds = (duration(timeline.step_ms), speed)
    return (*name, "yes", *speeds, size(device_nbytes), SHORT_MEANINGS[timeline.bound], "<" if is_best else "")
