"""Attention slice by slice, for the ranks of all slices, beside attention to whole sequences."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from chunkc._torch_compat.core import FakeTensorMode
from chunkc.capture.attention.kernels import AttentionKernel, Capability
from chunkc.capture.attention.slice_by_slice import SliceKernel, attend_slice_by_slice, slice_kernel

LENGTH, HEADS = 6, 4
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def operands(num_slices: int, key_heads: int = HEADS, dtype: torch.dtype = torch.float32) -> Operands:
    generator = torch.Generator().manual_seed(num_slices + key_heads)
    shapes = [(2, heads, num_slices * LENGTH, 8) for heads in (HEADS, key_heads, key_heads)]
    query, key, value = (torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes)
    return query, key, value


def kernel_of(place: int, given: Operands, num_slices: int, scale: float | None = None) -> SliceKernel:
    own = (given[0], *(part[:, :, place * LENGTH : (place + 1) * LENGTH] for part in given[1:]))
    kernel = slice_kernel(own, place, num_slices, None, scale=scale, enable_gqa=True)  # type: ignore[arg-type]
    assert kernel is not None
    return kernel


def by_slices(given: Operands, num_slices: int, scale: float | None = None) -> torch.Tensor:
    query, key, value = given
    parts = []
    for place, part in enumerate(query.chunk(num_slices, 2)):
        kernel = kernel_of(place, (part, key, value), num_slices, scale)
        parts.append(attend_slice_by_slice(part, key, value, kernel))
    return torch.cat(parts, 2)


def with_gradients(result: torch.Tensor, given: Operands) -> list[torch.Tensor]:
    weights = torch.linspace(-1, 1, result.numel(), dtype=torch.float64).view_as(result)
    return [result, *torch.autograd.grad((result * weights).sum(), given)]


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("key_heads", [HEADS, 2, 1])
@pytest.mark.parametrize("num_slices", [1, 2, 5])
def test_ranks_together_compute_attention_to_whole_sequences(
    num_slices: int, key_heads: int, scale: float | None
) -> None:
    """And its gradients."""
    given = operands(num_slices, key_heads, torch.float64)
    exact = F.scaled_dot_product_attention(*given, is_causal=True, scale=scale, enable_gqa=True)
    found, wanted = (with_gradients(result, given) for result in (by_slices(given, num_slices, scale), exact))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merging_is_as_exact_as_the_kernel(dtype: torch.dtype) -> None:
    """Twice the largest error of attention to whole sequences in the same dtype, with the same values, is allowed."""
    given = operands(4, dtype=dtype)
    wide = tuple(part.detach().double().requires_grad_() for part in given)
    exact = with_gradients(F.scaled_dot_product_attention(*wide, is_causal=True), wide)  # type: ignore[arg-type]
    plain = with_gradients(F.scaled_dot_product_attention(*given, is_causal=True), given)
    for found, whole, wanted in zip(with_gradients(by_slices(given, 4), given), plain, exact, strict=True):
        assert found.dtype is dtype
        assert (found - wanted).abs().max() <= 2 * (whole - wanted).abs().max()


def test_elements_may_lie_in_any_order() -> None:
    """Kernels read rows of neighbours, whatever the strides say; a sum's gradient is one element for all."""
    given = operands(3)
    turned = tuple(p.detach().transpose(-1, -2).contiguous().transpose(-1, -2).requires_grad_() for p in given)
    found, wanted = by_slices(turned, 3), by_slices(given, 3)  # type: ignore[arg-type]
    assert torch.equal(found, wanted)
    exact = torch.autograd.grad(F.scaled_dot_product_attention(*given, is_causal=True).sum(), given)
    for one, other in zip(torch.autograd.grad(found.sum(), turned), exact, strict=True):
        torch.testing.assert_close(one, other)


def test_later_slices_count_as_nothing() -> None:
    """Bit by bit, however large their scores; and no gradient reaches them."""
    query, key, value = operands(3)
    part = query[:, :, LENGTH : 2 * LENGTH]
    kernel = kernel_of(1, (part, key, value), 3)
    found = attend_slice_by_slice(part, key, value, kernel)
    others = [torch.cat([whole[:, :, : 2 * LENGTH], 1e4 * whole[:, :, 2 * LENGTH :]], 2) for whole in (key, value)]
    assert torch.equal(found, attend_slice_by_slice(part, *others, kernel))
    for gradient in torch.autograd.grad(found.sum(), (key, value)):
        assert not gradient[:, :, 2 * LENGTH :].any() and gradient[:, :, : 2 * LENGTH].any()


