"""Advice: scenarios near the one that was asked for, each planned and simulated before it is named.

A model that fits is tried with the least device memory, with twice the batch as long as that pays, and with layers
computed again. One that does not fit is tried with the missing memory and, where that could be the device's, with
layers computed again and smaller batches. Nothing is begun that might not end in time; the user is told what is left
out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from chunkc.errors import BudgetError
from chunkc.hardware import Hardware
from chunkc.progress import within
from chunkc.report.timeline import duration
from chunkc.report.units import size
from chunkc.scenarios.scenario import Answer, Recompute, Scenario, Scenarios

TIME_LIMIT_S: Final = 26.0
"""Since the command began: with what a process needs to start and end, an answer comes within 30 seconds."""

_RESERVE: Final = 1.2  # what a try may take, as a multiple of the longest so far
_MAX_DOUBLINGS: Final = 3


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to change.

    Attributes:
        change, effect: what, and what it brings, in words.
        helps: whether it makes the model fit, or the step faster for each token; None where it was not tried.
        step_ms, tokens_per_s: with it; None where unknown.
        gain: tokens per second with it over those without; None where either is unknown.
        min_device_nbytes, min_host_nbytes: memory of one rank that it takes, where the change is memory.
    """

    change: str
    effect: str
    helps: bool | None
    step_ms: float | None = None
    tokens_per_s: float | None = None
    gain: float | None = None
    min_device_nbytes: int | None = None
    min_host_nbytes: int | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class Adviser:
    """Tries scenarios near ``answer``, which began at ``began_s`` of `time.perf_counter`."""

    scenarios: Scenarios
    answer: Answer
    began_s: float
    limit_s: float = TIME_LIMIT_S
    _whole_s: float = field(init=False)  # the longest answer so far, with its capture and without
    _planning_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._whole_s, self._planning_s = self.answer.elapsed_s, self.answer.planning_s

    def advice(self) -> tuple[Advice, ...]:
        """Advice on what was tried, in order of trying, and on what there was no time for."""
        scenario = self.answer.scenario
        if scenario is None:
            return tuple(_unpriced(self.answer))
        if self.answer.fits:
            return (*_unpriced(self.answer), *self._less_memory(scenario), *self._faster(scenario))
        return (*self._more_memory(scenario), *self._smaller(scenario))

    def _faster(self, scenario: Scenario) -> Iterator[Advice]:
        if self.answer.timeline is None:
            return
        best, batch = _tokens_per_s(self.answer), scenario.batch
        for _ in range(_MAX_DOUBLINGS):
            batch *= 2
            answer = self._try(replace(scenario, batch=batch))
            yield self._compared(f"batch {batch}", answer)
            if answer is None or _tokens_per_s(answer) <= best:
                break
            best = _tokens_per_s(answer)
        if scenario.recompute is Recompute.NONE:
            other = replace(scenario, recompute=Recompute.FULL, activations="recompute")
            yield self._compared("--activations recompute", self._try(other))

    def _less_memory(self, scenario: Scenario) -> Iterator[Advice]:
        """The least device memory, as the refusal of a device without any names it."""
        answer = self._try(replace(scenario, hw=replace(scenario.hw, gpu_memory_nbytes=1)))
        if answer is not None and answer.shortage is not None:
            device_nbytes, host_nbytes = answer.shortage.min_device_nbytes, answer.shortage.min_host_nbytes
            change = f"{size(device_nbytes)} of device memory"
            node_nbytes = host_nbytes * scenario.hw.gpus_per_node
            effect = f"fits, with {_host_memory(node_nbytes, scenario.hw)}: the least for this batch"
            yield Advice(change, effect, None, min_device_nbytes=device_nbytes, min_host_nbytes=host_nbytes)

    def _more_memory(self, scenario: Scenario) -> Iterator[Advice]:
        shortage = self.answer.shortage
        if shortage is None:
            return
        hw = scenario.hw
        device_nbytes = max(hw.gpu_memory_nbytes, shortage.min_device_nbytes)
        host_nbytes = max(hw.host_nbytes_per_rank, shortage.min_host_nbytes) * hw.gpus_per_node
        changes = []
        if device_nbytes > hw.gpu_memory_nbytes:
            changes.append(f"{size(device_nbytes)} of device memory")
        if host_nbytes > hw.host_memory_nbytes:
            changes.append(_host_memory(host_nbytes, hw))
        larger = replace(hw, gpu_memory_nbytes=device_nbytes, host_memory_nbytes=host_nbytes)
        advice = self._compared(" and ".join(changes), self._try(replace(scenario, hw=larger)))
        yield replace(advice, min_device_nbytes=shortage.min_device_nbytes, min_host_nbytes=shortage.min_host_nbytes)

    def _smaller(self, scenario: Scenario) -> Iterator[Advice]:
        shortage = self.answer.shortage
        if shortage is None:
            return
        if shortage.moment == "host" and shortage.missing_nbytes > scenario.hw.gpu_memory_nbytes:
            return  # smaller activations leave no more than that for optimizer states
        if scenario.recompute is Recompute.NONE:
            yield self._compared(
                "--activations recompute",
                self._try(replace(scenario, recompute=Recompute.FULL, activations="recompute")),
            )
        batch = scenario.batch
        while batch > 1:
            batch //= 2
            answer = self._try(replace(scenario, batch=batch))
            yield self._compared(f"batch {batch}", answer)
            if answer is None or answer.fits:
                return

    def _try(self, scenario: Scenario) -> Answer | None:
        """The answer, or None where there is no time for one."""
        expected_s = self._planning_s if self.scenarios.is_captured(scenario) else self._whole_s
        if time.perf_counter() - self.began_s + _RESERVE * expected_s > self.limit_s:
            return None
        with within("advice"):
            answer = self.scenarios.answer(scenario)
        self._whole_s = max(self._whole_s, answer.elapsed_s)
        self._planning_s = max(self._planning_s, answer.planning_s)
        return answer

    def _compared(self, change: str, answer: Answer | None) -> Advice:
        if answer is None:
            return Advice(change, "not tried: the time is over", None)
        if answer.shortage is not None:
            return Advice(change, f"does not fit: {missing(answer.shortage)}", False)
        if answer.timeline is None:
            return Advice(change, "fits", True)
        step_ms, tokens_per_s = answer.timeline.step_ms, answer.timeline.tokens_per_s
        before = _tokens_per_s(self.answer)
        gain = tokens_per_s / before if before and tokens_per_s else None
        effect = f"fits: step {duration(step_ms)}" + (f", {tokens_per_s:,.0f} tokens/s" if tokens_per_s else "")
        return Advice(
            change,
            effect + (f", {gain:.2f} times as many" if gain else ""),
            gain is None or gain > 1,
            step_ms,
            tokens_per_s,
            gain,
        )


def shortfall(shortage: BudgetError) -> str:
    """Size and kind of the memory that a rank misses: ``2.50 GiB of host memory``."""
    kind = "host" if shortage.moment == "host" else "device"
    return f"{size(shortage.missing_nbytes)} of {kind} memory"


def missing(shortage: BudgetError) -> str:
    return f"{shortfall(shortage)} missing"


def _unpriced(answer: Answer) -> Iterator[Advice]:
    if answer.unpriced:
        yield Advice("calibrate", f"no times: {answer.unpriced}", None)


def _tokens_per_s(answer: Answer) -> float:
    return (answer.timeline.tokens_per_s or 0.0) if answer.timeline is not None else 0.0


def _host_memory(node_nbytes: int, hw: Hardware) -> str:
    """Shared by the ranks of a node, where there are several."""
    return f"{size(node_nbytes)} of host memory" + (" a node" if hw.gpus_per_node > 1 else "")
