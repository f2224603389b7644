"""The loop of the host update over quantised states: block after block, decoded, updated, encoded.

A block's states stand decoded in a core's cache while the formula runs, so that memory is passed over once. C++ is
written here and not by Inductor, which has no loop for it; it does Adam's operations in the order of the formula
(`rules`), each rounded as IEEE 754 says, and is used only after it gave the bits of the formula. Without a compiler the
formula runs eagerly, between `dequantise` and `quantise`, to the same bits. Blocks share nothing: the result does not
depend on the number of threads.

A code is found in vectors, without a search. Within a decade values are evenly spaced, so that the place of a magnitude
x among the positive values is a line in x; of the lines of all decades the least counts::

    place(x) = min over decades d = 0..6 of 2^d * (10^(6 - d) * x + 0.8) / 0.9      without signs: 2 * place(x) - 1

It is exact but at the ends of a decade, where it is up to 0.2 above the place. Less 0.22, rounded down, it is the code
or the one below, and the border between both decides: exactly, for every float32 from -1 to 1 (all were tried).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final

import torch
from torch import Tensor

from chunkc._torch_compat.inductor import LoopUnavailable, cpp_library
from chunkc.ir.state_spec import BLOCK_NUMEL
from chunkc.runtime.update.block_quantisation import (
    MIN_SCALE,
    NUM_CODES,
    NUM_DECADES,
    code_tables,
    code_values,
    read_list,
    write_list,
)
from chunkc.runtime.update.cpu_update_kernel import (
    EAGER_TILE_NUMEL,
    Kernel,
    LoopCall,
    arbitrary_coefficients,
    log_once,
    rounded_sqrt,
)
from chunkc.runtime.update.rules import UpdateRule

_CPP_TYPES: Final = {
    torch.float32: "float",
    torch.bfloat16: "c10::BFloat16",
    torch.float16: "c10::Half",
    None: "float",
}
_NO_ERRNO: Final = "-fno-math-errno"
"""Lets compilers take the processor's root, of vectors, which does not set errno."""

_MARGIN: Final = 0.22
"""How far lines are above places at most, 0.2, and room for rounding."""

_AGREED_NUMEL: Final = 5 * BLOCK_NUMEL + 77