def test_no_matrix_of_queries_and_keys_is_kept() -> None:
    saved = list[torch.Size]()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.shape)
        return tensor

    query, key, value = operands(3)
    part = query[:, :, :LENGTH]
    kernel = kernel_of(0, (part, key, value), 3)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda kept: kept):
        attend_slice_by_slice(part, key, value, kernel)
    assert sorted(saved) == sorted([part.shape, key.shape, value.shape, part.shape, part.shape[:3]])


@pytest.mark.parametrize(
    ("gpu", "dtype", "name"),
    [
        ((9, 0), torch.bfloat16, AttentionKernel.FLASH),
        ((8, 0), torch.float16, AttentionKernel.FLASH),
        ((8, 0), torch.float32, AttentionKernel.EFFICIENT),
        ((7, 0), torch.float16, AttentionKernel.EFFICIENT),
    ],
)
@pytest.mark.parametrize("key_heads", [HEADS, 2])
def test_operators_of_gpus_give_gradients_of_every_shape(
    key_heads: int, gpu: Capability, dtype: torch.dtype, name: AttentionKernel
) -> None:
    """On fake tensors: nothing runs, but shapes and arguments are checked."""
    with FakeTensorMode():
        query, key, value = (torch.empty(2, heads, 3 * LENGTH, 8, dtype=dtype) for heads in (HEADS, *2 * [key_heads]))
        given = (query[:, :, :LENGTH].clone().requires_grad_(), key.requires_grad_(), value.requires_grad_())
        own = (given[0], key[:, :, :LENGTH], value[:, :, :LENGTH])
        kernel = slice_kernel(own, 1, 3, gpu, enable_gqa=True)
        assert kernel is not None and kernel.name is name
        found = attend_slice_by_slice(*given, kernel)
        assert found.shape == given[0].shape and found.dtype is dtype
        for gradient, tensor in zip(torch.autograd.grad(found.sum(), given), given, strict=True):
            assert gradient.shape == tensor.shape and gradient.dtype is dtype


@pytest.mark.parametrize(
    ("shapes", "options", "gpu"),
    [
        (3 * [(2, 4, LENGTH, 8)], {"dropout_p": 0.1}, None),
        (3 * [(2, 4, LENGTH, 8)], {"scale": -1.0}, None),
        (3 * [(8, LENGTH, 8)], {}, None),
        ([*2 * [(2, 4, LENGTH, 8)], (2, 4, LENGTH, 16)], {}, None),
        ([(2, 4, LENGTH, 8), *2 * [(2, 2, LENGTH, 8)]], {}, None),
        ([(2, 4, LENGTH, 8), *2 * [(1, 4, LENGTH, 8)]], {}, None),
        ([(2, 4, LENGTH, 8), (2, 2, LENGTH, 8), (2, 4, LENGTH, 8)], {"enable_gqa": True}, None),
        (3 * [(2, 4, LENGTH, 6)], {}, (8, 0)),
    ],
)
def test_where_no_kernel_serves(
    shapes: list[tuple[int, ...]], options: dict[str, float], gpu: Capability | None
) -> None:
    """With dropout, other dimensions, values of another width, unannounced groups, what is broadcast, padded heads."""
    given = tuple(torch.ones(shape) for shape in shapes)
    assert slice_kernel(given, 0, 2, gpu, **options) is None  # type: ignore[arg-type]


def test_a_frozen_query_has_the_kernel_of_a_backward() -> None:
    """Of wide heads there is none by flash attention on sm_86."""
    with FakeTensorMode():
        query, key, value = (torch.empty(2, HEADS, LENGTH, 208, dtype=torch.bfloat16) for _ in range(3))
        for trains, name in ((False, AttentionKernel.FLASH), (True, AttentionKernel.EFFICIENT)):
            kernel = slice_kernel((query, key.requires_grad_(trains), value), 0, 1, (8, 6))
            assert kernel is not None and kernel.name is name


def test_the_scale_is_that_of_the_width() -> None:
    given = operands(1)
    assert kernel_of(0, given, 1).scale == 1 / math.sqrt(8)
