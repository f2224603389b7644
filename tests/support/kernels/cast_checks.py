"""What is asked of the casts, on whatever runs them: a GPU, or Triton's interpreter in host memory."""

from functools import partial
from itertools import product

import torch
from kernel_chunks import DTYPES, SIZES, Check, place, values
from kernel_reference import bits, expected_cast
from torch import Tensor

from chunkc.triton_kernels.cast import restore
from chunkc.triton_kernels.launch import make_tiles


def restore_all(param32: Tensor, payload: Tensor) -> None:
    restore(param32, payload, make_tiles([(0, param32.numel(), 0)], param32.device))


def sizes(target: torch.dtype, offset: int, device: torch.device) -> None:
    for numel in (*SIZES, 4096) if offset % 16 == 0 else SIZES[:-1]:
        data = values(numel, numel, 300.0)
        memory = torch.full((numel + 40,), torch.nan, device=device)
        memory[offset : offset + numel] = data.to(device)
        around = torch.full((numel + 40,), torch.nan, dtype=target, device=device)
        restore_all(memory[offset : offset + numel], around[offset : offset + numel])
        found = around.cpu()
        assert same(found[offset : offset + numel], expected_cast(data, target, device))
        assert bool(found[:offset].isnan().all()) and bool(found[offset + numel :].isnan().all())


def all_16_bit_patterns(dtype: torch.dtype, device: torch.device) -> None:
    """A pattern in float32 gives the pattern back, and NaN stays NaN."""
    patterns = readable(torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype), dtype, device)
    back = torch.zeros(patterns.numel(), dtype=dtype, device=device)
    restore_all(patterns.float().to(device), back)
    assert same(back.cpu(), patterns)


def ties_and_limits(dtype: torch.dtype, device: torch.device) -> None:
    finite = torch.arange(0, 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    finite = finite[finite.isfinite()]
    halfway = (finite[:-1].double() + finite[1:].double()).div(2).float()
    limits = torch.tensor([65504.0, 65519.0, 65520.0, 3.38e38, 3.4e38, torch.inf, 0.0, 1e-46, 6e-8, 2.9e-8])
    data = torch.cat([halfway, *(torch.nextafter(halfway, torch.tensor(to)) for to in (0.0, torch.inf)), limits])
    data = readable(torch.cat([data, -data]), dtype, device)
    found = torch.zeros(data.numel(), dtype=dtype, device=device)
    restore_all(data.to(device), found)
    want = expected_cast(data, dtype, device)
    assert same(found.cpu(), want)
    if dtype is torch.float16 or device.type == "cuda":
        assert int((want != _truncated(data, dtype)).sum()) > 1000  # truncation would be seen


def _truncated(data: Tensor, dtype: torch.dtype) -> Tensor:
    rounded = data.to(dtype)
    away = rounded.float().abs() > data.abs()
    return (bits(rounded) - away.to(torch.int16)).view(dtype)


def readable(data: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Without subnormal numbers where the interpreter would convert them from or to bfloat16, which it gets wrong."""
    if dtype is torch.bfloat16 and device.type == "cpu":
        magnitude = data.float().abs()
        return data[(magnitude == 0) | ~(magnitude < torch.finfo(torch.bfloat16).tiny)]
    return data


def nothing(device: torch.device) -> None:
    payload = torch.full((5,), torch.nan, dtype=torch.float16, device=device)
    restore(torch.zeros(5, device=device), payload, make_tiles([], device))
    assert bool(payload.isnan().all())


def restore_pieces(dtype: torch.dtype, device: torch.device) -> None:
    numel, pieces = place(SIZES)
    param32 = torch.full((numel,), torch.nan)
    inside = torch.zeros(numel, dtype=torch.bool)
    for start, end, param in pieces:
        param32[start:end] = values(end - start, param)
        inside[start:end] = True
    payload = torch.full((numel,), torch.nan, dtype=dtype)
    payload[~inside] = -7.0
    on_device, source = payload.to(device), param32.to(device)
    restore(source, on_device, make_tiles(pieces, device))
    found = on_device.cpu()
    assert torch.equal(bits(found)[inside], bits(expected_cast(param32, dtype, device))[inside])
    assert bool((found[~inside] == -7.0).all()) and torch.equal(bits(source.cpu()), bits(param32))


def restore_of_param32_itself(device: torch.device) -> None:
    data = values(100, 1).to(device)
    restore(data, data, make_tiles([(0, 100, 0)], device))
    assert torch.equal(data.cpu(), values(100, 1))


def same(found: Tensor, want: Tensor) -> bool:
    nan = want.isnan()
    return torch.equal(bits(found)[~nan], bits(want)[~nan]) and bool(found[nan].isnan().all())


CHECKS: dict[str, Check] = {
    **{
        f"sizes[{target}-{offset}]": partial(sizes, DTYPES[target], offset)
        for target, offset in product(DTYPES, (0, 3, 16))
    },
    **{f"all_16_bit_patterns[{name}]": partial(all_16_bit_patterns, DTYPES[name]) for name in ("fp16", "bf16")},
    **{f"ties_and_limits[{name}]": partial(ties_and_limits, DTYPES[name]) for name in ("fp16", "bf16")},
    "nothing": nothing,
    **{f"restore_pieces[{name}]": partial(restore_pieces, DTYPES[name]) for name in DTYPES},
    "restore_of_param32_itself": restore_of_param32_itself,
}
