"""The kernel that PyTorch takes on a GPU for one call of attention, by PyTorch's own rules.

    cuDNN       sm_90 and sm_10x with a new cuDNN, 16 bits, unless algorithms must be deterministic
    flash       sm_80 and newer, 16 bits, no mask, heads of at most 256
    efficient   every GPU: masks, fp32, 16 bits as fp16 below sm_80; heads a multiple of what the matrix units load
    math        whatever is left: matrices of queries x keys, kept for backward

The first that can is taken. The rules are those of ``sdp::select_sdp_backend`` (aten/src/ATen/native/transformers/cuda/
sdp_utils.cpp and ../sdp_utils_cpp.h), as read for torch 2.11 to 2.15, and for 2.11 as an H100 answered. A rule that
came later, or that depends on cuDNN, says since when; where torch has no CUDA, the cuDNN of its wheels for CUDA 13 is
assumed. An order that the model sets itself (``sdpa_kernel(..., set_priority=True)``) is not followed; kernels that it
switches off are left out.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, TypeAlias

import torch

from chunkc.errors import CaptureError

Capability: TypeAlias = tuple[int, int]
"""Major and minor compute capability of a GPU."""

_NARROW: Final = (torch.float16, torch.bfloat16)
_NEWEST: Final = (12, 1)
_MAX_FLASH_HEAD: Final = 256
_MAX_CUDNN_HEADS: Final = 65535
_CUDNN_PREFERRED_ABOVE: Final = 91500
_CUDNN_WIDE_ABOVE: Final = 92200
_CUDNN_OF_WHEELS: Final = (((2, 15), 92600), ((2, 11), 91900))
_CUDNN_DROPOUT_STEP: Final = 1 / 16
_SINCE_DROPOUT_STEP: Final = (2, 12)
_SINCE_WIDE_BACKWARD: Final = (2, 14)
"""Before that, wide heads were taken on sm_90 whether or not a backward would follow."""
_SINCE_ANY_GROUPS: Final = (2, 14)
"""Since then the efficient kernel takes grouped queries, and every kernel one head of keys without being told."""


class AttentionKernel(StrEnum):
    """A kernel of attention, by the name that PyTorch's operator has for it."""

    CUDNN = "cudnn"
    FLASH = "flash"
    EFFICIENT = "efficient"
    MATH = "math"


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Arguments of one call of `scaled_dot_product_attention`, whose tensors may be fake.

    Query (batch, heads, queries, e), key (batch, heads, keys, e), value (batch, heads, keys, v), all of one dtype.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None = None
    dropout: float = 0.0
    is_causal: bool = False
    is_grouped: bool = False

    @property
    def needs_grad(self) -> bool:
        tensors = (self.query, self.key, self.value)
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


@dataclass(frozen=True, slots=True)
class KernelSupport:
    """Kernels that a build of torch has, by its version and that of cuDNN, and that are switched on."""

    torch_version: tuple[int, int]
    cudnn_version: int
    cuda_major: int = 13
    enabled: frozenset[AttentionKernel] = frozenset(AttentionKernel)
    is_deterministic: bool = False
    prefers_cudnn: bool = True

    @staticmethod
    def current() -> KernelSupport:
        """Return what the running process would find on a GPU."""
        major, minor = (int(part) for part in torch.__version__.split(".")[:2])
        wheels = next((cudnn for since, cudnn in _CUDNN_OF_WHEELS if (major, minor) >= since), 0)
        has_cuda = torch.version.cuda is not None
        cudnn: Any = torch.backends.cudnn
        return KernelSupport(
            (major, minor),
            (cudnn.version() or 0) if has_cuda else wheels,
            int(str(torch.version.cuda).partition(".")[0]) if has_cuda else 13,
            _enabled(),
            torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled(),
            os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1",
        )

    def tries_cudnn(self, gpu: Capability) -> bool:
        """Whether cuDNN comes first; otherwise it comes behind what computes everything."""
        is_known = gpu[0] in (9, 10) and (self.cuda_major >= 13 or gpu[1] in (0, 3))
        return self.prefers_cudnn and self.cudnn_version > _CUDNN_PREFERRED_ABOVE and is_known


def choose_kernel(call: AttentionCall, gpu: Capability, support: KernelSupport) -> AttentionKernel:
    """Return the kernel that torch takes for ``call`` on a GPU; CaptureError where all that could are off."""
    kernel = AttentionKernel
    if kernel.CUDNN in support.enabled and support.tries_cudnn(gpu) and _cudnn_can(call, gpu, support):
        return kernel.CUDNN
    if kernel.FLASH in support.enabled and _flash_can(call, gpu, support):
        return kernel.FLASH
    if kernel.EFFICIENT in support.enabled and _efficient_can(call, gpu, support):
        return kernel.EFFICIENT
    if kernel.MATH not in support.enabled:
        raise CaptureError(
            f"no kernel of attention that is switched on can compute queries {tuple(call.query.shape)} of "
            f"{call.query.dtype} on sm_{gpu[0]}{gpu[1]}; allow SDPBackend.MATH"
        )
    return kernel.MATH


def _enabled() -> frozenset[AttentionKernel]:
    cuda: Any = torch.backends.cuda
    kernel = AttentionKernel
    switches = {
        kernel.CUDNN: cuda.cudnn_sdp_enabled(),
        kernel.FLASH: cuda.flash_sdp_enabled(),
        kernel.EFFICIENT: cuda.mem_efficient_sdp_enabled(),
        kernel.MATH: cuda.math_sdp_enabled(),
    }
    return frozenset(name for name, is_on in switches.items() if is_on)


