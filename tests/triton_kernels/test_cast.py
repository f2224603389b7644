"""The checks of cast by Triton's interpreter; tests/gpu/test_kernels_gpu.py runs the same on a GPU."""

import pytest
from interpreted import checks_of, run_interpreted


@pytest.fixture(scope="module")
def faults() -> dict[str, str]:
    return run_interpreted("cast_checks")


@pytest.mark.parametrize("name", checks_of("cast_checks"))
def test_interpreted(name: str, faults: dict[str, str]) -> None:
    assert not faults[name], faults[name]
