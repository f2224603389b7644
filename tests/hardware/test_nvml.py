"""What NVML says of a GPU, over a double of the library; which GPU CUDA means; and when there is no answer."""

import os
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from chunkc.hardware.nvml import nvml_gpu

GIB = 1024**3
NAMES = ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB")


class FakeNvml:
    NVMLError = pynvml.NVMLError
    nvmlMemory_v2 = pynvml.nvmlMemory_v2

    def __init__(self, *, names: tuple[str, ...] = NAMES, mig: bool = False, missing: tuple[str, ...] = ()) -> None:
        self.names, self.mig, self.missing = names, mig, missing
        self.num_open = 0

    def __getattribute__(self, name: str) -> Any:
        if name != "missing" and name in object.__getattribute__(self, "missing"):
            return self.refuse
        return object.__getattribute__(self, name)

    def refuse(self, *args: object, **options: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def nvmlInit(self) -> None:
        self.num_open += 1

    def nvmlShutdown(self) -> None:
        self.num_open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.names)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}a1b2"

    def nvmlDeviceGetName(self, handle: int) -> str:
        return self.names[handle]

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        return [int(self.mig), 0]

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: int) -> SimpleNamespace:
        assert version == pynvml.nvmlMemory_v2
        return SimpleNamespace(total=80 * GIB, reserved=GIB)

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return ((9, 0), (8, 0))[handle]

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        used = ((os.getpid(), GIB), (1, 2 * GIB), (2, None))
        return [SimpleNamespace(pid=pid, usedGpuMemory=nbytes) for pid, nbytes in used]

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:
        return 5

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: int) -> int:
        return 8


def test_what_is_known_of_a_gpu() -> None:
    nvml = FakeNvml(names=NAMES[:1])
    gpu = nvml_gpu(0, {}, nvml)
    assert gpu is not None and nvml.num_open == 0
    assert (gpu.name, gpu.memory_nbytes, gpu.capability) == (NAMES[0], 79 * GIB, (9, 0))
    assert gpu.pcie_gb_per_s == 31.5
    assert (gpu.num_other_processes, gpu.others_nbytes) == (2, 2 * GIB)


@pytest.mark.parametrize(
    ("environ", "index", "wanted"),
    [
        ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, 1, NAMES[1]),
        ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "1,0"}, 0, NAMES[1]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1a"}, 0, NAMES[1]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-"}, 0, None),
        ({"CUDA_VISIBLE_DEVICES": "MIG-1a"}, 0, None),
        ({"CUDA_VISIBLE_DEVICES": "0"}, 1, None),
        ({}, 0, None),
    ],
    ids=["order of buses", "visible by number", "by UUID", "by half a UUID", "a slice", "not visible", "order unknown"],
)
def test_which_gpu_cuda_means(environ: dict[str, str], index: int, wanted: str | None) -> None:
    gpu = nvml_gpu(index, environ, FakeNvml())
    assert (None if gpu is None else gpu.name) == wanted


def test_numbers_of_equal_gpus_are_taken_in_the_order_of_their_buses() -> None:
    gpu = nvml_gpu(1, {}, FakeNvml(names=NAMES[:1] * 2))
    assert gpu is not None and gpu.capability == (8, 0)


def test_a_divided_gpu_and_an_old_driver_give_no_answer() -> None:
    assert nvml_gpu(0, {}, FakeNvml(names=NAMES[:1], mig=True)) is None
    assert nvml_gpu(0, {}, FakeNvml(names=NAMES[:1], missing=("nvmlDeviceGetMemoryInfo",))) is None
    assert nvml_gpu(0, {}, FakeNvml(missing=("nvmlInit",))) is None


def test_what_a_gpu_does_not_say_is_unknown() -> None:
    nvml = FakeNvml(
        names=NAMES[:1],
        missing=("nvmlDeviceGetMigMode", "nvmlDeviceGetMaxPcieLinkGeneration", "nvmlDeviceGetComputeRunningProcesses"),
    )
    gpu = nvml_gpu(0, {}, nvml)
    assert gpu is not None and gpu.pcie_gb_per_s is None and gpu.num_other_processes == 0


def test_the_double_has_only_what_the_library_has() -> None:
    assert all(hasattr(pynvml, name) for name in vars(FakeNvml) if name.startswith("nvml"))


def test_an_older_module_of_that_name_tells_nothing() -> None:
    assert nvml_gpu(0, {}, SimpleNamespace(NVMLError=pynvml.NVMLError, nvmlInit=lambda: None)) is None
