"""Which device a model gets, and how two models share one."""

from __future__ import annotations

import gc
import logging

import pytest
import torch
from torch import nn

import chunkc
from chunkc.devices import device_for


def tower(width: int, depth: int = 4) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


def train_once(model: nn.Module, width: int) -> None:
    model(torch.ones(2, width)).sum().backward()


def test_each_text_makes_a_device_and_an_object_shares_one() -> None:
    hw = chunkc.Hardware.parse("emulated-4m-16m")
    assert device_for("emulated-4m-16m")[1] is not device_for("emulated-4m-16m")[1]
    first = device_for(hw)[1]
    assert device_for(hw)[1] is first
    assert device_for(chunkc.Hardware.parse("emulated-4m-16m"))[1] is not first


def test_the_second_model_gets_what_the_first_left() -> None:
    hw = chunkc.Hardware.parse("emulated-2m-16m")
    first = chunkc.compile(tower(128), hw, dtype=torch.float32, backend="eager")
    second = chunkc.compile(tower(128), hw, dtype=torch.float32, backend="eager")
    train_once(first, 128)
    train_once(second, 128)
    one, two = chunkc.plan_of(first).memory, chunkc.plan_of(second).memory
    assert one.device_budget_nbytes == 2 << 20
    assert two.device_budget_nbytes == one.device_budget_nbytes - one.device_peak_nbytes
    assert one.device_peak_nbytes + two.device_peak_nbytes <= 2 << 20


def test_a_deleted_model_gives_its_memory_back() -> None:
    hw = chunkc.Hardware.parse("emulated-2m-16m")
    device = device_for(hw)[1]
    model = chunkc.compile(tower(128), hw, dtype=torch.float32, backend="eager")
    train_once(model, 128)
    assert device.free_device_nbytes() < 2 << 20
    param = next(model.parameters())
    del model
    gc.collect()
    assert device.free_device_nbytes() == 2 << 20
    assert device.free_host_nbytes() == 16 << 20
    with pytest.raises(chunkc.ChunkcError, match="deleted"):
        param.sum()


def test_a_named_gpu_that_is_absent_is_emulated_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="chunkc"):
        device_for("rtx2060-8g-16g")
    assert [r.getMessage() for r in caplog.records if "rtx2060" in r.getMessage() and "emulated" in r.getMessage()]


def test_several_gpus_are_refused_with_the_way_to_plan_for_them() -> None:
    with pytest.raises(chunkc.HardwareError, match=r"8 GPUs.*chunkc.plan"):
        chunkc.compile(tower(8), "8xv100-240g")


def test_more_than_the_machine_has_is_refused_before_anything_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = chunkc.compile(tower(64), "emulated-1m-16m", dtype=torch.float32, backend="eager")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    monkeypatch.setattr("chunkc.devices.free_host_nbytes", lambda: 1000)
    with pytest.raises(chunkc.HardwareError, match="1000 bytes are free"):
        train_once(model, 64)
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    monkeypatch.undo()
    train_once(model, 64)
    assert next(model.parameters()).grad is not None
