"""What one GPU gives: budgets under what is named and what is free, shared by devices, less what libraries take."""

import pytest
from fake_cuda import GIB, FakeCuda

from chunkc.errors import HardwareError
from chunkc.runtime.devices.cuda import CudaDevice
from chunkc.runtime.devices.cuda_budget import MemoryLedger

MIB = 2**20


def device_on(api: FakeCuda, named: int) -> CudaDevice:
    return CudaDevice("fake", api, MemoryLedger(api), named, 64 * MIB)


@pytest.mark.parametrize(
    ("named", "free", "allocated", "reserved", "wanted"),
    [
        # context = total 11 - free - reserved; slack = 1/64 of total
        (6 * GIB, 10 * GIB, 0, 0, 5 * GIB),
        (6 * GIB, 10 * GIB - 96 * MIB, 64 * MIB, 96 * MIB, 5 * GIB - 64 * MIB),
        (80 * GIB, 10 * GIB, 0, 0, 10 * GIB - 11 * GIB // 64),
        (80 * GIB, 6 * GIB, 2 * GIB, 4 * GIB, 8 * GIB - 11 * GIB // 64),
        (6 * GIB, 6 * GIB, 4 * GIB, 4 * GIB, GIB),
    ],
)
def test_the_budget_is_the_least_of_named_and_free(
    named: int, free: int, allocated: int, reserved: int, wanted: int
) -> None:
    """Less what this process has allocated before, be it workspaces of cuBLAS: it is on the GPU that is named, too."""
    api = FakeCuda(free=free)
    api.allocated["current"], api.reserved["current"] = allocated, reserved
    device = device_on(api, named)
    assert device.device_budget_nbytes == wanted
    assert device.overhead_nbytes == 11 * GIB - free - reserved + allocated
    assert device.free_device_nbytes() == wanted


def test_what_libraries_take_later_is_in_no_budget() -> None:
    api = FakeCuda()
    ledger = MemoryLedger(api)
    before = CudaDevice("named", api, ledger, 6 * GIB, MIB), CudaDevice("whole", api, ledger, 80 * GIB, MIB)
    budgets, capacity = [device.device_budget_nbytes for device in before], ledger.capacity_nbytes
    before[1].reserve(2 * GIB)
    api.free -= 3 * GIB + 600 * MIB  # of which torch's allocator has 3 GiB, for the arena
    api.reserved["current"] = 3 * GIB
    for device, budget in zip(before, budgets, strict=True):
        device.count_libraries()
        assert device.device_budget_nbytes == budget - 600 * MIB
        assert device.overhead_nbytes == GIB + 600 * MIB
    assert ledger.capacity_nbytes == capacity - 600 * MIB
    api.free -= 6 * GIB
    with pytest.raises(HardwareError, match="name more device memory"):
        before[0].count_libraries()


def test_less_than_the_context_is_refused() -> None:
    with pytest.raises(HardwareError, match=f"{GIB} bytes.*name more device memory"):
        device_on(FakeCuda(), named=GIB // 2)


def test_devices_of_one_gpu_share_what_it_has() -> None:
    api = FakeCuda()
    ledger = MemoryLedger(api)
    small = CudaDevice("small", api, ledger, 3 * GIB, MIB)
    large = CudaDevice("large", api, ledger, 11 * GIB, MIB)
    large.reserve(9 * GIB)
    assert small.free_device_nbytes() == ledger.capacity_nbytes - 9 * GIB < small.device_budget_nbytes
    with pytest.raises(HardwareError, match=f"{GIB} device bytes were asked for"):
        small.reserve(GIB)
    large.unreserve(9 * GIB)
    small.reserve(2 * GIB)
    with pytest.raises(HardwareError, match="cannot be given back"):
        large.unreserve(1)
