"""The loop of the host update: a rule's formula, compiled to one loop over the chunk's memory.

Inductor compiles the PyTorch formula of `chunkc.runtime.update.rules` to C++, and the update calls that loop by ctypes
on the memory itself: no tensors are made, memory is passed over once, and the GIL is free meanwhile. The function
returns new values, each computed from the inputs alone, and the loop is given the same memory for inputs and outputs:
Inductor vectorises by the vector length of 16-bit values only where every part of a loop reads or writes some. Half
vectors are stored under a mask, for which the next load of an overlaid gradient waits, at half the speed. Short ranges
take a second loop without a parallel region.

**An element's result depends neither on where it lies nor on the number of threads**: every operation is rounded as
IEEE 754 says (contraction to fused multiply-adds is off), in full vectors, in the masked rest and in the function run
eagerly. A loop is used only after it gave the bits of the formula in place; without a C++ compiler the update runs
the formula itself over tiles, at a fraction of the speed, to the same bits.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor

from chunkc._torch_compat.inductor import LoopUnavailable, cpp_library, inductor_loop, loop_facts
from chunkc.progress import stage
from chunkc.runtime.update.kept_loops import CompiledLoop, kept_or_compiled
from chunkc.runtime.update.rules import NUM_COEFFICIENTS, Sqrt, UpdateRule

EAGER_TILE_NUMEL = 64 * 1024
"""Elements that are updated at a time without a compiled loop: the temporaries stay in a core's cache."""

logger = logging.getLogger("chunkc")


Kernel = Callable[[Sequence[Tensor], Sequence[Tensor], int, int, Tensor], Callable[[], None]]
"""Makes ready the update of [start, end) from gradient, param32 and states to param32, states and payload.

All are on the host, 1-D and contiguous; what is written may be what is read, element by element.

What it returns reads the coefficients when it is called; the caller keeps all tensors alive.
"""


@cache
def host_kernel(
    rule: UpdateRule, gradient_dtype: torch.dtype, payload_dtype: torch.dtype | None, *, is_parallel: bool
) -> Kernel:
    """The kernel for these dtypes; eager, with a line of the log, without a compiler or its exact bits."""
    stage("compiling the update of optimizer states")
    num_lists = 1 + len(rule.states.names)
    examples = [torch.ones(4096, dtype=torch.float32, device="cpu") for _ in range(1 + num_lists)]
    examples = [examples[0].to(gradient_dtype), *examples[1:], arbitrary_coefficients()]
    eager = _Eager(rule)

    def compile_loop() -> CompiledLoop:
        outputs = _outputs_anew(rule, payload_dtype)
        return CompiledLoop(*inductor_loop(outputs, examples, is_parallel=is_parallel))

    facts = repr((rule, gradient_dtype, payload_dtype, loop_facts(is_parallel=is_parallel)))
    try:
        for loop in kept_or_compiled(facts, compile_loop):
            kernel = _Loop(getattr(ctypes.CDLL(loop.library), loop.symbol), loop.order, num_lists)
            if _agree(kernel, eager, gradient_dtype, payload_dtype):
                return kernel
    except LoopUnavailable as error:
        log_once(f"the host update runs eagerly, which takes several times as long: {error}")
        return eager
    log_once("the host update runs eagerly: the loop that Inductor compiled gives other results on this processor")
    return eager


def _new_lists(
    rule: UpdateRule, gradient: Tensor, param32: Tensor, states: Sequence[Tensor], coefficients: Tensor, sqrt: Sqrt
) -> tuple[Tensor, ...]:
    grad_scale, *row = coefficients.unbind(0)
    return rule.formula(gradient.float() * grad_scale, param32, states, row, sqrt)


def _outputs_anew(rule: UpdateRule, payload_dtype: torch.dtype | None) -> Callable[..., tuple[Tensor, ...]]:
    """Return a function that computes every output by itself; the loop shares what is common."""

    def outputs(*inputs: Tensor) -> tuple[Tensor, ...]:
        gradient, param32, *states, coefficients = inputs

        def new(position: int) -> Tensor:
            return _new_lists(rule, gradient, param32, states, coefficients, torch.sqrt)[position]

        lists = tuple(new(i) for i in range(1 + len(states)))
        return lists if payload_dtype is None else (*lists, new(0).to(payload_dtype))

    return outputs


@dataclass(frozen=True, slots=True)
class LoopCall:
    """A call of a compiled loop on addresses. ctypes releases the GIL meanwhile."""

    function: Any
    values: tuple[int, ...]

    def __call__(self) -> None:
        self.function(*self.values)


