"""The host update: a rule on one chunk, in one pass over its memory.

A chunk's pieces become ranges that share hyperparameters and step count, over which `cpu_update_kernel`'s loop goes.
Step ``t = 1`` starts from states of zero, whatever their memory held, so that the states need no initialisation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from chunkc.ir.state_spec import StateList
from chunkc.runtime.update.block_kernel import block_kernel
from chunkc.runtime.update.cpu_update_kernel import host_kernel, in_one_call
from chunkc.runtime.update.rules import NUM_COEFFICIENTS, Hyper, UpdateRule, coefficients_of
from chunkc.runtime.update.update_inputs import StepInputs

PARALLEL_NUMEL = 32 * 1024
"""Shorter ranges are updated by the calling thread alone, as PyTorch's own operators would."""

_MAX_READY, _MAX_CALLS = 256, 16
"""Ranges of a chunk, and sets of them, whose updates are kept ready: others follow where other parameters are stepped
each time."""

_Range = tuple[int, int, bool, bool]
"""Elements [start, end), whether threads share them, and whether it is the first step of their parameters."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of parameter ``param`` that lies in a chunk: elements [start, end) of the chunk."""

    param: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class _Group:
    """Values that elements must share to be updated by one call of the kernel."""

    hyper: Hyper
    step: int


@dataclass(frozen=True, slots=True)
class _Run:
    """Elements [start, end) of the chunk, without a gap; inactive without a group."""

    group: _Group | None
    start: int
    end: int


class ChunkUpdate:
    """A rule on one chunk; made once per chunk and used every step.

    ``payload`` holds grad16 before the update, unless a ``gradient`` is given, which is only read, and param16 after
    it; beside a ``gradient`` it may be ``param32`` itself. ``states`` are param32 and the rule's lists, in their dtypes
    (`StateSpec.lists`). What lies between ``pieces`` is not touched; where states are quantised, these begin at blocks.
    All tensors are contiguous, 1-D, on the host, and as long as the payload or its blocks, else ValueError.

    With a ``target``, a payload and its states in memory of their own, an update writes there, also what it leaves as
    it is, and nothing else.
    """

    def __init__(
        self,
        rule: UpdateRule,
        payload: Tensor,
        states: Sequence[Tensor],
        pieces: Sequence[Piece],
        *,
        gradient: Tensor | None = None,
        target: tuple[Tensor, Sequence[Tensor]] | None = None,
    ) -> None:
        self._payload = payload
        self._lists = tuple(rule.states.lists())
        self._states = tuple(states)
        self._target_payload, self._target_states = (payload, self._states) if target is None else target
        self._has_target = target is not None
        gradient_chunk = payload if gradient is None else gradient
        self._is_cast = payload.data_ptr() != self._states[0].data_ptr() or payload.numel() == 0
        self._read = (gradient_chunk, *self._states)
        self._first_read = (gradient_chunk, self._states[0], *self._target_states[1:])
        self._written = (*self._target_states, *((self._target_payload,) if self._is_cast else ()))
        self._pieces = tuple(sorted((p for p in pieces if p.start != p.end), key=lambda p: p.start))
        _check_tensors(payload, gradient_chunk, self._states, self._lists)
        _check_tensors(payload, self._target_payload, self._target_states, self._lists)
        _check_pieces(self._pieces, payload.numel(), rule.states.block_numel)
        if not self._is_cast and gradient is None:
            raise ValueError("where the payload is param32, the gradient has memory of its own")
        dtypes = gradient_chunk.dtype, payload.dtype if self._is_cast else None
        make_kernel = block_kernel if rule.states.quantised else host_kernel
        self._kernel = make_kernel(rule, *dtypes, is_parallel=False)
        is_large = payload.numel() >= PARALLEL_NUMEL
        self._large_kernel = make_kernel(rule, *dtypes, is_parallel=True) if is_large else self._kernel
        self._ready: dict[_Range, tuple[Tensor, Callable[[], None]]] = {}
        self._calls: dict[tuple[_Range, ...], Callable[[], None]] = {}

    @torch.no_grad()
    def update(self, inputs: StepInputs) -> None:
        """Update active parameters as decided, and write param16 of all; ValueError below step 1."""
        factor, is_skipped = (1.0, 0.0) if inputs.seen is None else inputs.seen.tolist()
        if is_skipped:
            self._keep()
            return
        num_threads = torch.get_num_threads()  # asking also gives a new thread PyTorch's number of OpenMP threads
        ranges = list[_Range]()
        for run in self._runs(inputs):
            group = run.group
            if group is None:
                self._keep_run(run.start, run.end)
                continue
            if group.step == 1:
                self._clear_states(run.start, run.end)
            is_large = num_threads > 1 and run.end - run.start >= PARALLEL_NUMEL
            ranges.append((run.start, run.end, is_large, group.step == 1 and self._has_target))
            self._over(ranges[-1])[0].copy_(coefficients_of(group.hyper, group.step, factor))
        self._call_of(tuple(ranges))()

    def _over(self, over: _Range) -> tuple[Tensor, Callable[[], None]]:
        """Coefficients of a range, and the kernel over it that reads them, made ready when first asked for.

        The first step of parameters takes the cleared states of the target.
        """
        ready = self._ready.get(over)
        if ready is None:
            start, end, is_large, is_first = over
            with torch.inference_mode(False):
                coefficients = torch.empty(1 + NUM_COEFFICIENTS, dtype=torch.float32, device="cpu")
            kernel = self._large_kernel if is_large else self._kernel
            read = self._first_read if is_first else self._read
            ready = self._ready[over] = coefficients, kernel(read, self._written, start, end, coefficients)
        return ready

    def _call_of(self, ranges: tuple[_Range, ...]) -> Callable[[], None]:
        """One call of the kernels over all ``ranges``."""
        call = self._calls.get(ranges)
        if call is None:
            call = in_one_call([self._over(over)[1] for over in ranges])
            if len(self._calls) >= _MAX_CALLS or len(self._ready) >= _MAX_READY:
                self._calls.clear()
                self._ready = {over: self._ready[over] for over in ranges}
            self._calls[ranges] = call
        return call

    @torch.no_grad()
    def restore(self) -> None:
        """Write param16 of all parameters from param32, over whatever the payload holds."""
        for run in self._runs(None):
            _cast(self._payload, self._states[0], run.start, run.end)

    def _keep(self) -> None:
        """Leave everything as it is, in the target if there is one."""
        for run in self._runs(None):
            self._keep_run(run.start, run.end)

    def _runs(self, inputs: StepInputs | None) -> Iterator[_Run]:
        """Ranges of touching pieces to treat alike, ascending; all are inactive without inputs."""
        run: _Run | None = None
        for piece in self._pieces:
            hyper = None if inputs is None else inputs.hypers.get(piece.param)
            group = None if inputs is None or hyper is None else _Group(hyper, inputs.steps[piece.param])
            if group is not None and group.step < 1:
                raise ValueError(f"step counts start at 1, parameter {piece.param} has {group.step}")
            if run is not None and run.end == piece.start and run.group == group:
                run = _Run(group, run.start, piece.end)
                continue
            if run is not None:
                yield run
            run = _Run(group, piece.start, piece.end)
        if run is not None:
            yield run

    def _keep_run(self, start: int, end: int) -> None:
        if self._has_target:
            for entry, state, target in zip(self._lists, self._states, self._target_states, strict=True):
                kept = entry.entries(start, end)
                target[kept].copy_(state[kept])
        _cast(self._target_payload, self._states[0], start, end)

    def _clear_states(self, start: int, end: int) -> None:
        """Codes times scales of zero are zeros, whatever the codes."""
        for entry, state in zip(self._lists[1:], self._target_states[1:], strict=True):
            state[entry.entries(start, end)].zero_()