SOURCE: Final = """
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3", "tree-loop-vectorize")  // Inductor vectorises its own loops and turns this off
#endif
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace {{

constexpr int64_t BLOCK = {block_numel};
constexpr float SLOPES[] = {{{slopes}}};
constexpr float OFFSETS[] = {{{offsets}}};

inline uint32_t bits_of(float x) {{
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}}

inline float float_of(uint32_t bits) {{
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}}

// The code of a quotient, or the one below.
template <bool is_signed>
inline int32_t place(float quotient) {{
    const float magnitude = is_signed ? std::fabs(quotient) : quotient > 0.0f ? quotient : 0.0f;
    float least = static_cast<float>(BLOCK);
    for (int decade = 0; decade < {num_decades}; ++decade) {{
        const float line = SLOPES[decade] * magnitude + OFFSETS[decade];
        least = line < least ? line : least;
    }}
    const int32_t below = static_cast<int32_t>(is_signed ? least - {margin}f : 2.0f * least - {unsigned_margin}f);
    if (!is_signed) return below;
    const int32_t negative = {zero_code} - 1 - below;
    return quotient < 0.0f ? (negative > 0 ? negative : 0) : {zero_code} + below;
}}

template <bool is_signed>
void encode(
    const float* __restrict__ x, uint8_t* __restrict__ codes, float* __restrict__ scale, int64_t n,
    const float* __restrict__ borders) {{
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; ++i) {{
        const uint32_t magnitude = bits_of(x[i]) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }}
    const bool is_finite = largest < 0x7f800000u;
    if (!is_finite || largest < {min_scale_bits}u) {{
        *scale = is_finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
        std::memset(codes, is_signed ? {zero_code} : 0, n);
        return;
    }}
    const float divisor = float_of(largest);
    *scale = divisor;
    float quotients[BLOCK], above[BLOCK];
    uint8_t places[BLOCK];
    for (int64_t i = 0; i < n; ++i) {{
        quotients[i] = x[i] / divisor;
        places[i] = static_cast<uint8_t>(place<is_signed>(quotients[i]));
    }}
    #pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {{
        above[i] = borders[places[i]];
    }}
    for (int64_t i = 0; i < n; ++i) {{
        codes[i] = static_cast<uint8_t>(places[i] + (quotients[i] > above[i] ? 1 : 0));
    }}
}}

}}  // namespace

extern "C" void update(
    const {gradient}* gradient, const float* read_param, const uint8_t* read_m, const uint8_t* read_v,
    const float* read_m_scale, const float* read_v_scale,
    float* param, uint8_t* m, uint8_t* v, float* m_scale, float* v_scale, {payload}* payload,
    const float* coefficients, const float* values, const float* borders, int64_t numel) {{
    const float grad_scale = coefficients[0], step_size = coefficients[1], eps = coefficients[2];
    const float decay = coefficients[3], l2 = coefficients[4], beta1 = coefficients[5], rest1 = coefficients[6];
    const float beta2 = coefficients[7], rest2 = coefficients[8];
    const int64_t num_blocks = (numel + BLOCK - 1) / BLOCK;
    {pragma}
    for (int64_t block = 0; block < num_blocks; ++block) {{
        const int64_t first = block * BLOCK;
        const int64_t n = numel - first < BLOCK ? numel - first : BLOCK;
        const float old_m_scale = read_m_scale[block], old_v_scale = read_v_scale[block];
        float new_m[BLOCK], new_v[BLOCK], new_param[BLOCK];
        #pragma GCC ivdep
        for (int64_t i = 0; i < n; ++i) {{
            new_m[i] = values[read_m[first + i]];
            new_v[i] = values[{num_codes} + read_v[first + i]];
        }}
        for (int64_t i = 0; i < n; ++i) {{
            const float p = read_param[first + i];
            const float g = static_cast<float>(gradient[first + i]) * grad_scale + l2 * p;
            const float mi = beta1 * (new_m[i] * old_m_scale) + rest1 * g;
            const float vi = beta2 * (new_v[i] * old_v_scale) + rest2 * g * g;
            new_m[i] = mi;
            new_v[i] = vi;
            new_param[i] = p * decay - step_size * mi / (std::sqrt(vi) + eps);
        }}
        for (int64_t i = 0; i < n; ++i) {{
            param[first + i] = new_param[i];
            {cast}
        }}
        encode<true>(new_m, m + first, m_scale + block, n, borders);
        encode<false>(new_v, v + first, v_scale + block, n, borders + {num_codes});
    }}
}}
"""


@cache
def block_kernel(
    rule: UpdateRule, gradient_dtype: torch.dtype, payload_dtype: torch.dtype | None, *, is_parallel: bool
) -> Kernel:
    """The kernel of 8-bit Adam for these dtypes, on ranges that begin at blocks.

    It is eager, with a line of the log, without a compiler or where the loop gives other bits.
    """
    eager = BlockEager(rule)
    try:
        source = _source(gradient_dtype, payload_dtype, is_parallel=is_parallel)
        function: Any = cpp_library(source, _NO_ERRNO).update
    except LoopUnavailable as error:
        log_once(f"the host update of 8-bit states runs eagerly, which takes several times as long: {error}")
        return eager
    kernel = BlockLoop(rule, function)
    if not agree(kernel, eager, gradient_dtype, payload_dtype):
        log_once("the host update of 8-bit states runs eagerly: the compiled loop gives other results here")
        return eager
    return kernel


def _source(gradient_dtype: torch.dtype, payload_dtype: torch.dtype | None, *, is_parallel: bool) -> str:
    payload = _CPP_TYPES[payload_dtype]
    return SOURCE.format(
        block_numel=BLOCK_NUMEL,
        min_scale_bits=int(torch.tensor(MIN_SCALE, dtype=torch.float32).view(torch.int32)),
        num_codes=NUM_CODES,
        num_decades=NUM_DECADES,
        slopes=", ".join(f"{2**d * 10.0 ** (NUM_DECADES - 1 - d) / 0.9!r}f" for d in range(NUM_DECADES)),
        offsets=", ".join(f"{2**d * 0.8 / 0.9!r}f" for d in range(NUM_DECADES)),
        margin=_MARGIN,
        unsigned_margin=1 + _MARGIN,
        zero_code=int((code_values(True) < 0).sum()),
        gradient=_CPP_TYPES[gradient_dtype],
        payload=payload,
        pragma="#pragma omp parallel for schedule(static)" if is_parallel else "",
        cast="" if payload_dtype is None else f"payload[first + i] = static_cast<{payload}>(new_param[i]);",
    )


