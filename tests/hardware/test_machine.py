"""`Hardware`: detection, profiles, and what its fields must be."""

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from chunkc.distributed import job
from chunkc.errors import HardwareError
from chunkc.hardware import Hardware, present_gpu
from chunkc.hardware.catalogue import Tflops
from chunkc.hardware.nvml import NvmlGpu

MIB, GIB = 1024**2, 1024**3


@pytest.fixture
def without_job(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for variable in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("chunkc.hardware.machine.free_host_nbytes", lambda: 8 * GIB + 12345)
    return monkeypatch


def use_cuda(monkeypatch: pytest.MonkeyPatch, name: str, total_mib: int, capability: tuple[int, int]) -> None:
    device = SimpleNamespace(name=name, total_memory=total_mib * MIB, major=capability[0], minor=capability[1])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    monkeypatch.setattr("chunkc.hardware.local_gpu.nvml_gpu", lambda index: None)


def test_detect_without_cuda_splits_free_memory(without_job: pytest.MonkeyPatch) -> None:
    without_job.setattr(torch.cuda, "is_available", lambda: False)
    hw = Hardware.parse("auto")
    assert str(hw) == "emulated-5g-2g"
    assert hw.num_cpu_cores is not None
    assert dataclasses.replace(hw, num_cpu_cores=None) == Hardware.parse(str(hw))


def test_detect_divides_the_device_share_among_ranks(without_job: pytest.MonkeyPatch) -> None:
    without_job.setattr(torch.cuda, "is_available", lambda: False)
    without_job.setenv("WORLD_SIZE", "8")
    assert str(Hardware.detect()) == "8xemulated-640m-2g"
    without_job.setenv("LOCAL_WORLD_SIZE", "4")
    assert str(Hardware.detect()) == "2x4xemulated-1280m-2g"
    without_job.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(HardwareError, match="8 ranks do not fill nodes of 3"):
        Hardware.detect()


def test_detect_refuses_a_machine_without_free_memory(without_job: pytest.MonkeyPatch) -> None:
    without_job.setattr(torch.cuda, "is_available", lambda: False)
    without_job.setattr("chunkc.hardware.machine.free_host_nbytes", lambda: MIB)
    with pytest.raises(HardwareError, match="1048576 bytes of free memory are too few for 1 ranks"):
        Hardware.detect()


CUDA_DEVICES = [
    ("Tesla V100-SXM2-16GB", 16151, (7, 0), "v100"),
    ("Tesla V100-PCIE-32GB", 32501, (7, 0), "sm70"),
    ("Tesla T4", 15102, (7, 5), "t4"),
    ("NVIDIA GeForce RTX 2060", 5930, (7, 5), "rtx2060"),
    ("NVIDIA GeForce RTX 3090", 24125, (8, 6), "rtx3090"),
    ("NVIDIA GeForce RTX 4090", 24082, (8, 9), "rtx4090"),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", 16376, (8, 9), "sm89"),
    ("NVIDIA GeForce RTX 5090", 32607, (12, 0), "rtx5090"),
    ("NVIDIA A100-SXM4-40GB", 40339, (8, 0), "a100"),
    ("NVIDIA A100-PCIE-40GB", 40339, (8, 0), "a100pcie"),
    ("NVIDIA A100 80GB PCIe", 81051, (8, 0), "a100pcie"),
    ("NVIDIA L40S", 45589, (8, 9), "l40s"),
    ("NVIDIA H100 80GB HBM3", 81090, (9, 0), "h100"),
    ("NVIDIA H100 PCIe", 81001, (9, 0), "sm90"),
    ("NVIDIA H200", 143771, (9, 0), "h200"),
    ("NVIDIA B200", 182642, (10, 0), "b200"),
    ("NVIDIA GH200 480GB", 97280, (9, 0), "gh200"),
]


@pytest.mark.parametrize(("name", "total_mib", "capability", "gpu"), CUDA_DEVICES)
def test_detect_with_cuda(
    without_job: pytest.MonkeyPatch, name: str, total_mib: int, capability: tuple[int, int], gpu: str
) -> None:
    use_cuda(without_job, name, total_mib, capability)
    hw = Hardware.detect()
    assert (hw.gpu, hw.gpu_memory_nbytes, hw.host_memory_nbytes) == (gpu, total_mib * MIB, 8 * GIB)
    assert hw.compute_capability == capability
    assert dataclasses.replace(hw, num_cpu_cores=None) == Hardware.parse(str(hw))


def test_detect_by_nvml_makes_no_cuda_context(without_job: pytest.MonkeyPatch) -> None:
    use_cuda(without_job, "Tesla T4", 15102, (7, 5))

    def fail(*args: object) -> None:
        raise AssertionError("this initialises CUDA")

    found = NvmlGpu("NVIDIA H100 80GB HBM3", 81079 * MIB, (9, 0), 4, 8, 0, 0)
    without_job.setattr("chunkc.hardware.local_gpu.nvml_gpu", lambda index: found)
    without_job.setattr(torch.cuda, "is_initialized", lambda: False)
    without_job.setattr(torch.cuda, "current_device", fail)
    without_job.setattr(torch.cuda, "get_device_properties", fail)
    hw = Hardware.detect()
    assert (hw.gpu, hw.gpu_memory_nbytes, hw.compute_capability) == ("h100", 81079 * MIB, (9, 0))
    assert hw.pcie_gb_per_s == 8 * 31.5 / 16


def test_detect_refuses_a_local_rank_without_a_device(without_job: pytest.MonkeyPatch) -> None:
    use_cuda(without_job, "Tesla T4", 15102, (7, 5))
    without_job.setenv("LOCAL_RANK", "2")
    with pytest.raises(HardwareError, match="LOCAL_RANK=2, but 2 CUDA devices are visible"):
        Hardware.detect()


@pytest.mark.parametrize(
    ("num_visible", "current", "bound", "wanted"),
    [(4, 0, None, 2), (4, 3, None, 3), (4, 0, 1, 1), (1, 0, None, 0)],
    ids=["LOCAL_RANK", "set_device", "device_id of the job", "one GPU visible to each process"],
)
def test_the_gpu_of_a_rank(
    num_visible: int, current: int, bound: int | None, wanted: int, without_job: pytest.MonkeyPatch
) -> None:
    use_cuda(without_job, "Tesla T4", 15102, (7, 5))
    without_job.setattr(torch.cuda, "device_count", lambda: num_visible)
    without_job.setattr(torch.cuda, "current_device", lambda: current)
    without_job.setenv("LOCAL_RANK", "2")
    if bound is not None:
        without_job.setattr(torch.distributed, "is_initialized", lambda: True)
        group = SimpleNamespace(bound_device_id=torch.device("cuda", bound))
        without_job.setattr(torch.distributed, "group", SimpleNamespace(WORLD=group))
    gpu = present_gpu()
    assert gpu is not None and gpu.index == wanted


@pytest.mark.parametrize("has_joined", [False, True])
def test_a_rank_works_on_its_gpu(has_joined: bool, without_job: pytest.MonkeyPatch) -> None:
    use_cuda(without_job, "Tesla T4", 15102, (7, 5))
    chosen, joined = list[int](), list[str]()
    without_job.setattr(torch.cuda, "set_device", chosen.append)
    without_job.setattr("chunkc._torch_compat.distributed.is_in_job", lambda: has_joined)
    without_job.setattr("chunkc._torch_compat.distributed.join", joined.append)
    without_job.setenv("LOCAL_RANK", "1")
    job.join()
    assert (chosen, joined) == (([1], []) if has_joined else ([], [])), "a process by itself is left alone"
    without_job.setenv("WORLD_SIZE", "2")
    job.join()
    assert (chosen, joined) == (([1, 1], []) if has_joined else ([1], ["nccl"]))


@pytest.mark.gpu
def test_detect_this_gpu() -> None:
    hw = Hardware.detect()
    assert not hw.emulated
    assert hw.compute_capability == torch.cuda.get_device_capability()


@pytest.mark.parametrize("text", ["superpod", "gh200-480g", "emulated-64m-2g", "sm86-10g-32g"])
def test_profile_round_trip(tmp_path: Path, text: str) -> None:
    hw = dataclasses.replace(Hardware.parse(text), pcie_gb_per_s=12.25)
    path = tmp_path / "machine.json"
    hw.save(path)
    assert Hardware.load(path) == Hardware.of(path) == Hardware.of(str(path)) == hw


def test_hw_arguments() -> None:
    hw = Hardware.parse("v100-240g")
    assert Hardware.of(hw) is hw
    assert Hardware.of("v100-240g") == hw


# change to a saved profile -> piece of the message
PROFILE_FAULTS = [
    ({"format": "other"}, "no hardware profile"),
    ({"version": 1}, "its format version is 1, this chunkc reads 2"),
    ({"colour": "red"}, "fields missing or unknown: colour"),
    ({"num_nodes": 0}, "num_nodes must be a positive whole number, found 0"),
    ({"gpus_per_node": "8"}, "gpus_per_node: must be a whole number from 0 to 2**63 - 1, found '8'"),
    ({"gpu_memory_nbytes": None}, "gpu_memory_nbytes: must be a whole number from 0 to 2**63 - 1, found None"),
    ({"host_memory_nbytes": True}, "host_memory_nbytes: must be a whole number from 0 to 2**63 - 1, found True"),
    ({"host_memory_nbytes": 2**62}, f"host_memory_nbytes must be at most {2**60}, found {2**62}"),
    ({"num_nodes": 10**5, "gpus_per_node": 10**5}, f"{10**10} devices are more than {2**20}"),
    ({"num_cpu_cores": 10**9}, f"num_cpu_cores must be at most {2**20}"),
    ({"pcie_gb_per_s": 1e300}, "pcie_gb_per_s must be from 1e-09 to 1e+12, found 1e+300"),
    ({"pcie_gb_per_s": -1}, "pcie_gb_per_s must be a positive finite number, found -1"),
    ({"hbm_gb_per_s": float("nan")}, "hbm_gb_per_s: must be a finite number, found nan"),
    ({"name": ""}, "name must be a non-empty string"),
    ({"tflops": {"fp32": 0, "tf32": 0, "fp16": 0, "bf16": 0}}, "tflops: tflops.fp32 must be a positive"),
    ({"tflops": {"int4": 1.0}}, "tflops: fields missing or unknown: bf16, fp16, fp32, int4, tf32"),
    ({"compute_capability": 8}, "compute_capability: must be a list, found 8"),
    ({"compute_capability": ["8", "0"]}, "compute_capability[0]: must be a whole number"),
]


@pytest.mark.parametrize(("change", "piece"), PROFILE_FAULTS)
def test_faulty_profile(tmp_path: Path, change: dict[str, object], piece: str) -> None:
    path = tmp_path / "machine.json"
    Hardware.parse("v100-240g").save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(HardwareError, match=re.escape(piece)) as refusal:
        Hardware.load(path)
    assert "machine.json" in str(refusal.value)


@pytest.mark.parametrize(("text", "piece"), [(None, "No such file"), ("{", "Expecting"), ("[]", "no hardware profile")])
def test_unreadable_profile(tmp_path: Path, text: str | None, piece: str) -> None:
    path = tmp_path / "machine.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(HardwareError, match=piece):
        Hardware.of(str(path))


def test_hardware_is_a_value() -> None:
    hw = Hardware.parse("v100-240g")
    assert hash(hw) == hash(Hardware.parse("V100-32g-240g"))
    assert hw.tflops == Tflops(fp32=15.7, fp16=125.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        hw.num_nodes = 2  # type: ignore[misc]


def test_ranks_take_a_device_each() -> None:
    hw = Hardware.parse("8xv100-240g")
    assert (hw.num_ranks(), hw.num_ranks(2)) == (8, 2)
    for world_size in (16, 0):
        with pytest.raises(HardwareError, match=f"world_size={world_size}: .* has 8"):
            hw.num_ranks(world_size)


@pytest.mark.parametrize(
    ("text", "shard", "world_size", "expected"),
    [
        ("4x8xa100-40g-1024g", "all", None, (32, 1)),
        ("4x8xa100-40g-1024g", "node", None, (8, 4)),
        ("4x8xa100-40g-1024g", "node", 16, (8, 2)),
        ("4x8xa100-40g-1024g", "node", 4, (4, 1)),
        ("8xv100-240g", "node", None, (8, 1)),
        ("v100-240g", "node", None, (1, 1)),
    ],
)
def test_model_data_is_divided_over_all_ranks_or_those_of_a_node(
    text: str, shard: str, world_size: int | None, expected: tuple[int, int]
) -> None:
    assert Hardware.parse(text).sharding(shard, world_size) == expected


@pytest.mark.parametrize(
    ("text", "shard", "world_size", "piece"),
    [
        ("4x8xa100-40g-1024g", "rank", None, "shard='rank': give 'all' (over all ranks) or 'node'"),
        ("4x8xa100-40g-1024g", "node", 12, "and not 12 ranks on nodes of 8"),
        ("4x1xa100-40g-1024g", "node", None, "two or more, and not 4 ranks on nodes of 1"),
    ],
)
def test_nodes_that_cannot_divide_model_data_are_refused(
    text: str, shard: str, world_size: int | None, piece: str
) -> None:
    with pytest.raises(HardwareError, match=re.escape(piece)):
        Hardware.parse(text).sharding(shard, world_size)


def test_nodes_of_gpus_that_divide_model_data_are_those_of_the_job(without_job: pytest.MonkeyPatch) -> None:
    without_job.setenv("WORLD_SIZE", "8")
    without_job.setenv("LOCAL_WORLD_SIZE", "4")
    assert Hardware.parse("2x4xa100-40g-1024g").job_sharding("node") == (4, 2)
    assert Hardware.parse("4x2xemulated-1g-4g").job_sharding("node") == (2, 4)
    for text in ("8xa100-40g-1024g", "4x2xa100-40g-1024g"):
        assert Hardware.parse(text).job_sharding("all") == (8, 1)
        with pytest.raises(HardwareError, match="this job has 4 ranks on each of 2 nodes"):
            Hardware.parse(text).job_sharding("node")
