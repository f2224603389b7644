"""Causal attention to keys slice by slice, by kernels without masks.

Of four slices, a rank that has the third one attends to its own causally, to earlier ones as they are, and counts what
it attends to in later ones as nothing:

    keys of slice        0        1        2        3
    slice 2 attends     all      all     causal   nothing

The results are merged by the logarithms of the sums that softmax divides by, as blockwise attention does (Liu et al.,
"Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023, section 3; Dao, "FlashAttention-2", 2023,
section 3.1). Backward gives each kernel the merged sums, with which it finds the probabilities of its own slice. Slices
come in the order in which they lie before the rank's own one, so that the operators are the same on all ranks. No
matrix of queries and keys is kept: for backward there are queries, keys and values of whole sequences, the result and
the sums.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import torch

from chunkc.capture.attention.kernels import AttentionCall, AttentionKernel, Capability, KernelSupport, choose_kernel

aten = torch.ops.aten
_SEQUENCE: Final = -2
_ALIGNMENT: Final = 8
"""Of the width of heads, for which the kernels of GPUs need no padding."""


@dataclass(frozen=True, slots=True)
class SliceKernel:
    """The kernel that attends to one slice.

    ``name``: None for that of a CPU. ``place``: of the rank's slice among ``size``. ``scale``: of scores.
    """

    name: AttentionKernel | None
    place: int
    size: int
    scale: float

    @property
    def takes_groups(self) -> bool:
        """Whether heads of keys may be fewer than those of queries."""
        return self.name is AttentionKernel.FLASH

    def forward(self, operands: tuple[torch.Tensor, ...], is_causal: bool) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """The result, logarithms of sums [batch, heads, queries or more], and what else backward needs."""
        if self.name is AttentionKernel.FLASH:
            found = aten._scaled_dot_product_flash_attention(*operands, 0.0, is_causal, False, scale=self.scale)
            return found[0], found[1], found[2:8]
        if self.name is AttentionKernel.EFFICIENT:
            found = aten._scaled_dot_product_efficient_attention(
                *operands, None, True, 0.0, is_causal, scale=self.scale
            )
            return found[0], found[1], found[2:]
        found = aten._scaled_dot_product_flash_attention_for_cpu(*operands, 0.0, is_causal, scale=self.scale)
        return found[0], found[1], ()

    def backward(
        self, given: torch.Tensor, operands: tuple[torch.Tensor, ...], is_causal: bool, rest: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of query, key and value; ``operands``: those, the merged result, and the merged sums."""
        if self.name is AttentionKernel.FLASH:
            found = aten._scaled_dot_product_flash_attention_backward(
                *(given, *operands, *rest[:4], 0.0, is_causal, *rest[4:]), scale=self.scale
            )
        elif self.name is AttentionKernel.EFFICIENT:
            query, key, value, result, sums = operands
            found = aten._scaled_dot_product_efficient_attention_backward(
                *(given, query, key, value, None, result, sums, *rest, 0.0, [True, True, True, False], is_causal),
                scale=self.scale,
            )[:3]
        else:
            found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                given, *operands, 0.0, is_causal, scale=self.scale
            )
        return found[0], found[1], found[2]

    def is_later(self, device: torch.device) -> torch.Tensor:
        """Whether a slice by its distance before the rank's own one is a later one in truth, [size].

        A tensor, since numbers would let equal operators be merged on some ranks and not on others.
        """
        return torch.arange(self.size, device=device) > self.place

    def slice_of(self, whole: torch.Tensor, distance: int) -> torch.Tensor:
        length = whole.shape[_SEQUENCE] // self.size
        return whole.narrow(_SEQUENCE, (self.place - distance) % self.size * length, length)


