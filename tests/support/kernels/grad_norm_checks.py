"""What is asked of the gradient norm, on whatever runs it: a GPU, or Triton's interpreter in host memory."""

import math
from collections.abc import Sequence
from functools import partial

import torch
from kernel_chunks import DTYPES, SIZES, Check, place, values
from kernel_reference import bits
from torch import Tensor

from chunkc.triton_kernels.grad_norm import (
    FAN_IN,
    MAX_RELATIVE_ERROR,
    grad_norm,
    grad_norm_launches,
    make_norm_tiles,
)


def norm_of(grad: Tensor, pieces: list[tuple[int, int, int]], device: torch.device) -> Tensor:
    out = torch.full((2,), torch.nan, device=device)
    grad_norm(grad.to(device), make_norm_tiles(pieces, device), out)
    return out.cpu()


def filled(
    dtype: torch.dtype, scale: float = 1.0, sizes: Sequence[int] = SIZES
) -> tuple[Tensor, list[tuple[int, int, int]], float]:
    numel, pieces = place(sizes)
    grad = torch.full((numel,), torch.nan, dtype=dtype)
    for start, end, param in pieces:
        grad[start:end] = values(end - start, param, scale).to(dtype)
    exact = math.fsum(float(grad[start:end].double().square().sum()) for start, end, _ in pieces)
    return grad, pieces, exact


def against_float64(dtype: torch.dtype, scale: float, device: torch.device) -> None:
    grad, pieces, exact = filled(dtype, scale)
    squares, flag = norm_of(grad, pieces, device).tolist()
    assert flag == 0.0
    assert abs(squares - exact) <= MAX_RELATIVE_ERROR * exact, (squares, exact)


def every_element_counts(device: torch.device) -> None:
    """Powers of two: the sum is exact, so that leaving out any one element, or counting it twice, shows."""
    numel, pieces = place(SIZES[:-1])
    grad = torch.full((numel,), torch.nan)
    for start, end, _ in pieces:
        grad[start:end] = 2.0
    assert norm_of(grad, pieces, device)[0] == 4.0 * sum(SIZES[:-1])


def not_finite(value: float, dtype: torch.dtype, device: torch.device) -> None:
    """One element, wherever it stands: first, last, in an edge, in a vector, alone in its parameter."""
    grad, pieces, _ = filled(dtype, sizes=SIZES[:-1])
    start, end, _ = pieces[-1]
    for at in (start, end - 1, start + 5, start + 40, pieces[0][0]):
        bad = grad.clone()
        bad[at] = value
        assert norm_of(bad, pieces[:1] if at == pieces[0][0] else [(start, end, 0)], device)[1] == 1.0


def padding_does_not_count(device: torch.device) -> None:
    grad = torch.full((400,), torch.inf)
    assert norm_of(grad, [], device).tolist() == [0.0, 0.0]
    assert norm_of(grad, [(9, 9, 0)], device).tolist() == [0.0, 0.0]
    grad[100:133] = 0.5
    assert norm_of(grad, [(100, 133, 0)], device).tolist() == [33 / 4, 0.0]


def too_large_for_float32_is_still_finite(device: torch.device) -> None:
    squares, flag = norm_of(torch.full((1000,), 3e38), [(0, 1000, 0)], device).tolist()
    assert squares == math.inf and flag == 0.0


def many_tiles(device: torch.device) -> None:
    """The second launch over more tiles than it takes at once: small terms after a large one are not lost."""
    num_tiles = 2 * FAN_IN + 17
    partial_sums = torch.stack([values(num_tiles, 1).abs() + 0.5, torch.zeros(num_tiles)])
    partial_sums[0, 0] = 2.0**24
    work, out = partial_sums.to(device), torch.full((2,), torch.nan, device=device)
    tiles = torch.zeros(num_tiles, 3, dtype=torch.int32, device=device)
    _, add_tiles = grad_norm_launches(torch.zeros(1, device=device), tiles, out, partial=work)
    add_tiles.run()
    exact = partial_sums[0].double().sum()
    assert out.cpu().tolist() == [float(exact.float()), 0.0]
    for at in (0, FAN_IN - 1, FAN_IN, num_tiles - 1):
        work[1] = 0.0
        work[1, at] = 1.0
        add_tiles.run()
        assert out.cpu()[1] == 1.0


def equal_bits_again(device: torch.device) -> None:
    grad, pieces, _ = filled(torch.float32)
    first = norm_of(grad, pieces, device)
    tiles, out = make_norm_tiles(pieces, device), torch.zeros(2, device=device)
    work = torch.full((2, tiles.shape[0]), torch.nan, device=device)
    grad_norm(grad.to(device), tiles, out, partial=work)
    assert torch.equal(bits(first), bits(norm_of(grad, pieces, device))) and torch.equal(bits(first), bits(out.cpu()))


CHECKS: dict[str, Check] = {
    **{
        f"against_float64[{name}-{scale:g}]": partial(against_float64, DTYPES[name], scale)
        for name in DTYPES
        for scale in (1.0, 1e-4)
    },
    "every_element_counts": every_element_counts,
    **{
        f"not_finite[{value}-{name}]": partial(not_finite, value, DTYPES[name])
        for value in (math.nan, math.inf, -math.inf)
        for name in ("fp32", "bf16")
    },
    "padding_does_not_count": padding_does_not_count,
    "too_large_for_float32_is_still_finite": too_large_for_float32_is_still_finite,
    "many_tiles": many_tiles,
    "equal_bits_again": equal_bits_again,
}
