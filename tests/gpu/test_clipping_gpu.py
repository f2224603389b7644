"""Case 5 on a GPU: clipping by the global norm equals torch's, wherever updates run."""

import pytest
import torch
from clipping import NAME, PLACES, check_clipping, telling_norm
from machines import Machine
from plan_runner import GetRunner

from chunkc.runtime.update.loss_scale import multiply, times

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("place", PLACES)
def test_clipping_equals_torch(place: str, runner_of: GetRunner) -> None:
    check_clipping(runner_of(NAME), place, telling_norm())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_factors_are_not_rounded_to_16_bits(dtype: torch.dtype, machine: Machine) -> None:
    device = machine.torch_device
    value = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    for number in (2.0**16, 0.3 * 2.0**-16):
        factor = torch.tensor(number, device=device)
        wanted = (value.float() * factor).to(dtype)
        assert torch.equal(times(value, factor), wanted)
        assert torch.equal(multiply(value.clone(), factor), wanted)
    assert not times(torch.zeros(3, dtype=dtype, device=device), torch.tensor(2.0**16, device=device)).any()