def slice_kernel(
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    place: int,
    size: int,
    gpu: Capability | None,
    *,
    dropout_p: float = 0.0,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> SliceKernel | None:
    """The kernel for attention to one slice; None where there is none, as with dropout.

    Args:
        operands: query, key and value of the rank's own slice, [batch, heads, length, width].
        gpu: compute capability of the one that runs it, or for which fake tensors are traced; None for a CPU.
    """
    query, key, value = operands
    name = None
    if dropout_p or (scale is not None and scale <= 0):
        return None
    if query.dim() != 4 or key.shape != value.shape or {key.dtype, value.dtype} != {query.dtype}:
        return None
    if (query.shape[0], *query.shape[2:]) != (key.shape[0], *key.shape[2:]):
        return None
    if query.shape[1] != key.shape[1] and not (enable_gqa and query.shape[1] % key.shape[1] == 0):
        return None
    if gpu is not None:
        as_many = [part[:, :1].expand_as(query) for part in (key, value)]  # the kernel has as many heads or takes fewer
        call = AttentionCall(query, as_many[0], as_many[1], is_causal=True)
        name = choose_kernel(call, gpu, KernelSupport.current())
        if name is AttentionKernel.MATH or query.shape[-1] % _ALIGNMENT:
            return None
        if name is AttentionKernel.CUDNN:
            name = AttentionKernel.FLASH
    return SliceKernel(name, place, size, 1 / math.sqrt(query.shape[-1]) if scale is None else scale)


def attend_slice_by_slice(
    query: torch.Tensor, whole_key: torch.Tensor, whole_value: torch.Tensor, kernel: SliceKernel
) -> torch.Tensor:
    """Causal attention of a slice to the keys of all slices.

    Args:
        query: [batch, heads, length, width].
        whole_key, whole_value: [batch, heads or a divisor of them, length times slices, width].

    Returns:
        [batch, heads, length, width], in the dtype of ``query``.
    """
    operands = map(_with_rows, (query, whole_key, whole_value))
    result: torch.Tensor = _SliceBySlice.apply(*operands, kernel)  # type: ignore[no-untyped-call]
    return result


def _with_rows(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` with rows of neighbours in memory: of others kernels read other elements."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


class _SliceBySlice(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, whole_key: torch.Tensor, whole_value: torch.Tensor, kernel: SliceKernel
    ) -> torch.Tensor:
        found, sums, rest = kernel.forward((query, *_operands(whole_key, whole_value, query, kernel, 0)), True)
        merged, is_later = found.to(sums.dtype), kernel.is_later(query.device)
        for distance in range(1, kernel.size):
            operands = (query, *_operands(whole_key, whole_value, query, kernel, distance))
            found, of_slice, _ = kernel.forward(operands, False)
            of_slice = of_slice.masked_fill(is_later[distance], -math.inf)
            earlier, sums = sums, torch.logaddexp(sums, of_slice)
            merged = merged * _weights(earlier - sums, query) + found * _weights(of_slice - sums, query)
        result = merged.to(query.dtype)
        ctx.save_for_backward(query, whole_key, whole_value, result, sums)
        ctx.kernel, ctx.rest = kernel, rest
        return result

    @staticmethod
    def backward(ctx: Any, given: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        kernel: SliceKernel = ctx.kernel
        query, whole_key, whole_value, result, sums = ctx.saved_tensors
        of_query, of_keys, of_values = torch.zeros_like(query, dtype=sums.dtype), [], []
        given, is_later = _with_rows(given), kernel.is_later(query.device)
        for distance in range(kernel.size):
            key, value = _operands(whole_key, whole_value, query, kernel, distance)
            operands = (query, key, value, result, sums.masked_fill(is_later[distance], math.inf))
            found, of_key, of_value = kernel.backward(given, operands, distance == 0, ctx.rest)
            of_query = of_query + found
            of_keys.append(_reduced(of_key, whole_key.shape[1]))
            of_values.append(_reduced(of_value, whole_value.shape[1]))
        distances = [(kernel.place - place) % kernel.size for place in range(kernel.size)]
        of_whole = [torch.cat([parts[i] for i in distances], _SEQUENCE) for parts in (of_keys, of_values)]
        return of_query.to(query.dtype), *of_whole, None


def _operands(
    whole_key: torch.Tensor, whole_value: torch.Tensor, query: torch.Tensor, kernel: SliceKernel, distance: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one slice, with as many heads as the kernel takes."""
    parts = [kernel.slice_of(whole, distance) for whole in (whole_key, whole_value)]
    if kernel.name is not None:  # torch's own ring attention copies them for the kernels of GPUs, too
        parts = [part.contiguous() for part in parts]
    groups = 1 if kernel.takes_groups else query.shape[1] // whole_key.shape[1]
    key, value = (part if groups == 1 else part.repeat_interleave(groups, 1) for part in parts)
    return key, value


def _reduced(gradient: torch.Tensor, num_heads: int) -> torch.Tensor:
    """The gradient of keys with ``num_heads`` heads, of each of which neighbours are copies."""
    if gradient.shape[1] == num_heads:
        return gradient
    batch, _, length, width = gradient.shape
    return gradient.reshape(batch, num_heads, -1, length, width).sum(2)


def _weights(difference: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Weights of a result in the merged one, [batch, heads, queries, 1]; kernels may give sums of more."""
    return difference.narrow(2, 0, query.shape[_SEQUENCE]).exp().unsqueeze(-1)
