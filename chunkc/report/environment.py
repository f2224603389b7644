"""The environment for a bug report: versions, processor, memory with its limit, GPUs, variables."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
from collections.abc import Iterator, Mapping

import psutil
import torch

from chunkc.hardware.host_memory import HOST_MEMORY, cgroup_headrooms, free_host_nbytes, stated_host_nbytes
from chunkc.hardware.nvml import NvmlGpu, nvml_gpu

_VARIABLES = ("OMP_WAIT_POLICY", "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF")
_GIB = 1024**3


def environment(environ: Mapping[str, str] = os.environ) -> list[tuple[str, str]]:
    """Names and values, in the order to show them; ``environ`` is another environment in tests."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return [
        ("chunkc", _version("chunkc")),
        ("torch", torch.__version__),
        ("triton", _triton()),
        ("python", platform.python_version()),
        ("platform", platform.platform()),
        ("cores", f"{cores} for this process, {os.cpu_count()} in the machine; torch uses {torch.get_num_threads()}"),
        ("host memory", _memory()),
        *_gpus(),
        *_variables(environ),
    ]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed as a package"


def _triton() -> str:
    try:
        return str(importlib.import_module("triton").__version__)
    except ImportError as error:
        return f"not importable ({error})"


def _memory() -> str:
    machine = psutil.virtual_memory()
    text = f"{machine.total / _GIB:.2f} GiB in the machine, {free_host_nbytes() / _GIB:.2f} GiB free for this process"
    stated_nbytes = stated_host_nbytes()
    if stated_nbytes is not None:
        text = f"{text}, {stated_nbytes / _GIB:.2f} GiB by {HOST_MEMORY}"
    headroom = min(cgroup_headrooms(), default=machine.total)
    if headroom >= machine.total:  # cgroup v1 writes "no limit" as a limit beyond any machine
        return f"{text}, no cgroup limit"
    return f"{text}, the cgroup limit leaves {max(0, headroom) / _GIB:.2f} GiB"


def _gpus() -> Iterator[tuple[str, str]]:
    if not torch.cuda.is_available():
        yield "GPUs", "none that torch can use"
        return
    for index in range(torch.cuda.device_count()):
        known = nvml_gpu(index)
        if known is not None:
            yield f"GPU {index}", _shown(known)
            continue
        device = torch.cuda.get_device_properties(index)
        capability = f"sm_{device.major}{device.minor}"
        yield f"GPU {index}", f"{device.name}, {capability}, {device.total_memory / _GIB:.2f} GiB"


def _shown(gpu: NvmlGpu) -> str:
    link = f"PCIe generation {gpu.pcie_generation or '?'} x{gpu.pcie_width or '?'}"
    others = f"{gpu.num_other_processes} other processes with {gpu.others_nbytes / _GIB:.2f} GiB"
    capability = "sm_{}{}".format(*gpu.capability)
    return f"{gpu.name}, {capability}, {gpu.memory_nbytes / _GIB:.2f} GiB, {link}, {others}"


def _variables(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    ours = sorted(name for name in environ if name.startswith("CHUNKC_"))
    for name in (*ours, *_VARIABLES):
        yield name, environ.get(name, "not set")
    if not ours:
        yield "CHUNKC_*", "not set"