class BlockLoop:
    """The compiled loop, called on addresses."""

    def __init__(self, rule: UpdateRule, function: Any) -> None:
        self._lists = tuple(rule.states.lists())
        values, borders, _ = code_tables(torch.device("cpu"))
        self._tables = (values, borders)
        self._function = function
        function.restype = None
        num_addresses = 2 + 2 * len(self._lists) + 1 + len(self._tables)
        function.argtypes = [*[ctypes.c_void_p] * num_addresses, ctypes.c_int64]

    def __call__(
        self, read: Sequence[Tensor], written: Sequence[Tensor], start: int, end: int, coefficients: Tensor
    ) -> Callable[[], None]:
        gradient, *states = read
        addresses = [_address(gradient, start)]
        for tensors in (states, written):
            for entry, tensor in zip(self._lists, tensors, strict=False):
                addresses.append(_address(tensor, entry.entries(start, end).start))
        payload = written[len(self._lists) :]
        addresses.append(_address(payload[0], start) if payload else 0)
        tables = (table.data_ptr() for table in self._tables)
        return LoopCall(self._function, (*addresses, coefficients.data_ptr(), *tables, end - start))


def _address(tensor: Tensor, first: int) -> int:
    return tensor.data_ptr() + first * tensor.element_size()


@dataclass(frozen=True, slots=True)
class BlockEager:
    rule: UpdateRule

    def __call__(
        self, read: Sequence[Tensor], written: Sequence[Tensor], start: int, end: int, coefficients: Tensor
    ) -> Callable[[], None]:
        return partial(self._update, read, written, start, end, coefficients)

    def _update(
        self, read: Sequence[Tensor], written: Sequence[Tensor], start: int, end: int, coefficients: Tensor
    ) -> None:
        spec, (grad_scale, *row) = self.rule.states, coefficients.unbind(0)
        num_lists = len(tuple(spec.lists()))
        for first in range(start, end, EAGER_TILE_NUMEL):
            last = min(first + EAGER_TILE_NUMEL, end)
            param32, *states = (read_list(spec, read[1:], i, first, last) for i in range(1 + len(spec.names)))
            gradient = read[0][first:last].float() * grad_scale
            new = self.rule.formula(gradient, param32, states, row, rounded_sqrt)
            for position, values in enumerate(new):
                write_list(spec, written, position, first, last, values)
            for payload in written[num_lists:]:
                payload[first:last].copy_(new[0])


def agree(kernel: Kernel, eager: Kernel, gradient_dtype: torch.dtype, payload_dtype: torch.dtype | None) -> bool:
    """Whether both kernels make the same of blocks and a rest between elements that neither may touch."""
    coefficients = arbitrary_coefficients()
    found, wanted = (_random_chunk(gradient_dtype, payload_dtype) for _ in range(2))
    for update, chunk in ((kernel, found), (eager, wanted)):
        update(chunk[:6], chunk[1:], BLOCK_NUMEL, _AGREED_NUMEL, coefficients)()
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def _random_chunk(gradient_dtype: torch.dtype, payload_dtype: torch.dtype | None) -> list[Tensor]:
    """Gradient, param32, states and payload; the gradient lies in the payload where their dtypes allow it."""
    numel, generator = _AGREED_NUMEL + 100, torch.Generator(device="cpu").manual_seed(0)
    gradient, param32, spread = (
        torch.randn(numel, generator=generator, dtype=torch.float32, device="cpu") for _ in range(3)
    )
    gradient = (gradient * (2 * spread).exp2()).to(gradient_dtype)
    codes = [torch.randint(NUM_CODES, (numel,), generator=generator, dtype=torch.uint8, device="cpu") for _ in range(2)]
    scales = [torch.rand(-(-numel // BLOCK_NUMEL), generator=generator, device="cpu") for _ in range(2)]
    chunk = [gradient, param32, *codes, *scales]
    if payload_dtype is not None:
        chunk.append(gradient if payload_dtype is gradient_dtype else torch.zeros_like(param32, dtype=payload_dtype))
    return chunk
