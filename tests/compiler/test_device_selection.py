"""Which device a model gets, and how two models share one."""

import dataclasses
import gc
import logging
import sys

import pytest
import torch
from fake_cuda import FakeCuda
from thread_ranks import on_threads
from torch import nn

import chunkc
from chunkc.compiler.compiled_model import compiled_of
from chunkc.compiler.device_selection import at_hand, check_free_memory, device_for
from chunkc.cost.rates import known_rates
from chunkc.distributed.process_group import Ranks
from chunkc.hardware import PresentGpu
from chunkc.hardware.nvml import NvmlGpu
from chunkc.ir.actions import Stream
from chunkc.runtime.devices.cpu_affinity import HostCores, usable_cores
from chunkc.runtime.devices.cuda import CudaDevice
from chunkc.runtime.devices.emulated import EmulatedDevice


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


def test_auto_says_that_it_emulates(caplog: pytest.LogCaptureFixture) -> None:
    _, device = device_for("auto", find_gpu=lambda: None)
    assert isinstance(device, EmulatedDevice)
    assert caplog.messages == [
        f"hw='auto': there is no CUDA device here, so one is emulated in host memory: {device.name}"
    ]


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
        assert isinstance(device_for("rtx2060-8g-16g", find_gpu=lambda: None)[1], EmulatedDevice)
    assert [r.getMessage() for r in caplog.records if "rtx2060" in r.getMessage() and "emulated" in r.getMessage()]


def test_several_gpus_are_refused_with_the_way_to_plan_for_them() -> None:
    with pytest.raises(chunkc.HardwareError, match=r"8 devices, but this job has 1 rank.*torchrun.*chunkc.plan"):
        chunkc.compile(tower(8), "8xv100-240g")


def test_more_than_the_machine_has_is_refused_before_anything_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = chunkc.compile(tower(64), "emulated-1m-16m", dtype=torch.float32, backend="eager")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    monkeypatch.setattr("chunkc.compiler.device_selection.free_host_nbytes", lambda: 1000)
    with pytest.raises(chunkc.HardwareError, match="1000 bytes are free"):
        train_once(model, 64)
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    monkeypatch.undo()
    train_once(model, 64)
    assert next(model.parameters()).grad is not None


# --- a machine with a GPU ---------------------------------------------------------------------------------------------

GIB = 1 << 30
PHYSICAL = 140 * GIB + 12345  # an H200, sold with 141 GB, shows a little less
H200 = PresentGpu(0, "h200", PHYSICAL, (9, 0))


def on_h200(hw: chunkc.Hardware | str, free: int = 138 * GIB) -> CudaDevice:
    api = FakeCuda(free=free, total=PHYSICAL)
    device = device_for(hw, find_gpu=lambda: H200, make_api=lambda index: api)[1]
    assert isinstance(device, CudaDevice)
    return device


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_shared_gpu_is_said(caplog: pytest.LogCaptureFixture) -> None:
    shared = dataclasses.replace(H200, by_nvml=NvmlGpu("NVIDIA H200", PHYSICAL, (9, 0), 5, 16, 2, 3 * GIB))
    device_for("h200-512g", find_gpu=lambda: shared, make_api=lambda index: FakeCuda(free=100 * GIB, total=PHYSICAL))
    assert said(caplog) == ["GPU 0 is shared: 2 other processes hold 3.00 GiB of its memory and take part of its time"]