def _cast(payload: Tensor, param32: Tensor, start: int, end: int) -> None:
    if payload.data_ptr() != param32.data_ptr():
        payload[start:end].copy_(param32[start:end])


def _check_tensors(payload: Tensor, gradient: Tensor, states: Sequence[Tensor], lists: Sequence[StateList]) -> None:
    if len(states) != len(lists):
        raise ValueError(f"the rule keeps {[entry.name for entry in lists]}, found {len(states)} lists")
    lengths = [payload.numel(), *(entry.entries(0, payload.numel()).stop for entry in lists)]
    for tensor, length in zip((gradient, *states), lengths, strict=True):
        if tensor.dim() != 1 or tensor.numel() != length or not tensor.is_contiguous():
            raise ValueError(
                "a chunk's tensors are contiguous, have one dimension and the same number of elements; "
                f"found shape {tuple(tensor.shape)} beside {tuple(payload.shape)}"
            )
    for entry, tensor in zip(lists, states, strict=True):
        if tensor.dtype is not getattr(torch, entry.dtype):
            raise ValueError(f"{entry.name} is {entry.dtype}, found {tensor.dtype}")
    if not (payload.is_floating_point() and gradient.is_floating_point()):
        raise ValueError(f"payload and gradient are floating point, found {payload.dtype} and {gradient.dtype}")


def _check_pieces(pieces: Sequence[Piece], numel: int, block_numel: int) -> None:
    end = 0
    for piece in pieces:
        if piece.start % block_numel:
            raise ValueError(f"{piece} begins within a block of {block_numel} elements")
        if not end <= piece.start < piece.end <= numel:
            raise ValueError(f"{piece} overlaps another piece or leaves the chunk of {numel} elements")
        end = piece.end
