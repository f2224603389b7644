"""The tests of the GPU, where there is none: that they start with what such a machine has, and that they are right.

They run in a process of their own on a stand-in (see ``tests/gpu/conftest.py``), and once without plugins of pytest,
whose options in ``pyproject.toml`` must then not stop them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WITHOUT_PLUGINS = ("-p", "no:timeout", "-p", "no:xdist", "-p", "no:cacheprovider")


def run(*arguments: str, timeout_s: float = 500.0) -> str:
    """What pytest says about the tests of the GPU; it must succeed."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_a_few_run_on_a_stand_in_without_plugins() -> None:
    """All files are collected; one comparison of bits and one race are run."""
    chosen = "test_a_slot_that_is_reused or (smallest and odd-dtype0 and not inductor)"
    said = run("tests/gpu", "--stand-in", "double", "-k", chosen, *WITHOUT_PLUGINS)
    assert "3 passed" in said, said


def test_without_a_gpu_they_are_skipped_with_a_reason() -> None:
    said = run("tests/gpu/test_races_gpu.py", "tests/acceptance/test_memory.py", *WITHOUT_PLUGINS)
    assert "passed" not in said and "gpu: no CUDA device is available" in said


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("stand_in", ["emulated", "double"])
def test_all_run_on_a_stand_in(stand_in: str) -> None:
    assert " failed" not in run("tests/gpu", "--stand-in", stand_in, timeout_s=7000.0)
