"""ACCEPTANCE 9: after warm-up nothing is compiled or allocated, nobody waits unasked, and the plan is what happens."""

from __future__ import annotations

import pytest
from machines import EMULATED
from small import Twins, twins_at
from steady import COUNTS, check_steady_steps

import chunkc
from chunkc.compiler.compiled_model import compiled_of


@pytest.mark.long(but="odd-True")
@pytest.mark.parametrize(
    ("name", "is_tight"),
    [("llama", True), ("llama", False), ("odd", True), pytest.param("resnet", True, marks=pytest.mark.slow)],
)
def test_a_steady_step_is_exactly_the_plan(name: str, is_tight: bool) -> None:
    """Order of actions and bytes moved equal the plan's in every step; all three counts stay zero."""
    check_steady_steps(EMULATED, name, is_tight=is_tight)


@pytest.mark.long
@pytest.mark.parametrize("is_tight", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_steady_step_of_three_micro_batches_is_exactly_the_plan(is_tight: bool) -> None:
    check_steady_steps(EMULATED, "odd", is_tight=is_tight, accumulate=3)


def test_stats_offer_what_they_promise() -> None:
    """All keys, before and after a step, and an error before there is a plan."""
    twins = twins_at("staged")
    with pytest.raises(chunkc.PlanNotReadyError, match="first training forward"):
        chunkc.stats(twins.model)
    twins.backward()
    twins.step()
    found = chunkc.stats(twins.model)
    moved = {f"{planned}{stream}_nbytes" for planned in ("", "planned_") for stream in ("h2d", "d2h", "comm")}
    memory = {"budget_nbytes", "planned_peak_nbytes", "measured_peak_nbytes", "host_nbytes", "model_data_nbytes"}
    saved = {"saved_nbytes", "moved_saved_nbytes"}
    assert set(found) == moved | memory | saved | {"num_foreign_steps"} | set(COUNTS)
    assert all(type(value) is int and value >= 0 for value in found.values())
    assert found["model_data_nbytes"] >= sum(p.numel() for p in twins.plain.parameters() if p.requires_grad) * 16
    assert found["budget_nbytes"] == 96 << 10


def warm() -> Twins:
    """Twins whose warm-up is over."""
    twins = twins_at("settled")
    assert [chunkc.stats(twins.model)[count] for count in COUNTS] == [0, 0, 0]
    return twins


def test_observations_are_asked_for() -> None:
    """Reading a parameter, a gradient, a state or a copy waits for updates, and does not count."""
    twins = warm()
    twins.backward()
    twins.model.second.weight.grad.sum()
    twins.step()
    twins.model.state_dict()
    twins.optimizer.state_dict()
    twins.model.second.weight.sum()
    assert chunkc.stats(twins.model)["num_unasked_syncs"] == 0


def test_the_counts_count() -> None:
    """Each of the three rises when its event happens: a wait, an allocation, a new shape."""
    twins = warm()
    device = compiled_of(twins.model).runtime.device
    device.synchronize()
    assert chunkc.stats(twins.model)["num_unasked_syncs"] == 1
    home = device.allocate_home(4096)
    assert chunkc.stats(twins.model)["num_slot_allocations"] == 1
    device.free_home(home)
    twins.x = twins.x[:2]
    twins.backward()
    twins.step()
    found = chunkc.stats(twins.model)
    assert found["num_compiles"] > 0
    assert found["num_slot_allocations"] == 1, "another shape shares arena and homes"
    twins.check_params()
