"""What would help: which scenarios are tried, when trying ends, and what is said of them."""

import time
from dataclasses import dataclass, field, replace

import pytest
from plans_for_report import gpt_plan
from tiny_transformers import TINY_GPT

from chunkc.cli.advice import Advice, Adviser
from chunkc.errors import BudgetError
from chunkc.hardware import Hardware
from chunkc.report.timeline import Timeline, simulate
from chunkc.scenarios.scenario import Answer, Recompute, Scenario, Scenarios

GIB = 1024**3
HW = Hardware.parse("v100-240g")
SCENARIO = Scenario(TINY_GPT, HW, batch=4, sequence=16, recompute=Recompute.NONE)
BASE_TIMELINE = simulate(gpt_plan(), HW)


def timeline(tokens: int, step_ms: float) -> Timeline:
    return replace(BASE_TIMELINE, num_tokens=tokens, step_ms=step_ms)


def shortage(device_nbytes: int, host_nbytes: int, moment: str, missing_nbytes: int = 3 * GIB) -> BudgetError:
    found = {"moment": moment, "tensors": (), "missing_nbytes": missing_nbytes}
    return BudgetError("too small", min_device_nbytes=device_nbytes, min_host_nbytes=host_nbytes, **found)  # type: ignore


@dataclass
class Machine(Scenarios):
    """Answers by rule: bytes by batch (half with layers computed again), steps of 10 ms and 1 ms for each sequence."""

    device_nbytes_per_sample: int = GIB
    host_nbytes: int = 8 * GIB
    full_from: int = 1 << 30
    asked: list[Scenario] = field(default_factory=list)

    def answer(self, scenario: Scenario) -> Answer:
        self.asked.append(scenario)
        again = scenario.recompute is Recompute.FULL
        needed = scenario.batch * self.device_nbytes_per_sample // (2 if again else 1)
        if needed > scenario.hw.gpu_memory_nbytes:
            return Answer(scenario, shortage=shortage(needed, self.host_nbytes, "bwd.0"))
        if self.host_nbytes > scenario.hw.host_nbytes_per_rank:
            missing_nbytes = self.host_nbytes - scenario.hw.host_nbytes_per_rank
            return Answer(scenario, shortage=shortage(needed, self.host_nbytes, "host", missing_nbytes))
        per_sample = 40.0 if scenario.batch >= self.full_from else 1.0
        step_ms = 10 + (1.5 if again else 1.0) * scenario.batch * per_sample
        return Answer(scenario, gpt_plan(), timeline=timeline(16 * scenario.batch, step_ms))

    def is_captured(self, scenario: Scenario) -> bool:
        return False


def advise(machine: Machine, scenario: Scenario = SCENARIO, limit_s: float = 1e9) -> tuple[Advice, ...]:
    answer = machine.answer(scenario)
    machine.asked.clear()
    return Adviser(machine, answer, time.perf_counter(), limit_s).advice()


def test_larger_batches_are_tried_as_long_as_they_pay() -> None:
    least, *faster, again = advise(Machine())
    assert (least.change, least.min_device_nbytes, least.min_host_nbytes) == (
        "4.00 GiB of device memory", 4 * GIB, 8 * GIB,
    )  # fmt: skip
    assert [found.change for found in faster] == ["batch 8", "batch 16", "batch 32"]
    assert [found.gain for found in faster] == pytest.approx([(b / (10 + b)) / (4 / 14) for b in (8, 16, 32)])
    assert all(found.helps for found in faster)
    assert faster[2].effect == "fits: step 42.000 ms, 12,190 tokens/s, 2.67 times as many"
    assert (again.change, again.helps) == ("--activations recompute", False)


def test_a_larger_batch_that_is_slower_ends_it() -> None:
    changes = {found.change: found for found in advise(Machine(full_from=16))}
    assert changes["batch 8"].helps is True
    assert changes["batch 16"].helps is False
    assert "batch 32" not in changes


def test_a_larger_batch_that_does_not_fit_ends_it_and_is_said() -> None:
    changes = {found.change: found for found in advise(Machine(device_nbytes_per_sample=5 * GIB))}
    assert changes["batch 8"].effect == "does not fit: 3.00 GiB of device memory missing"
    assert changes["batch 8"].helps is False
    assert "batch 16" not in changes


def test_missing_host_memory_is_tried_and_batches_are_not() -> None:
    machine = Machine(host_nbytes=300 * GIB)
    (found,) = advise(machine)
    assert found.change == "300.00 GiB of host memory"
    assert found.helps is True and found.step_ms == 14.0
    assert [s.hw.host_nbytes_per_rank for s in machine.asked] == [300 * GIB]


def test_batches_are_tried_where_the_device_could_hold_what_the_host_does_not() -> None:
    """Smaller activations leave room on the device for optimizer states."""
    _, *others = advise(Machine(host_nbytes=250 * GIB))
    assert [found.change for found in others] == ["--activations recompute", "batch 2", "batch 1"]


def test_missing_host_memory_of_one_rank_is_that_of_its_node() -> None:
    machine = Machine(host_nbytes=80 * GIB)
    (found,) = advise(machine, replace(SCENARIO, hw=Hardware.parse("8xv100-240g")))
    assert found.change == "640.00 GiB of host memory a node"
    assert found.helps is True
    assert found.min_host_nbytes == 80 * GIB


def test_the_least_memory_names_the_host_memory_of_a_node() -> None:
    least, *_ = advise(Machine(host_nbytes=6 * GIB), replace(SCENARIO, hw=Hardware.parse("8xv100-240g")))
    assert least.change == "4.00 GiB of device memory"
    assert least.effect == "fits, with 48.00 GiB of host memory a node: the least for this batch"
    assert least.min_host_nbytes == 6 * GIB


def test_missing_device_memory_is_tried_with_recomputing_and_smaller_batches() -> None:
    machine = Machine(device_nbytes_per_sample=20 * GIB)
    memory, again, *smaller = advise(machine)
    assert (memory.change, memory.helps) == ("80.00 GiB of device memory", True)
    assert (again.change, again.helps) == ("--activations recompute", False)
    assert [(found.change, found.helps) for found in smaller] == [("batch 2", False), ("batch 1", True)]


def test_nothing_is_begun_that_might_not_end_in_time() -> None:
    machine = Machine()
    found = advise(machine, limit_s=0.0)
    assert machine.asked == []
    assert [(a.change, a.effect, a.helps) for a in found] == [
        ("batch 8", "not tried: the time is over", None),
        ("--activations recompute", "not tried: the time is over", None),
    ]


@pytest.mark.parametrize("fits", [True, False])
def test_a_model_from_a_function_is_not_planned_again(fits: bool) -> None:
    machine = Machine()
    answer = (
        Answer(None, gpt_plan(), unpriced="run calibrate") if fits else Answer(None, shortage=shortage(1, 1, "host"))
    )
    found = Adviser(machine, answer, time.perf_counter()).advice()
    assert machine.asked == []
    assert [a.change for a in found] == (["calibrate"] if fits else [])


def test_advice_is_plain_data() -> None:
    (found,) = advise(Machine(host_nbytes=300 * GIB))
    assert found.to_json() == {
        "change": "300.00 GiB of host memory",
        "effect": found.effect,
        "helps": True,
        "step_ms": 14.0,
        "tokens_per_s": pytest.approx(64 / 14e-3),
        "gain": None,
        "min_device_nbytes": 4 * GIB,
        "min_host_nbytes": 300 * GIB,
    }