@pytest.mark.parametrize("hw", ["h200-512g", "sm90-100g-512g"])
def test_the_gpu_that_is_here_is_used_without_a_word(hw: str, caplog: pytest.LogCaptureFixture) -> None:
    device = on_h200(hw)
    named, context = chunkc.Hardware.parse(hw).gpu_memory_nbytes, PHYSICAL - 138 * GIB
    assert device.device_budget_nbytes == min(named - context, 138 * GIB - PHYSICAL // 64)
    assert device.host_budget_nbytes == 512 * GIB
    assert not said(caplog)


def test_another_gpu_caps_the_one_that_is_here_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    device = on_h200("v100-240g")
    assert device.device_budget_nbytes == 32 * GIB - (PHYSICAL - 138 * GIB)
    assert device.host_budget_nbytes == 240 * GIB
    assert len(said(caplog)) == 1
    assert "v100" in said(caplog)[0] and "h200" in said(caplog)[0]


def test_a_gpu_with_more_memory_than_the_one_here_is_refused() -> None:
    small = PresentGpu(0, "a100", 40 * GIB - 5, (8, 0))
    with pytest.raises(chunkc.HardwareError, match="the GPU here, a100, has"):
        device_for("a100-80g-512g", find_gpu=lambda: small, make_api=lambda index: FakeCuda())
    device = device_for("a100-40g-512g", find_gpu=lambda: small, make_api=lambda index: FakeCuda())[1]
    assert isinstance(device, CudaDevice), "sold with 40 GiB is named so, whatever the driver keeps of it"


def test_a_gpu_of_no_catalogue_is_as_large_as_it_says() -> None:
    strange = PresentGpu(0, "sm103", 20 * GIB, (10, 3))
    assert strange.nominal_nbytes == 20 * GIB
    with pytest.raises(chunkc.HardwareError, match="the GPU here"):
        device_for("a100-40g-512g", find_gpu=lambda: strange, make_api=lambda index: FakeCuda())


def test_what_is_called_emulated_is_emulated_beside_a_gpu(caplog: pytest.LogCaptureFixture) -> None:
    device = device_for("emulated-4m-16m", find_gpu=lambda: H200)[1]
    assert isinstance(device, EmulatedDevice) and not said(caplog)


def linked(generation: int, width: int) -> PresentGpu:
    return dataclasses.replace(H200, by_nvml=NvmlGpu("NVIDIA H200", PHYSICAL, (9, 0), generation, width, 0, 0))


def planned_by(
    text: str, gpu: PresentGpu, ranks: Ranks | None = None, cores: HostCores | None = None
) -> tuple[chunkc.Hardware, chunkc.Hardware]:
    make_api = lambda index: FakeCuda(free=138 * GIB, total=PHYSICAL)  # noqa: E731
    machine, device = device_for(chunkc.Hardware.parse(text), find_gpu=lambda: gpu, make_api=make_api)
    return machine, at_hand(machine, device, cores, Ranks() if ranks is None else ranks)


def test_a_named_gpu_that_is_here_is_planned_by_this_machines_cores_and_link(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="chunkc"):
        named, here = planned_by("h200-512g", linked(4, 8))
    assert here == dataclasses.replace(named, num_cpu_cores=len(usable_cores()), pcie_gb_per_s=15.75)
    assert "15.8 GB/s" in caplog.text and "5 us to launch a kernel" in caplog.text and "calibrate" in caplog.text
    rates, by_name = known_rates(here), known_rates(named)
    assert rates is not None and by_name is not None
    assert rates.copies[Stream.H2D].gb_per_s / by_name.copies[Stream.H2D].gb_per_s == pytest.approx(15.75 / 63.0)
    assert rates.cpu_update_gparam_per_s["float32"] < by_name.cpu_update_gparam_per_s["float32"]


@pytest.mark.parametrize("text", ["v100-240g", "sm90-100g-512g", "emulated-4m-16m"])
def test_another_machine_is_planned_by_its_name(text: str) -> None:
    """Rates of another GPU say nothing of this machine's, and those of any GPU of a kind are unknown."""
    named, here = planned_by(text, linked(4, 8))
    assert here is named


def test_a_link_that_the_driver_does_not_say_is_that_of_the_data_sheet() -> None:
    named, here = planned_by("h200-512g", H200)
    assert here == dataclasses.replace(named, num_cpu_cores=len(usable_cores()))


def test_a_model_is_planned_by_what_is_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    here = dataclasses.replace(chunkc.Hardware.parse("h200-512g"), num_cpu_cores=3)
    monkeypatch.setattr("chunkc.api.at_hand", lambda *_: here)
    model = chunkc.compile(tower(8), "emulated-2m-16m", dtype=torch.float32, backend="eager")
    assert compiled_of(model).settings.target.rates == known_rates(here)


def test_ranks_plan_by_the_least_of_their_cores_and_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chunkc.compiler.device_selection.Hardware.for_job", lambda machine: machine)
    gpus, cores = (linked(5, 16), linked(5, 4)), (HostCores((0, 1, 2), False), HostCores((3, 4, 5, 6), False))
    found = on_threads(2, lambda ranks: planned_by("2xh200-512g", gpus[ranks.rank], ranks, cores[ranks.rank])[1])
    assert found[0] == found[1]
    assert isinstance(found[0], chunkc.Hardware)
    assert (found[0].num_cpu_cores, found[0].pcie_gb_per_s) == (6, 4 * 63.0 / 16)


def test_devices_on_one_gpu_share_it_and_an_object_shares_its_device() -> None:
    hw = chunkc.Hardware.parse("h200-512g")
    first = on_h200(hw)
    assert on_h200(hw) is first
    second = on_h200("v100-240g", free=100 * GIB)
    first.reserve(120 * GIB)
    assert second.free_device_nbytes() == 138 * GIB - PHYSICAL // 64 - 120 * GIB < second.device_budget_nbytes
    del first, hw
    gc.collect()


def test_debug_settings_of_cuda_have_a_variable_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHUNKC_CUDA", "poison,delay=2,seed=3")
    monkeypatch.setenv("CHUNKC_EMULATED", "sync")
    settings = on_h200("v100-240g").settings
    assert (settings.poison, settings.max_delay_ms, settings.seed, settings.synchronous) == (True, 2.0, 3, False)
    monkeypatch.setenv("CHUNKC_CUDA", "venom")
    with pytest.raises(chunkc.ChunkcError, match=r"CHUNKC_CUDA takes .* not 'venom'"):
        on_h200("v100-240g")


def test_a_gpu_is_not_throttled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHUNKC_EMULATED", "throttle")
    assert not on_h200("v100-240g").settings.throttle
    monkeypatch.setenv("CHUNKC_CUDA", "throttle")
    with pytest.raises(chunkc.HardwareError, match="only an emulated device can be throttled"):
        on_h200("v100-240g")


def test_a_gpu_without_triton_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = PresentGpu(0, "v100", 32 * GIB, (7, 0))
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(chunkc.HardwareError, match=r"needs Triton, .* pip install 'chunkc\[triton\]'"):
        device_for("v100-240g", find_gpu=lambda: gpu)
    assert isinstance(device_for("emulated-1m-16m", find_gpu=lambda: gpu)[1], EmulatedDevice)


def test_host_memory_is_checked_without_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    model = chunkc.compile(tower(64), "emulated-1m-16m", dtype=torch.float32, backend="eager")
    train_once(model, 64)
    plan = chunkc.plan_of(model)
    needed = plan.memory.device_peak_nbytes + plan.memory.host_nbytes
    monkeypatch.setattr("chunkc.compiler.device_selection.free_host_nbytes", lambda: needed - 1)
    check_free_memory(plan, 0, is_host=False)
    with pytest.raises(chunkc.HardwareError, match="both of which are host memory"):
        check_free_memory(plan, 0)
    monkeypatch.setattr("chunkc.compiler.device_selection.free_host_nbytes", lambda: -1)
    with pytest.raises(chunkc.HardwareError, match=rf"takes {plan.memory.host_nbytes} bytes of host memory"):
        check_free_memory(plan, 0, is_host=False)


# --- inputs and buffers -----------------------------------------------------------------------------------------------


def test_inputs_on_another_device_are_named() -> None:
    model = chunkc.compile(tower(8), "emulated-1m-16m", dtype=torch.float32, backend="eager")
    with pytest.raises(chunkc.ChunkcError, match=r"runs on cpu, but was called with argument 0 on meta: move"):
        model(torch.ones(2, 8, device="meta"))
    train_once(model, 8)
