"""The checks of grad_norm by Triton's interpreter; tests/gpu/test_kernels_gpu.py runs the same on a GPU."""

import pytest
from interpreted import checks_of, run_interpreted


@pytest.fixture(scope="module")
def faults() -> dict[str, str]:
    return run_interpreted("grad_norm_checks")


@pytest.mark.parametrize("name", checks_of("grad_norm_checks"))
def test_interpreted(name: str, faults: dict[str, str]) -> None:
    assert not faults[name], faults[name]
