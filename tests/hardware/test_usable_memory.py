"""What training may take of a machine's memory: the planner and a run that stands in for the machine say the same."""

import pytest
import torch
from fake_cuda import FakeCuda

import chunkc
from chunkc.compiler.device_selection import device_for
from chunkc.hardware import Hardware
from chunkc.hardware.assumptions import assumed
from chunkc.hardware.usable_memory import Budget, UsableMemory
from chunkc.runtime.devices.cuda import CudaDevice
from chunkc.runtime.devices.cuda_budget import MemoryLedger

MIB, GIB = 2**20, 2**30


def test_context_slack_and_the_system_are_off() -> None:
    memory = UsableMemory.of(Hardware.parse("8xv100-240g"))
    assert memory.device.nbytes == 32 * GIB - GIB // 2 - 512 * MIB
    assert memory.host.nbytes == 30 * GIB - GIB - 384 * MIB


def test_an_emulated_device_keeps_nothing_back() -> None:
    assert UsableMemory.of(Hardware.parse("emulated-1m-2m")) == UsableMemory(Budget(MIB), Budget(2 * MIB))


@pytest.mark.parametrize("gpu_gib", [4, 6, 8, 16, 80])
def test_a_plan_ahead_has_the_device_budget_of_a_run_on_such_a_gpu(gpu_gib: int) -> None:
    """Where CUDA's context is as large as assumed, and nothing else is on the GPU."""
    hw = Hardware.parse(f"sm86-{gpu_gib}g-64g")
    context_nbytes = assumed("sm86").cuda_context_mib * MIB
    api = FakeCuda(total=gpu_gib * GIB, free=gpu_gib * GIB - context_nbytes)
    run = CudaDevice(str(hw), api, MemoryLedger(api), hw.gpu_memory_nbytes, hw.host_nbytes_per_rank)
    ahead = UsableMemory.of(hw)
    assert run.device_budget_nbytes == ahead.device.nbytes == api.free - max(128 * MIB, gpu_gib * GIB // 64)
    assert run.overhead_nbytes == ahead.device.reserved_nbytes


def test_less_than_nothing_is_nothing() -> None:
    memory = UsableMemory.of(Hardware.parse("rtx2060-100m-1g"))
    assert (memory.device.nbytes, memory.host.nbytes) == (0, 0)


@pytest.mark.parametrize("hw", ["v100-240g", "sm86-10g-32g", "emulated-64m-64m"])
def test_a_plan_ahead_has_the_budgets_of_a_run(hw: str) -> None:
    model = torch.nn.Linear(8, 8)
    inputs = (torch.zeros(2, 8),)
    memory = chunkc.plan(model, hw, example_inputs=inputs).memory
    machine, device = device_for(hw, find_gpu=lambda: None)
    assert memory.device_budget_nbytes == device.device_budget_nbytes == UsableMemory.of(machine).device.nbytes
    assert memory.host_budget_nbytes == device.host_budget_nbytes == UsableMemory.of(machine).host.nbytes


def test_the_memory_that_a_refusal_names_is_enough() -> None:
    """Of a machine that keeps some of it back; a MiB less, and 4 GiB of the host are the system's."""
    model, inputs = torch.nn.Linear(1024, 4096, bias=False), (torch.zeros(2, 1024),)
    with pytest.raises(chunkc.BudgetError) as caught:
        chunkc.plan(model, "sm86-16m-1g", example_inputs=inputs)
    device, host = (-(-n // MIB) for n in (caught.value.min_device_nbytes, caught.value.min_host_nbytes))
    assert device > assumed("sm86").cuda_context_mib and host > 4 * 1024
    assert chunkc.plan(model, f"sm86-{device}m-{host}m", example_inputs=inputs)
    with pytest.raises(chunkc.BudgetError):
        chunkc.plan(model, f"sm86-{device - 1}m-{host}m", example_inputs=inputs)
