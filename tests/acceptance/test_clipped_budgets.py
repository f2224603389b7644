"""Cases 11 and 12 for runs that clip and scale: what errors name works, and plans state what norms take."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from clipping import clip, step
from pair import SMALL, Pair, Tower, batch

import chunkc
from chunkc.compiler.compiled_model import compiled_of
from chunkc.compiler.memory.decisions import norms_nbytes

HALF = {"dtype": torch.float16}


def made(hw: str, max_grad_norm: float | None, **options: Any) -> tuple[torch.nn.Module, chunkc.AdamW]:
    torch.manual_seed(0)
    model = chunkc.compile(Tower(), hw, **{**SMALL, **options})
    return model, chunkc.AdamW(model.parameters(), lr=1e-3, max_grad_norm=max_grad_norm)


def refusal(hw: str, max_grad_norm: float | None, **options: Any) -> chunkc.BudgetError:
    model, optimizer = made(hw, max_grad_norm, **options)
    with pytest.raises(chunkc.BudgetError) as caught:
        model(*batch(0))
    assert optimizer.param_groups
    return caught.value


def exactly(device_nbytes: int, host_nbytes: int) -> str:
    return f"emulated-{device_nbytes / 1024}k-{host_nbytes / 1024}k"


@pytest.mark.long
@pytest.mark.parametrize(
    ("max_grad_norm", "options"),
    [*(pytest.param(*case, marks=pytest.mark.slow) for case in ((0.5, {}), (None, HALF))), (0.5, HALF)],
)
def test_what_an_error_names_works(max_grad_norm: float | None, options: dict[str, Any]) -> None:
    error = refusal("emulated-16k-16m", max_grad_norm, **options)
    device_nbytes, host_nbytes = error.min_device_nbytes, error.min_host_nbytes
    model, optimizer = made(exactly(device_nbytes, host_nbytes), max_grad_norm, **options)
    for number in range(3):
        model(*batch(number)).backward()
        optimizer.step()
        optimizer.zero_grad()
    stats, device = chunkc.stats(model), compiled_of(model).runtime.device
    assert chunkc.plan_of(model).tracks_grad_norm
    assert stats["planned_peak_nbytes"] <= stats["budget_nbytes"] == device_nbytes
    assert stats["planned_peak_nbytes"] == device.device_budget_nbytes - device.free_device_nbytes()
    assert stats["host_nbytes"] == device.host_budget_nbytes - device.free_host_nbytes() <= host_nbytes
    assert stats["h2d_nbytes"] == stats["planned_h2d_nbytes"] > 0
    assert refusal(exactly(device_nbytes - 1, host_nbytes), max_grad_norm, **options).missing_nbytes == 1


def test_norms_are_part_of_the_least_budget() -> None:
    plain, clipped = (refusal("emulated-16k-16m", norm).min_device_nbytes for norm in (None, 0.5))
    model, _ = made("emulated-16m-16m", None)
    assert clipped - plain == norms_nbytes(compiled_of(model).runtime.infos)


@pytest.mark.long
def test_without_room_for_norms_a_run_clips_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    """Asked for after the plan was made for the least budget of a run that does not clip."""
    error = refusal("emulated-16k-16m", None)
    pair = Pair(exactly(error.min_device_nbytes, error.min_host_nbytes))
    with caplog.at_level(logging.WARNING, logger="chunkc"):
        for shape in ((4, 8), (4, 8), (8, 4), (8, 4)):
            for model in (pair.model, pair.plain):
                model(*(tokens.reshape(shape) for tokens in batch(0))).backward()
            clip(pair, 0.1)
            step(pair)
            plan = chunkc.plan_of(pair.model)
            assert not plan.tracks_grad_norm and plan.memory.device_peak_nbytes <= error.min_device_nbytes
    assert sum("max_grad_norm=" in message for message in caplog.messages) == 2, "once for each shape"
