"""Arithmetic of the host update: one definition of Adam, compiled to one loop over the chunk's memory.

Per element, with the gradient ``g`` in float32 (Kingma and Ba, "Adam", algorithm 1; Loshchilov and Hutter, "Decoupled
weight decay regularization", algorithm 2; semantics are torch.optim's)::

    AdamW: p = p * (1 - lr * weight_decay)        Adam: g = g + weight_decay * p
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    p = p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
    param16 = p, rounded to nearest even

The quotient is computed as ``(lr * c / (1 - beta1^t)) * m / (sqrt(v) + eps * c)`` with ``c = sqrt(1 - beta2^t)``: one
division to an element instead of two, and no more roundings.

`_adam` says this in PyTorch. Inductor compiles it to C++, and the update calls that loop by ctypes on the memory
itself: no tensors are made, memory is passed over once, and the GIL is free meanwhile (Inductor's own Python wrapper
keeps it). Dynamo takes no part. Two things are not as one would first write them:

* The function returns new values, and the loop is given the same memory for inputs and outputs. Each output is computed
  from the inputs and not from other outputs (the compiler finds what they share): Inductor vectorises a loop by the
  vector length of 16-bit values only where every one of its parts reads or writes some. Otherwise half a vector of
  them is stored under a mask, and where the gradient lies in the payload the next load waits for that store, which
  halves the speed.
* Short ranges take a second loop without a parallel region.

**An element's result depends neither on where it lies nor on the number of threads**: every operation is rounded as
IEEE 754 says (contraction to fused multiply-adds is off), in full vectors, in the masked rest and in the function run
eagerly. A loop is used only after it gave the bits of `_adam` in place; without a C++ compiler the update runs
`_adam` itself over tiles, at a fraction of the speed, to the same bits.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from chunkc._torch_compat.inductor import LoopUnavailable, inductor_loop
from chunkc.runtime.update.update_inputs import Hyper, row_of

EAGER_TILE_NUMEL = 64 * 1024
"""Elements that are updated at a time without a compiled loop: the temporaries stay in a core's cache."""

logger = logging.getLogger("chunkc")


class Kernel(Protocol):
    """Updates elements [start, end) of a chunk in place.

    ``tensors`` are gradient, param32, exp_avg, exp_avg_sq and, where param32 itself is not the payload, the payload,
    which may be the gradient: host memory, contiguous, one dimension, the same number of elements, the dtypes that the
    kernel was made for.
    """

    def __call__(self, tensors: Sequence[Tensor], start: int, end: int, coefficients: Tensor) -> None: ...


def coefficients_of(hyper: Hyper, step: int, grad_scale: float = 1.0) -> Tensor:
    """Compute the coefficients that `_adam` takes, float32 [9], in float64 and rounded once.

    Raises:
        ValueError: when the step count is below 1.
    """
    step_size, correction, eps, decay, l2, beta1, rest1, beta2, rest2, _ = row_of(hyper, step)
    row = (grad_scale, decay, l2, beta1, rest1, beta2, rest2, step_size * correction, eps * correction)
    return torch.tensor(row, dtype=torch.float32, device="cpu")


@cache
def host_kernel(gradient_dtype: torch.dtype, payload_dtype: torch.dtype | None, *, is_parallel: bool) -> Kernel:
    """The kernel for these dtypes, on the calling thread alone or on as many as PyTorch gives it there.

    The first call takes about a second, and some more where Inductor's cache on disk does not hold the loop. Without a
    compiler, or where the loop is not what was asked for, one line of the log says so and the kernel is eager.
    """
    function = _outputs_anew(payload_dtype)
    dtypes = [gradient_dtype, torch.float32, torch.float32, torch.float32, torch.float32]
    sizes = [4096, 4096, 4096, 4096, 9]
    examples = [torch.ones(n, dtype=dtype, device="cpu") for n, dtype in zip(sizes, dtypes, strict=True)]
    try:
        library, symbol, order = inductor_loop(function, examples, is_parallel=is_parallel)
    except LoopUnavailable as error:
        _log_once(f"the host update runs eagerly, which takes several times as long: {error}")
        return _run_eagerly
    kernel = _Loop(getattr(ctypes.CDLL(library), symbol), order)
    if not _has_the_bits_of_eager(kernel, gradient_dtype, payload_dtype):
        _log_once("the host update runs eagerly: the loop that Inductor compiled gives other results on this processor")
        return _run_eagerly
    return kernel