def _cudnn_can(call: AttentionCall, gpu: Capability, support: KernelSupport) -> bool:
    fits_dropout = call.dropout == 0 or (
        not 91100 < support.cudnn_version < 91400
        and (support.torch_version < _SINCE_DROPOUT_STEP or (call.dropout / _CUDNN_DROPOUT_STEP).is_integer())
        and call.query.shape[-2] != 1
    )
    return (
        not support.is_deterministic
        and fits_dropout
        and _is_dense(call, takes_single=True)
        and _shares_heads(call, support, takes_groups=True, same_groups=False)
        and _has_dtype(call, _NARROW)
        and _cudnn_takes_mask(call)
        and _cudnn_takes_heads(call, gpu, support)
        and max(call.query.shape[:2]) <= _MAX_CUDNN_HEADS
        and call.key.shape[-2] != 1
    )


def _cudnn_takes_heads(call: AttentionCall, gpu: Capability, support: KernelSupport) -> bool:
    """Whether cuDNN has kernels for the width of heads, on the GPUs where it comes first."""
    width, value_width = call.query.shape[-1], call.value.shape[-1]
    if width % 8 or value_width % 8:
        return False
    if max(width, value_width) <= 128 or (width, value_width) == (192, 128):
        return True
    if support.torch_version < _SINCE_WIDE_BACKWARD:
        return gpu == (9, 0) and max(width, value_width) <= 256
    has_wide = support.cudnn_version > _CUDNN_WIDE_ABOVE and max(width, value_width) <= 256
    return has_wide and (not call.needs_grad or width == value_width == 256)


def _cudnn_takes_mask(call: AttentionCall) -> bool:
    """Whether the mask needs no gradient and broadcasts, with two or four sizes, to what it masks."""
    if call.mask is None:
        return True
    full = (*call.query.shape[:3], call.key.shape[-2])
    pairs = zip(reversed(call.mask.shape), reversed(full), strict=False)
    return not call.mask.requires_grad and call.mask.dim() in (2, 4) and all(size in (1, most) for size, most in pairs)


def _flash_can(call: AttentionCall, gpu: Capability, support: KernelSupport) -> bool:
    width = call.query.shape[-1]
    small = (8, 6) <= gpu <= (8, 9) or gpu[0] == 12
    no_backward = call.needs_grad and small and width > 192 and (width <= 224 or call.dropout > 0)
    return (
        (8, 0) <= gpu <= _NEWEST
        and call.mask is None
        and _is_dense(call, takes_single=True)
        and _shares_heads(call, support, takes_groups=True)
        and _has_dtype(call, _NARROW)
        and width == call.key.shape[-1] == call.value.shape[-1] <= _MAX_FLASH_HEAD
        and not no_backward
        and not (call.is_causal and call.query.shape[-2] != call.key.shape[-2])
    )


def _efficient_can(call: AttentionCall, gpu: Capability, support: KernelSupport) -> bool:
    can_group = support.torch_version >= _SINCE_ANY_GROUPS
    dtypes = (*_NARROW, torch.float32) if gpu >= (8, 0) else (torch.float16, torch.float32)
    return (
        (5, 0) <= gpu <= _NEWEST
        and _is_dense(call, takes_single=False)
        and _shares_heads(call, support, takes_groups=can_group)
        and _has_dtype(call, dtypes)
        and _is_aligned(call, gpu, support)
    )


def _is_aligned(call: AttentionCall, gpu: Capability, support: KernelSupport) -> bool:
    """Whether heads are whole loads of the matrix units, and since torch 2.14 begin at one."""
    is_narrow = call.query.dtype in _NARROW
    alignment = 8 if is_narrow and gpu >= (7, 0) else 4 if gpu >= (8, 0) else 1
    width, value_width = call.query.shape[-1], call.value.shape[-1]
    if width != call.key.shape[-1] or not width or not value_width or width % alignment or value_width % alignment:
        return False
    tensors = (call.query, call.key, call.value)
    checks_offsets = gpu >= (8, 0) and support.torch_version >= _SINCE_ANY_GROUPS
    return not checks_offsets or all(int(t.storage_offset()) % alignment == 0 for t in tensors)


def _is_dense(call: AttentionCall, *, takes_single: bool) -> bool:
    """Whether all have four sizes and the same batch, are not empty, and have a head's elements together."""
    tensors = (call.query, call.key, call.value)
    if any(t.dim() != 4 for t in tensors) or len({t.shape[0] for t in tensors}) > 1:
        return False
    side_by_side = all(t.stride(-1) == 1 for t in tensors) or (takes_single and call.query.shape[-1] == 1)
    reads_mask = call.mask is None or call.mask.stride(-1) == 1
    return side_by_side and reads_mask and bool(call.query.shape[-2] and call.key.shape[-2])


def _shares_heads(call: AttentionCall, support: KernelSupport, *, takes_groups: bool, same_groups: bool = True) -> bool:
    """Whether heads are equally many, or shared by queries in a way that the kernel takes."""
    queries, keys, values = (t.shape[-3] for t in (call.query, call.key, call.value))
    if call.is_grouped and takes_groups:
        divides = bool(keys and values) and queries % keys == 0 and queries % values == 0
        return divides and (keys == values or not same_groups)
    is_single = keys == values == 1 and queries > 0 and support.torch_version >= _SINCE_ANY_GROUPS
    return queries == keys == values or is_single


def _has_dtype(call: AttentionCall, dtypes: tuple[torch.dtype, ...]) -> bool:
    return call.query.dtype in dtypes and call.query.dtype == call.key.dtype == call.value.dtype
