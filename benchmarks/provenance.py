"""Where a figure comes from: the command, the commit and the machine, as results tell them."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

_TOLD = ("OMP_WAIT_POLICY", "OMP_NUM_THREADS")
_PACKAGES = ("chunkc", "torch", "triton", "transformers", "numpy", "pytest", "torchao", "deepspeed")
_GPU_COLUMNS = "name,memory.total,memory.used,driver_version,clocks.max.sm,power.limit,pcie.link.gen.current"


def command() -> str:
    """The line that began this process, torchrun's too, with the variables that decide how fast it is."""
    began_by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    launcher = f"torchrun --nproc-per-node {os.environ['LOCAL_WORLD_SIZE']}" if began_by_torchrun else "python"
    return " ".join([*(f"{name}={os.environ[name]}" for name in _TOLD if name in os.environ), launcher, *sys.argv])


def commit() -> str:
    """The checkout's commit, and whether sources have changed since; "unknown" without git's data."""
    head = _output("git", "rev-parse", "HEAD")
    changes = " with changes" if _output("git", "status", "--porcelain", "chunkc", "passes", "triton_kernels") else ""
    return head + changes if head else "unknown"


def processor() -> str:
    """Its name; on Linux the kernel's."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def describe(told_commit: str | None = None) -> dict[str, Any]:
    """The facts that a reader needs to judge figures and to repeat them.

    Nothing here makes a CUDA context, which would count as memory in use.

    Args:
        told_commit: for a copy of the checkout that came without git's data.
    """
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command(),
        "commit": told_commit or commit(),
        "hardware": hardware(),
        "versions": versions(),
        "environment": {k: v for k, v in os.environ.items() if k.startswith(("OMP_", "PYTORCH_", "CUDA_", "CUBLAS_"))},
        "load_1_5_15_min": os.getloadavg(),
    }


def hardware() -> dict[str, Any]:
    """The host, and each GPU as nvidia-smi describes it; no GPU where there is no nvidia-smi."""
    import psutil

    gpus = _output("nvidia-smi", f"--query-gpu={_GPU_COLUMNS}", "--format=csv,noheader").splitlines()
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "host_nbytes": psutil.virtual_memory().total,
        "gpus": [dict(zip(_GPU_COLUMNS.split(","), map(str.strip, row.split(",")), strict=False)) for row in gpus],
    }


def versions() -> dict[str, str | None]:
    """Of Python and the packages that matter (torch's has its CUDA's); None where one is not installed."""
    return {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES}


def _version(package: str) -> str | None:
    try:
        return installed_version(package)
    except PackageNotFoundError:
        return None


def _output(*command: str) -> str:
    """The output of a command in the checkout; nothing where it is not there or fails."""
    folder = Path(__file__).parent.parent
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
