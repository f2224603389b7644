"""The catalogue ``hardware.toml``: every GPU and machine is there, with a source and rates that can be true."""

import re
from pathlib import Path

import pytest
import torch

from chunkc.hardware import Hardware
from chunkc.hardware.catalogue import GpuRow, gpus, machines

GIB = 1024**3

GPU_MEMORY_GIB = {
    "v100": [16, 32],
    "t4": [16],
    "rtx2060": [6, 8, 12],
    "rtx3090": [24],
    "rtx4090": [24],
    "rtx5090": [32],
    "a100": [40, 80],
    "a100pcie": [40, 80],
    "l40s": [48],
    "h100": [80],
    "h200": [141],
    "b200": [180, 192],
    "gh200": [96, 144],
}
BEFORE_AMPERE = {"v100", "t4", "rtx2060"}


def test_the_catalogue_holds_every_named_gpu() -> None:
    assert {gpu: [nbytes // GIB for nbytes in row.variants] for gpu, row in gpus().items()} == GPU_MEMORY_GIB


def test_each_row_names_its_source() -> None:
    lines = (
        (Path(__file__).parents[2] / "chunkc" / "hardware" / "hardware.toml").read_text(encoding="utf-8").splitlines()
    )
    rows = [index for index, line in enumerate(lines) if line.startswith("[gpu.")]
    assert len(rows) == len(gpus())
    for index in rows:
        block = "\n".join(lines[lines.index("", max(0, index - 6), index) : index])
        assert re.search(r"# NVIDIA .*20\d\d", block, re.DOTALL), f"{lines[index]} has no dated source above it"


@pytest.mark.parametrize("row", gpus().values(), ids=lambda row: row.gpu)
def test_rates_are_plausible(row: GpuRow) -> None:
    hw = Hardware.parse(f"{row.gpu}-512g")
    assert hw.gpu_memory_nbytes == row.default_nbytes
    assert row.default_nbytes in row.variants
    assert list(row.variants) == sorted(set(row.variants))
    assert hw.tflops is not None and hw.hbm_gb_per_s is not None and hw.pcie_gb_per_s is not None
    assert 0 < hw.pcie_gb_per_s < hw.hbm_gb_per_s < 10_000
    assert 0 < hw.tflops.fp32 < hw.tflops.fp16 < 3000
    if row.gpu in BEFORE_AMPERE:
        assert (hw.tflops.tf32, hw.tflops.bf16) == (0.0, 0.0)
        assert hw.compute_dtype == torch.float16
    else:
        assert hw.tflops.fp32 <= hw.tflops.tf32 < hw.tflops.bf16 == hw.tflops.fp16
        assert hw.compute_dtype == torch.bfloat16
    assert hw.nvlink_gb_per_s is None or hw.pcie_gb_per_s < hw.nvlink_gb_per_s < hw.hbm_gb_per_s


def test_memory_bandwidth_is_that_of_the_smallest_variant_that_fits() -> None:
    rates = [Hardware.parse(f"a100-{size}-1024g").hbm_gb_per_s for size in ("20g", "40g", "41g")]
    assert rates == [1555.0, 1555.0, 2039.0]


def test_copies_to_the_host_go_over_the_faster_link() -> None:
    assert Hardware.parse("gh200-480g").host_link_gb_per_s == 450.0
    assert Hardware.parse("h100-480g").host_link_gb_per_s == 63.0


def test_an_emulated_machine_invents_no_rates() -> None:
    hw = Hardware.parse("emulated-64m-2g")
    assert hw.emulated
    assert (hw.hbm_gb_per_s, hw.tflops, hw.host_link_gb_per_s, hw.nvlink_gb_per_s) == (None, None, None, None)
    assert hw.compute_dtype == torch.bfloat16


@pytest.mark.parametrize(("gpu", "capability"), [("sm75", (7, 5)), ("sm86", (8, 6)), ("sm120", (12, 0))])
def test_an_unlisted_gpu_goes_by_its_compute_capability(gpu: str, capability: tuple[int, int]) -> None:
    hw = Hardware.parse(f"{gpu}-10g-32g")
    assert hw.compute_capability == capability
    assert hw.tflops is None and not hw.emulated
    assert hw.compute_dtype == (torch.bfloat16 if capability >= (8, 0) else torch.float16)


# alias -> GPU, GPUs, device GiB, host GiB, cores, whether the GPUs have NVLink
MACHINES = {
    "yard": ("v100", 8, 32, 240, 12, True),
    "yard-120": ("v100", 8, 32, 120, 12, True),
    "superpod": ("a100", 8, 40, 1024, 192, True),
    "hai-pcie": ("a100pcie", 8, 40, 512, 128, False),
    "pc-2060": ("rtx2060", 1, 8, 16, 8, False),
}


def test_every_machine_of_the_papers_has_its_alias() -> None:
    assert set(machines()) == set(MACHINES)


@pytest.mark.parametrize("alias", MACHINES)
def test_alias(alias: str) -> None:
    gpu, num_gpus, device_gib, host_gib, cores, nvlink = MACHINES[alias]
    hw = Hardware.parse(alias.upper())
    assert str(hw) == alias
    assert Hardware.parse(str(hw)) == hw
    assert (hw.gpu, hw.num_gpus, hw.num_nodes) == (gpu, num_gpus, 1)
    assert (hw.gpu_memory_nbytes, hw.host_memory_nbytes) == (device_gib * GIB, host_gib * GIB)
    assert hw.num_cpu_cores == cores
    assert (hw.nvlink_gb_per_s is not None) == nvlink
