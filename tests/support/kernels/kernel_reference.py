"""The rules in float64 from the kernel's own inputs, and how far float32 arithmetic may be from it.

The hyperparameters are the rows that the kernel reads, rounded to float32. Two bounds are asked of every list:

- *Two ulp* of the largest operand of its final addition (three by an interpreter whose fused multiply-add rounds
  twice), wherever the operands themselves are good to less: moments whose gradient is exact (no L2 term, a scale that
  is a power of two), parameters whose update is at most a quarter of the parameter. These are nearly all elements of a
  model in training.
- *Counted roundings* everywhere: each rounding of the kernel adds at most 2^-24 of the operands' magnitudes, which are
  taken without cancellation. The test data hold elements where the update is larger than the parameter, where only
  this bound can hold: an update carries the roundings of a square root, a quotient and both moments.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

ROUNDING = 2.0**-24
NUM_ROUNDINGS = {"param32": 16, "exp_avg": 5, "exp_avg_sq": 8, "momentum_buffer": 5}


@dataclass(frozen=True, slots=True)
class Exact:
    """One list after the update, float64; the bound of two ulp is asked where ``is_regular``.

    ``largest``: the largest operand of the final addition; ``total``: the sum of all, without cancellation.
    """

    value: Tensor
    largest: Tensor
    total: Tensor
    is_regular: Tensor


def exact_update(
    rule: str, param: Tensor, grad: Tensor, states: Sequence[Tensor], row: Tensor, scale: float
) -> dict[str, Exact]:
    """The definition, element by element, from float32 or 16-bit inputs; ``row`` as `chunk_update.ROW_COLUMNS` says."""
    *coefficients, is_first = row.double()
    param, grad, *states = (t.double() for t in (param, grad, *states))
    if is_first:
        states = [torch.zeros_like(param) for _ in states]
    is_power_of_two = math.frexp(scale)[0] == 0.5
    return DEFINITIONS[rule](param, grad * scale, states, coefficients, is_power_of_two)


def _moment(kept: Tensor, new: Tensor, new_size: Tensor, is_exact: Tensor) -> Exact:
    """The sum of what is kept of a state and of what is new; ``new_size`` is free of cancellation."""
    return Exact(kept + new, torch.maximum(kept.abs(), new.abs()), kept.abs() + new_size, is_exact)


def _master(kept: Tensor, update: Tensor, update_size: Tensor) -> Exact:
    return Exact(
        kept - update,
        torch.maximum(kept.abs(), update.abs()),
        kept.abs() + update_size,
        update_size <= kept.abs() / 4,
    )


def _adam(
    param: Tensor, scaled: Tensor, states: Sequence[Tensor], row: Sequence[Tensor], is_power_of_two: bool
) -> dict[str, Exact]:
    step_size, eps, decay, l2, beta1, one_minus_beta1, beta2, one_minus_beta2 = row
    penalty, is_exact = l2 * param, torch.full_like(param, bool(l2 == 0) and is_power_of_two, dtype=torch.bool)
    size = scaled.abs() + penalty.abs()
    moment = _moment(beta1 * states[0], one_minus_beta1 * (scaled + penalty), one_minus_beta1 * size, is_exact)
    new = one_minus_beta2 * (scaled + penalty) ** 2
    variance = _moment(beta2 * states[1], new, one_minus_beta2 * size**2, is_exact)
    factor = step_size / (variance.value.sqrt() + eps)
    master = _master(decay * param, factor * moment.value, factor * moment.total)
    return {"param32": master, "exp_avg": moment, "exp_avg_sq": variance}


def _sgd(
    param: Tensor, scaled: Tensor, states: Sequence[Tensor], row: Sequence[Tensor], is_power_of_two: bool
) -> dict[str, Exact]:
    lr, l2, *_ = row
    return {"param32": _master(param, lr * (scaled + l2 * param), lr * (scaled.abs() + l2 * param.abs()))}


def _sgd_momentum(
    param: Tensor, scaled: Tensor, states: Sequence[Tensor], row: Sequence[Tensor], is_power_of_two: bool
) -> dict[str, Exact]:
    lr, l2, momentum, share, has_momentum, nesterov, *_ = row
    if not has_momentum:
        kept = Exact(states[0], states[0].abs(), states[0].abs(), torch.ones_like(param, dtype=torch.bool))
        return {**_sgd(param, scaled, states, row, is_power_of_two), "momentum_buffer": kept}
    grad, size = scaled + l2 * param, scaled.abs() + l2 * param.abs()
    is_exact = torch.full_like(param, bool(l2 == 0) and is_power_of_two, dtype=torch.bool)
    buffer = _moment(momentum * states[0], share * grad, share * size, is_exact)
    direction, direction_size = buffer.value, buffer.total
    if nesterov:
        direction, direction_size = grad + momentum * direction, size + momentum * direction_size
    return {"param32": _master(param, lr * direction, lr * direction_size), "momentum_buffer": buffer}


def _lion(
    param: Tensor, scaled: Tensor, states: Sequence[Tensor], row: Sequence[Tensor], is_power_of_two: bool
) -> dict[str, Exact]:
    """Where rounding may decide the sign of the direction, any of the two steps is right."""
    lr, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, *_ = row
    is_exact = torch.full_like(param, is_power_of_two, dtype=torch.bool)
    moment = _moment(beta2 * states[0], one_minus_beta2 * scaled, one_minus_beta2 * scaled.abs(), is_exact)
    old, new = beta1 * states[0], one_minus_beta1 * scaled
    direction, is_unsure = old + new, (old + new).abs() <= 4 * ROUNDING * (old.abs() + new.abs())
    is_unsure &= (old != 0) | (new != 0)
    kept, update = decay * param, lr * direction.sign()
    master = _master(kept, update, update.abs())
    doubled = torch.where(is_unsure, 2 * lr / (16 * ROUNDING), 0.0)
    total, is_regular = master.total + doubled, master.is_regular & ~is_unsure
    return {"param32": Exact(master.value, master.largest, total, is_regular), "exp_avg": moment}


DEFINITIONS = {"adam": _adam, "sgd": _sgd, "sgd_momentum": _sgd_momentum, "lion": _lion}


def ulp(magnitude: Tensor) -> Tensor:
    """Distance between neighbouring float32 numbers at ``magnitude``, float64."""
    exponent = torch.frexp(magnitude)[1].clamp(min=-125)
    return torch.ldexp(torch.ones_like(magnitude), exponent - 24)


def assert_near(name: str, found: Tensor, exact: Exact, num_ulp: int) -> None:
    """Check both bounds for the list ``name``; the AssertionError names the worst element."""
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
    return values.view({2: torch.int16, 4: torch.int32}[values.element_size()])
