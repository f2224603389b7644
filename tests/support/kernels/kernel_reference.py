"""Adam in float64 from the kernel's own inputs, and how far float32 arithmetic may be from it.

The hyperparameters are the rows that the kernel reads, rounded to float32. Two bounds are asked of every list:

- *Two ulp* of the largest operand of its final addition (three by an interpreter whose fused multiply-add rounds
  twice), wherever the operands themselves are good to less: moments whose gradient is exact (no L2 term, a scale that
  is a power of two), parameters whose update is at most a quarter of the parameter. These are nearly all elements of a
  model in training.
- *Counted roundings* everywhere: each rounding of the kernel adds at most 2^-24 of the operands' magnitudes, which are
  taken without cancellation. The test data hold elements where the update is larger than the parameter, where only
  this bound can hold: an update carries the roundings of a square root, a quotient and both moments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

ROUNDING = 2.0**-24
NUM_ROUNDINGS = {"param32": 16, "exp_avg": 5, "exp_avg_sq": 8}


@dataclass(frozen=True, slots=True)
class Exact:
    """One list after the update, float64.

    Attributes:
        value: what exact arithmetic gives.
        largest: magnitude of the largest operand of the final addition.
        total: sum of the magnitudes of all operands, without cancellation.
        is_regular: where the bound of two ulp is asked.
    """

    value: Tensor
    largest: Tensor
    total: Tensor
    is_regular: Tensor


def exact_update(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, row: Tensor, scale: float
) -> dict[str, Exact]:
    """The definition, element by element, from float32 or 16-bit inputs; ``row`` as in `chunk_adam.ROW_COLUMNS`."""
    step_size, sqrt_correction, eps, decay, l2, beta1, one_minus_beta1, beta2, one_minus_beta2, is_first = row.double()
    param, grad, exp_avg, exp_avg_sq = (t.double() for t in (param, grad, exp_avg, exp_avg_sq))
    if is_first:
        exp_avg, exp_avg_sq = torch.zeros_like(param), torch.zeros_like(param)
    scaled, penalty = grad * scale, l2 * param
    exact_grad = torch.full_like(param, bool(l2 == 0) and math.frexp(scale)[0] == 0.5, dtype=torch.bool)
    size = scaled.abs() + penalty.abs()

    old, new = beta1 * exp_avg, one_minus_beta1 * (scaled + penalty)
    largest = torch.maximum(old.abs(), new.abs())
    moment = Exact(old + new, largest, old.abs() + one_minus_beta1 * size, exact_grad)
    old, new = beta2 * exp_avg_sq, one_minus_beta2 * (scaled + penalty) ** 2
    variance = Exact(old + new, torch.maximum(old, new), old + one_minus_beta2 * size**2, exact_grad)
    factor = step_size / (variance.value.sqrt() / sqrt_correction + eps)
    kept, update, update_size = decay * param, factor * moment.value, factor * moment.total
    master = Exact(
        kept - update,
        torch.maximum(kept.abs(), update.abs()),
        kept.abs() + update_size,
        update_size <= kept.abs() / 4,
    )
    return {"param32": master, "exp_avg": moment, "exp_avg_sq": variance}


def ulp(magnitude: Tensor) -> Tensor:
    """Distance between neighbouring float32 numbers at ``magnitude``, float64."""
    exponent = torch.frexp(magnitude)[1].clamp(min=-125)
    return torch.ldexp(torch.ones_like(magnitude), exponent - 24)


def assert_near(name: str, found: Tensor, exact: Exact, num_ulp: int) -> None:
    """Check both bounds for the list ``name``; ``num_ulp`` is what `num_ulp` gives for the device.

    Raises:
        AssertionError: naming the worst element.
    """
    error = (found.double() - exact.value).abs()
    limit = NUM_ROUNDINGS[name] * ROUNDING * exact.total + ulp(torch.zeros_like(error))
    limit = torch.where(exact.is_regular, torch.minimum(limit, num_ulp * ulp(exact.largest)), limit)
    excess = (error / limit).nan_to_num(nan=math.inf)
    if bool((excess > 1).any()):
        at = int(excess.argmax())
        raise AssertionError(
            f"{name}[{at}] is {found[at].item()!r}, exactly {exact.value[at].item()!r}: {error[at].item():.3g} off, "
            f"{limit[at].item():.3g} allowed; {int((excess > 1).sum())} of {error.numel()} elements differ"
        )


@triton.jit
def _square_less(out_ptr: tl.tensor, factor: tl.tensor, term: tl.tensor) -> None:
    tl.store(out_ptr, tl.fma(factor, factor, term))


def num_ulp(device: torch.device) -> int:
    """Ulp of the first bound on ``device``: 2 where a fused multiply-add rounds once, 3 where it rounds twice."""
    out, factor = torch.zeros(1, device=device), 1 + 2.0**-12
    _square_less[(1,)](out, factor, -(1 + 2.0**-11))
    return 2 if float(out) == 2.0**-24 else 3


def truncated_bfloat16(values: Tensor) -> Tensor:
    """float32 to bfloat16 towards zero: what Triton's interpreter does where hardware rounds to nearest."""
    return (values.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


def expected_cast(values: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``values`` in ``dtype`` as a kernel on ``device`` writes them: to nearest even, but for the interpreter."""
    if dtype is torch.bfloat16 and values.dtype is torch.float32 and device.type == "cpu":
        return truncated_bfloat16(values)
    return values.to(dtype)


def bits(values: Tensor) -> Tensor:
    """The bit patterns, so that NaN compare too."""
    return values.view({2: torch.int16, 4: torch.int32}[values.element_size()])
