"""Scenarios: the plan is that of `chunkc.plan`, recomputation is decided, captures are kept."""

from dataclasses import replace

import pytest
import torch
from tiny_transformers import TINY_GPT

import chunkc
from chunkc.hardware import Hardware
from chunkc.ir.verify import verify
from chunkc.scenarios.scenario import Answer, Recompute, Scenario, Scenarios

HW = Hardware.parse("v100-240g")
SCENARIO = Scenario(TINY_GPT, HW, batch=2, sequence=16)


@pytest.mark.long
def test_the_plan_is_that_of_chunkc_plan() -> None:
    """Though only four and five layers are captured, every action and every number is the same."""
    model = TINY_GPT.with_depth(6)
    answer = Scenarios().answer(replace(SCENARIO, model=model, recompute=Recompute.FULL, dtype=torch.float32))
    assert answer.plan is not None and answer.timeline is not None
    verify(answer.plan)
    assert "periodic" in [stage.name for stage in answer.plan.stages]
    inputs = model.inputs(2, 16)
    direct = chunkc.plan(model.build(), HW, example_inputs=inputs, dtype=torch.float32, activations="recompute")
    assert "periodic" not in [stage.name for stage in direct.stages]
    assert replace(answer.plan, model=direct.model).digest() == direct.digest()
    assert answer.timeline.num_tokens == 32
    assert answer.timeline.step_ms > 0


@pytest.mark.long
def test_in_fp16_a_scenario_is_planned_with_its_loss_scaling() -> None:
    """As ``chunkc.plan`` does; without it where it is asked for so, as the modelled systems have none."""
    scenario = replace(SCENARIO, recompute=Recompute.FULL)
    scenarios = Scenarios()
    scaled = scenarios.answer(scenario).plan
    inputs = TINY_GPT.inputs(2, 16)
    direct = chunkc.plan(TINY_GPT.build(), HW, example_inputs=inputs, activations="recompute")
    assert scaled is not None and scaled.tracks_grad_norm and direct.tracks_grad_norm
    assert scaled.programs == direct.programs and scaled.layout == direct.layout and scaled.memory == direct.memory
    without = scenarios.answer(replace(scenario, tracks_grad_norm=False)).plan
    assert without is not None and not without.tracks_grad_norm
    assert without.memory.nonmodel_nbytes < scaled.memory.nonmodel_nbytes


@pytest.mark.long
def test_a_scenario_that_clips_measures_gradients() -> None:
    scenario = replace(SCENARIO, recompute=Recompute.FULL, dtype=torch.float32)
    scenarios = Scenarios()
    found = [
        scenarios.answer(replace(scenario, tracks_grad_norm=tracks_grad_norm)).plan for tracks_grad_norm in (None, True)
    ]
    assert [plan is not None and plan.tracks_grad_norm for plan in found] == [False, True]


@pytest.mark.long
def test_layers_are_computed_again_only_where_memory_is_short() -> None:
    told: list[str] = []
    scenarios = Scenarios(told.append)
    long = replace(SCENARIO, batch=16)
    kept = scenarios.answer(replace(long, recompute=Recompute.NONE, hw=replace(HW, gpu_memory_nbytes=1)))
    again = scenarios.answer(replace(long, recompute=Recompute.FULL, hw=replace(HW, gpu_memory_nbytes=1)))
    assert kept.shortage is not None and again.shortage is not None
    least_kept, least_again = kept.shortage.min_device_nbytes, again.shortage.min_device_nbytes
    assert least_again < least_kept
    ample = scenarios.answer(long)
    assert ample.scenario is not None and ample.scenario.recompute is Recompute.NONE
    found = scenarios.answer(replace(long, hw=replace(HW, gpu_memory_nbytes=least_again)))
    assert found.plan is not None and found.scenario is not None
    assert found.scenario.keep < 1.0 or found.plan.moves
    assert found.plan.memory.device_peak_nbytes <= least_again
    assert not scenarios.answer(replace(long, hw=replace(HW, gpu_memory_nbytes=least_again - 1))).fits
    assert scenarios.is_captured(replace(long, recompute=Recompute.FULL))
    assert not scenarios.is_captured(replace(long, recompute=Recompute.FULL, batch=1))
    assert [line.rpartition(":")[2].split("(")[0].strip() for line in told].count("fits") == 2


