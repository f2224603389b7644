"""The checks of grad_norm by Triton's interpreter; tests/gpu/test_kernels_gpu.py runs the same on a GPU."""

from __future__ import annotations

import grad_norm_checks
import pytest
from interpreted import run_interpreted


@pytest.fixture(scope="module")
def faults() -> dict[str, str]:
    return run_interpreted("grad_norm_checks")


@pytest.mark.parametrize("name", grad_norm_checks.CHECKS)
def test_interpreted(name: str, faults: dict[str, str]) -> None:
    assert not faults[name], faults[name]