def in_one_call(calls: Sequence[Callable[[], None]]) -> Callable[[], None]:
    """Make one call of ``calls``, which come one after the other.

    Of compiled loops it is one without the GIL from the first to the last: between two calls another thread that holds
    the GIL keeps it for milliseconds.
    """
    loops = [call for call in calls if isinstance(call, LoopCall)]
    if len(loops) == len(calls) == 1:
        return partial(loops[0].function, *loops[0].values)
    num_values = {len(loop.values) for loop in loops}
    caller = _loop_caller(*num_values) if len(loops) == len(calls) and len(num_values) == 1 else None
    if caller is None:
        return partial(_call_each, tuple(calls))
    functions = [ctypes.cast(loop.function, ctypes.c_void_p).value or 0 for loop in loops]
    addresses = (ctypes.c_uint64 * len(functions))(*functions)
    values = [value for loop in loops for value in loop.values]
    return partial(caller, len(loops), addresses, (ctypes.c_uint64 * len(values))(*values))


def _call_each(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()


@cache
def _loop_caller(num_values: int) -> Callable[..., None] | None:
    """A compiled function that calls loops of so many arguments; None without a compiler."""
    types, arguments = ", ".join(["uint64_t"] * num_values), ", ".join(f"values[{i}]" for i in range(num_values))
    source = f"""
#include <cstdint>

extern "C" void call_loops(int64_t num_loops, const uint64_t* loops, const uint64_t* values) {{
    for (int64_t i = 0; i < num_loops; ++i, values += {num_values}) {{
        reinterpret_cast<void (*)({types})>(loops[i])({arguments});
    }}
}}
"""
    try:
        function = cpp_library(source).call_loops
    except LoopUnavailable as error:
        log_once(f"a host update of several ranges needs the GIL between them: {error}")
        return None
    function.restype = None
    function.argtypes = [ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
    return cast(Callable[..., None], function)


class _Loop:
    """A compiled loop, called on addresses."""

    def __init__(self, function: Callable[..., None], order: Sequence[tuple[str, int]], num_lists: int) -> None:
        self._function = function
        function.restype = None  # type: ignore[attr-defined]
        function.argtypes = [  # type: ignore[attr-defined]
            ctypes.c_int64 if kind == "numel" else ctypes.c_void_p for kind, _ in order
        ]
        num_read = 1 + num_lists
        written = tuple(range(num_read, num_read + num_lists + 1))
        places = {"input": (*range(num_read), -2), "output": written, "numel": (-1,)}
        self._order = tuple(places[kind][index] for kind, index in order)

    def __call__(
        self, read: Sequence[Tensor], written: Sequence[Tensor], start: int, end: int, coefficients: Tensor
    ) -> Callable[[], None]:
        values = [t.data_ptr() + start * t.element_size() for t in (*read, *written)]
        values += (coefficients.data_ptr(), end - start)
        return LoopCall(self._function, tuple(values[i] for i in self._order))


def rounded_sqrt(values: Tensor) -> Tensor:
    """Return the root rounded to nearest, by float64: MKL's can be off by one unit in the last place."""
    return values.double().sqrt().float()


@dataclass(frozen=True, slots=True)
class _Eager:
    rule: UpdateRule

    def __call__(
        self, read: Sequence[Tensor], written: Sequence[Tensor], start: int, end: int, coefficients: Tensor
    ) -> Callable[[], None]:
        return partial(self._update, read, written, start, end, coefficients)

    def _update(
        self, read: Sequence[Tensor], written: Sequence[Tensor], start: int, end: int, coefficients: Tensor
    ) -> None:
        for first in range(start, end, EAGER_TILE_NUMEL):
            tile = slice(first, min(first + EAGER_TILE_NUMEL, end))
            gradient, param32, *states = (t[tile] for t in read)
            new = _new_lists(self.rule, gradient, param32, states, coefficients, rounded_sqrt)
            for output, value in zip(written, (*new, new[0]), strict=False):
                output[tile].copy_(value)


def _agree(kernel: Kernel, eager: _Eager, gradient_dtype: torch.dtype, payload_dtype: torch.dtype | None) -> bool:
    """Whether both kernels make the same of vectors and a rest between elements that neither may touch."""
    num_lists, coefficients = 1 + len(eager.rule.states.names), arbitrary_coefficients()
    found, wanted = (_random_chunk(num_lists, gradient_dtype, payload_dtype) for _ in range(2))
    for update, chunk in ((kernel, found), (eager, wanted)):
        update(chunk[: 1 + num_lists], chunk[1:], 3, 1006, coefficients)()
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def arbitrary_coefficients() -> Tensor:
    return torch.linspace(0.1, 0.9, 1 + NUM_COEFFICIENTS, dtype=torch.float32, device="cpu")


def _random_chunk(num_lists: int, gradient_dtype: torch.dtype, payload_dtype: torch.dtype | None) -> list[Tensor]:
    """Lists of 1009 elements; the gradient lies in the payload where their dtypes allow it."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    draws = [torch.randn(1009, generator=generator, dtype=torch.float32, device="cpu") for _ in range(1 + num_lists)]
    chunk = [draws[0].to(gradient_dtype), draws[1], *(draw.square() for draw in draws[2:])]
    if payload_dtype is not None:
        chunk.append(chunk[0] if payload_dtype is gradient_dtype else torch.zeros_like(draws[0], dtype=payload_dtype))
    return chunk


@cache
def log_once(message: str) -> None:
    logger.warning(message)
