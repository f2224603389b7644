"""Loss scales and factors of clipping times gradients in 16 bits: in float32, rounded once, on hosts and on GPUs."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from chunkc.runtime.update.loss_scale import LossScale, multiply, multiply_in_float32, times

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
WAYS: dict[str, Product] = {
    "times": times,
    "multiply": lambda value, factor: multiply(value.clone(), factor),
    "times on a GPU": lambda value, factor: multiply_in_float32(value, factor, None),
    "multiply on a GPU": lambda value, factor: (lambda v: multiply_in_float32(v, factor, v))(value.clone()),
}
FACTORS = (2.0**16, 2.0**-16, 0.3 * 2.0**-16, 1.0009765, 0.0, float("inf"), float("nan"))


def values(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    some = torch.randn(6, 40, generator=generator).to(dtype)
    return [some, some.t(), some[:, ::2], some[0, 0], some[:0], torch.zeros(3, dtype=dtype), some[:1].expand(4, 40)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_product_is_rounded_once(way: str, dtype: torch.dtype) -> None:
    for factor in map(torch.tensor, FACTORS):
        for value in values(dtype):
            found, wanted = WAYS[way](value, factor), (value.float() * factor).to(dtype)
            assert found.dtype is dtype and found.shape == value.shape
            torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def test_what_is_multiplied_in_place_is_the_tensor_itself() -> None:
    for way in (multiply, lambda value, factor: multiply_in_float32(value, factor, value)):
        for value in (torch.ones(3, 2, dtype=torch.float16).t(), torch.ones((), dtype=torch.float16)):
            address = value.data_ptr()
            assert way(value, torch.tensor(0.5)).data_ptr() == address
            assert bool((value == 0.5).all())


def test_zeros_stay_zeros_under_the_first_scale() -> None:
    """The tangent of an output that the loss does not use; were 2^16 rounded to fp16, it would be NaN."""
    assert torch.tensor(2.0**16).half().isinf()
    for way in WAYS.values():
        assert not way(torch.zeros(5, dtype=torch.float16), torch.tensor(2.0**16)).any()


def torch_states(overflows: list[bool], options: dict[str, float]) -> list[dict[str, float]]:
    param, scaler, found = nn.Parameter(torch.zeros(1)), torch.amp.GradScaler("cpu", **options), []
    optimizer = torch.optim.SGD([param])
    scaler.scale(torch.zeros(1))
    for overflow in overflows:
        param.grad = torch.tensor([float("inf") if overflow else 0.0])
        scaler.step(optimizer)
        scaler.update()
        found.append(scaler.state_dict())
    return found


@given(
    st.lists(st.booleans(), max_size=12),
    st.sampled_from([1.0, 3.0, 2.0**16, 1e38]),
    st.sampled_from([2.0, 1.3, 1e20]),
    st.sampled_from([0.5, 0.7]),
    st.integers(1, 4),
)
def test_growth_and_backoff_are_torchs(
    overflows: list[bool], init: float, growth: float, backoff: float, interval: int
) -> None:
    """Bit for bit; a scale that would become infinite stays."""
    options = {"init_scale": init, "growth_factor": growth, "backoff_factor": backoff, "growth_interval": interval}
    scale, found = LossScale(torch.device("cpu"), *options.values()), []
    for overflow in overflows:
        scale.update(torch.tensor(float(overflow)))
        found.append(scale.state_dict())
    assert found == torch_states(overflows, options)


def test_a_scale_that_many_overflows_have_lowered_has_a_finite_inverse() -> None:
    """Infinity times a gradient that has vanished is NaN, behind the check that would have left the step out."""
    scale, overflow = LossScale(torch.device("cpu")), torch.tensor(1.0)
    for _ in range(200):
        scale.update(overflow)
    assert float(scale.scale) == 2.0**-126 and float(scale.inverse()) == 2.0**126
    assert not multiply(torch.zeros(3), scale.inverse()).any()