@pytest.mark.long
def test_an_estimate_of_what_does_not_fit_is_the_answer() -> None:
    """Its error and its times, though it is not planned again."""
    small = replace(SCENARIO, batch=16, hw=replace(HW, gpu_memory_nbytes=1 << 20))
    for scenario in (small, small.keeping(0.0)):
        scenarios = Scenarios()
        estimate = scenarios.estimate(scenario)
        assert isinstance(estimate, Answer) and estimate.scenario is not None
        answer = scenarios.answer(estimate.scenario)
        assert estimate.shortage is not None and str(estimate.shortage) == str(answer.shortage)
        assert 0 < estimate.planning_s < estimate.elapsed_s


@pytest.mark.long
def test_plans_are_the_same_whatever_was_planned_before() -> None:
    """Packings are shared between plans of one model, which may differ in all that a packing depends on."""
    one = replace(SCENARIO, recompute=Recompute.FULL)
    several = replace(one, hw=Hardware.parse("4xv100-240g"))
    others = (
        one,
        replace(one, accumulate=2),
        replace(one, optimizer="sgd"),
        replace(one, optimizer="adamw8bit"),
        several,
        replace(several, rank=3),
        one,
    )
    shared = Scenarios()
    for scenario in others:
        refusal = shared.answer(replace(scenario, hw=replace(scenario.hw, gpu_memory_nbytes=1))).shortage
        assert refusal is not None
        tight = replace(scenario, hw=replace(scenario.hw, gpu_memory_nbytes=refusal.min_device_nbytes))
        found, alone = shared.answer(tight), Scenarios().answer(tight)
        assert found.plan is not None and alone.plan is not None
        assert found.plan.digest() == alone.plan.digest()


@pytest.mark.long
def test_a_machine_without_rates_has_a_plan_and_no_times() -> None:
    answer = Scenarios().answer(replace(SCENARIO, hw=Hardware.parse("emulated-64m-64m")))
    assert answer.fits and answer.timeline is None
    assert "calibrate" in answer.unpriced


@pytest.mark.parametrize("world_size", [None, 4])
def test_ranks_are_those_of_the_machine_or_as_given(world_size: int | None) -> None:
    scenario = replace(SCENARIO, hw=Hardware.parse("8xv100-240g"), world_size=world_size)
    assert scenario.num_ranks == (8 if world_size is None else 4)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_choice_is_as_fast_as_the_best_of_all_shares() -> None:
    """Of every number of layers, each planned in full, with moves; never slower than all kept or all computed again."""
    scenarios, deep = Scenarios(), replace(SCENARIO, model=TINY_GPT.with_depth(12), batch=16, tracks_grad_norm=False)
    ends = [scenarios.answer(replace(deep.keeping(k), hw=replace(HW, gpu_memory_nbytes=1))) for k in (0.0, 1.0)]
    least, most = (end.shortage.min_device_nbytes for end in ends if end.shortage is not None)
    scenario = replace(deep, hw=replace(HW, gpu_memory_nbytes=(least + most) // 2))
    chosen = scenarios.answer(scenario)
    found = [scenarios.answer(scenario.keeping(num_kept / 12)) for num_kept in (0, *range(2, 11), 12)]
    step_ms = [answer.timeline.step_ms for answer in found if answer.timeline is not None]
    assert chosen.timeline is not None and chosen.plan is not None
    assert chosen.timeline.step_ms <= 1.01 * min(step_ms)
    assert chosen.timeline.step_ms <= min(a.timeline.step_ms for a in (found[0], found[-1]) if a.timeline is not None)
    verify(chosen.plan)
