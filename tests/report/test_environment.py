"""What ``chunkc env`` tells about this machine, checked against other readings of it."""

import os
import platform
import re

import psutil
import pytest
import torch

from chunkc.hardware.nvml import NvmlGpu
from chunkc.report.environment import environment


def test_versions_and_processor() -> None:
    found = dict(environment({}))
    assert found["torch"] == torch.__version__
    assert found["python"] == platform.python_version()
    assert f"{os.cpu_count()} in the machine" in found["cores"]
    assert ("GPUs" in found) == (not torch.cuda.is_available())


def test_memory_is_the_machines_and_what_is_free_of_it() -> None:
    match = re.match(r"([\d.]+) GiB in the machine, ([\d.]+) GiB free", dict(environment({}))["host memory"])
    assert match is not None
    total_nbytes = psutil.virtual_memory().total
    assert abs(float(match[1]) - total_nbytes / 1024**3) < 0.01
    assert 0 <= float(match[2]) <= float(match[1])


def test_variables_that_matter_are_told() -> None:
    found = dict(
        environment({"CHUNKC_DEBUG": "2", "CHUNKC_EMULATED": "poison", "OMP_WAIT_POLICY": "passive", "HOME": "/"})
    )
    assert found["CHUNKC_DEBUG"] == "2"
    assert found["CHUNKC_EMULATED"] == "poison"
    assert found["OMP_WAIT_POLICY"] == "passive"
    assert found["OMP_NUM_THREADS"] == "not set"
    assert "HOME" not in found and "CHUNKC_*" not in found
    assert dict(environment({}))["CHUNKC_*"] == "not set"


def test_a_gpu_that_nvml_knows_is_shown_with_its_link_and_its_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    known = NvmlGpu("NVIDIA H200", 140 << 30, (9, 0), 5, 16, 2, 3 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr("chunkc.report.environment.nvml_gpu", lambda index: known)
    shown = "NVIDIA H200, sm_90, 140.00 GiB, PCIe generation 5 x16, 2 other processes with 3.00 GiB"
    assert dict(environment())["GPU 0"] == shown
