"""Codes of 8-bit states: the published values, the nearest of them, and back to the same codes bit for bit."""

import pytest
import torch
from torch import Tensor

from chunkc.ir.state_spec import BLOCK_NUMEL
from chunkc.runtime.update.block_quantisation import (
    FIRST_BIN,
    MIN_SCALE,
    NUM_BINS,
    code_borders,
    code_tables,
    code_values,
    dequantise,
    quantise,
)

SIGNED = pytest.mark.parametrize("signed", [True, False])


def drawn(numel: int, *, signed: bool) -> Tensor:
    generator = torch.Generator().manual_seed(numel)
    found = torch.randn(numel, generator=generator) * torch.exp2(8 * torch.randn(numel, generator=generator))
    return found if signed else found.square()


@SIGNED
def test_values_are_those_of_dynamic_tree_quantisation(signed: bool) -> None:
    """Midpoints of equal parts of [0.1, 1], by decades: 64 or 128 parts in the largest, 1 or 2 in the least."""
    values = code_values(signed)
    assert values.numel() == 256 and bool((values[1:] > values[:-1]).all())
    for decade in range(7):
        num = 2**decade * (1 if signed else 2)
        edges = torch.linspace(0.1, 1, num + 1, dtype=torch.float64) * 10.0 ** (decade - 6)
        inside = values[(values > 10.0 ** (decade - 7)) & (values < edges[-1])]
        torch.testing.assert_close(inside.double(), (edges[1:] + edges[:-1]) / 2, rtol=1e-6, atol=0)
    assert values[-1] == 1 and int((values == 0).sum()) == 1
    if signed:
        assert values[0] == -1 and torch.equal(values[1:127], -values[128:254].flip(0))
    else:
        assert values[0] == 0


@SIGNED
def test_a_code_is_the_nearest_and_the_lower_on_a_border(signed: bool) -> None:
    borders, values = code_borders(signed), code_values(signed).double()
    given = torch.cat([borders, torch.nextafter(borders, torch.tensor(2.0)), torch.ones(1)])
    codes, scales = quantise(given, signed=signed)  # every block but the last has none that is 1
    for block, part in enumerate(given.split(BLOCK_NUMEL)):
        quotients = part / part.abs().max()
        distances = (quotients.double()[:, None] - values).abs()
        found = codes[block * BLOCK_NUMEL :][: len(part)].long()
        excess = distances.gather(1, found[:, None])[:, 0] - distances.amin(dim=1)
        assert bool((excess <= 2.0**-24 * quotients.abs()).all())
        assert scales[block] == part.abs().max()
    on_border = torch.cat([borders[:200], torch.ones(1)])
    assert quantise(on_border, signed=signed)[0][:200].tolist() == list(range(200))


@SIGNED
def test_codes_come_back_from_their_values(signed: bool) -> None:
    """All codes under scales of all exponents and random mantissas, where one element of a block has the largest."""
    generator = torch.Generator().manual_seed(1)
    codes = torch.arange(256, dtype=torch.uint8)
    for exponent in range(-100, 128):
        for mantissa in (1.0, 2 - 2.0**-23, *(1 + torch.rand(6, generator=generator)).tolist()):
            scale = torch.tensor([mantissa * 2.0**exponent], dtype=torch.float32)
            found, scales = quantise(dequantise(codes, scale, signed=signed), signed=signed)
            assert torch.equal(found, codes) and torch.equal(scales, scale), (exponent, mantissa)
    flipped = torch.cat([codes[:128], torch.zeros(128, dtype=torch.uint8)])  # the largest magnitude is negative
    scale = torch.tensor([0.7])
    if signed:
        assert torch.equal(quantise(dequantise(flipped, scale, signed=True), signed=True)[0], flipped)


@SIGNED
def test_what_was_quantised_comes_back(signed: bool) -> None:
    state = torch.cat([drawn(1000, signed=signed), torch.zeros(24), torch.full((300,), MIN_SCALE / 2)])
    codes, scales = quantise(state, signed=signed)
    values = dequantise(codes, scales, signed=signed)
    again = quantise(values, signed=signed)
    assert torch.equal(again[0], codes) and torch.equal(again[1], scales)
    largest = torch.stack([part.abs().max() for part in state.split(BLOCK_NUMEL)])
    assert torch.equal(scales, torch.where(largest < MIN_SCALE, 0, largest))
    gap = float((code_values(signed)[1:] - code_values(signed)[:-1]).max())
    errors = (values - state).abs() / largest.repeat_interleave(BLOCK_NUMEL)[: len(state)]
    assert float(errors[:1000].max()) <= gap / 2 * (1 + 1e-6)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_block_that_is_not_finite_is_nan(value: float) -> None:
    state = drawn(700, signed=True)
    state[300] = value
    codes, scales = quantise(state, signed=True)
    found = dequantise(codes, scales, signed=True).isnan()
    assert found[256:512].all() and not found[:256].any() and not found[512:].any()
    assert torch.equal(quantise(dequantise(codes, scales, signed=True), signed=True)[0], codes)


@SIGNED
def test_a_bin_has_at_most_one_border(signed: bool) -> None:
    """So the code of a quotient is the least code of its bin or the next."""
    tables, borders = code_tables(torch.device("cpu")), code_borders(signed)
    row = tables.bases[0 if signed else 1]
    bins = torch.arange(FIRST_BIN, FIRST_BIN + NUM_BINS, dtype=torch.int32) << 16
    for negative in (False, True) if signed else (False,):
        for inside in (bins, bins | 0xFFFF, bins | 0x8000):
            quotients = inside.view(torch.float32).clamp(max=1.0)
            quotients = -quotients if negative else quotients
            wanted = torch.searchsorted(borders, quotients).int()
            base = row[int(negative)]
            assert torch.equal(base + (quotients > tables.borders[0 if signed else 1][base]), wanted)
