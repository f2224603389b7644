"""The checks of block_update by Triton's interpreter; tests/gpu/test_kernels_gpu.py runs the same on a GPU."""

import pytest
from interpreted import checks_of, run_interpreted


@pytest.fixture(scope="module")
def faults() -> dict[str, str]:
    return run_interpreted("block_update_checks")


@pytest.mark.parametrize("name", checks_of("block_update_checks"))
def test_interpreted(name: str, faults: dict[str, str]) -> None:
    assert not faults[name], faults[name]