def _adam(
    gradient: Tensor,
    param32: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    coefficients: Tensor,
    *,
    sqrt: Callable[[Tensor], Tensor] = torch.sqrt,
) -> tuple[Tensor, Tensor, Tensor]:
    """New param32, exp_avg and exp_avg_sq."""
    grad_scale, decay, l2, beta1, rest1, beta2, rest2, step_size, eps = coefficients.unbind(0)
    g = gradient.float() * grad_scale + l2 * param32
    m = beta1 * exp_avg + rest1 * g
    v = beta2 * exp_avg_sq + rest2 * g * g
    return param32 * decay - step_size * m / (sqrt(v) + eps), m, v


def _outputs_anew(payload_dtype: torch.dtype | None) -> Callable[..., tuple[Tensor, ...]]:
    """Return a function for the outputs of `_adam` and the payload, each by its own computation.

    The compiled loop computes what they share once.
    """

    def outputs(*inputs: Tensor) -> tuple[Tensor, ...]:
        triple = tuple(_adam(*inputs)[i] for i in range(3))
        return triple if payload_dtype is None else (*triple, _adam(*inputs)[0].to(payload_dtype))

    return outputs


class _Loop:
    """A compiled loop, called on addresses. ctypes releases the GIL meanwhile."""

    def __init__(self, function: Callable[..., None], order: Sequence[tuple[str, int]]) -> None:
        self._function = function
        function.restype = None  # type: ignore[attr-defined]
        function.argtypes = [  # type: ignore[attr-defined]
            ctypes.c_int64 if kind == "numel" else ctypes.c_void_p for kind, _ in order
        ]
        inputs, outputs = (0, 1, 2, 3, -2), (1, 2, 3, 4)
        places = {"input": inputs, "output": outputs, "numel": (-1,)}
        self._order = tuple(places[kind][index] for kind, index in order)

    def __call__(self, tensors: Sequence[Tensor], start: int, end: int, coefficients: Tensor) -> None:
        values = [t.data_ptr() + start * t.element_size() for t in tensors]
        values += (coefficients.data_ptr(), end - start)
        self._function(*[values[i] for i in self._order])


def _rounded_sqrt(values: Tensor) -> Tensor:
    """Return the root rounded to nearest.

    Eager PyTorch may take MKL's root, which can be off by one unit in the last place. The root of a float32 is never so
    close to the middle between two float32 that float64's error could matter.
    """
    return values.double().sqrt().float()


def _run_eagerly(tensors: Sequence[Tensor], start: int, end: int, coefficients: Tensor) -> None:
    for first in range(start, end, EAGER_TILE_NUMEL):
        gradient, p, m, v, *payload = (t[first : min(first + EAGER_TILE_NUMEL, end)] for t in tensors)
        new = _adam(gradient, p, m, v, coefficients, sqrt=_rounded_sqrt)
        for output, value in zip((p, m, v, *payload), (*new, new[0]), strict=False):
            output.copy_(value)


def _has_the_bits_of_eager(kernel: Kernel, gradient_dtype: torch.dtype, payload_dtype: torch.dtype | None) -> bool:
    """Whether both kernels make the same of vectors and a rest between elements that neither may touch."""
    hyper = Hyper(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-6, weight_decay=0.1, decoupled=False)
    coefficients = coefficients_of(hyper, 3, grad_scale=0.3)
    found, wanted = _random_chunk(gradient_dtype, payload_dtype), _random_chunk(gradient_dtype, payload_dtype)
    kernel(found, 3, 1006, coefficients)
    _run_eagerly(wanted, 3, 1006, coefficients)
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def _random_chunk(gradient_dtype: torch.dtype, payload_dtype: torch.dtype | None) -> list[Tensor]:
    """1009 elements; the gradient lies in the payload where their dtypes allow it."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    draws = [torch.randn(1009, generator=generator, dtype=torch.float32, device="cpu") for _ in range(4)]
    chunk = [draws[0].to(gradient_dtype), draws[1], draws[2], draws[3].square()]
    if payload_dtype is not None:
        chunk.append(chunk[0] if payload_dtype is gradient_dtype else torch.zeros_like(draws[0], dtype=payload_dtype))
    return chunk


@cache
def _log_once(message: str) -> None:
    logger.warning(message)
