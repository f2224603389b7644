"""The host update: Adam and AdamW on one chunk, in one pass over tiles that stay in cache.

Per element, with the gradient ``g`` in float32 (Kingma and Ba, "Adam", algorithm 1; Loshchilov and Hutter, "Decoupled
weight decay regularization", algorithm 2; semantics and order of operations are torch.optim's)::

    AdamW: p = p * (1 - lr * weight_decay)        Adam: g = g + weight_decay * p
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    p = p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
    param16 = p, rounded to nearest

Step ``t = 1`` starts from zero moments, whatever the memory of m and v held, so that a new optimizer over the same
model starts afresh and the moments need no initialisation.

**An element's result does not depend on where it lies.** PyTorch's fused CPU kernel gives different bits to full
vectors and to the rest of a range that is shorter than a vector (the rest is computed in double precision), and each
thread's share of a range has such a rest. So the kernel is only given ranges whose length is a multiple of vector
length times threads, where every share consists of full vectors; what remains of a range, and small parameters, are
gathered into padded scratch, updated there together and scattered back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from chunkc._torch_compat import foreach_copy_, fused_adam_, fused_adamw_
from chunkc.runtime.step_inputs import Hyper, StepInputs

TILE_NUMEL = 256 * 1024
"""Elements of one fused call: four fp32 tiles and the payload's stay in a core's cache."""

SMALL_NUMEL = 4096
"""Ranges below this many elements are gathered: copying them costs less than a parallel region of their own."""

GATHER_NUMEL = 16 * 1024
"""Elements that are gathered for one fused call."""

VECTOR_NUMEL = 16
"""A multiple of the elements in a vector register on every architecture that PyTorch vectorises for."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of parameter ``param`` that lies in a chunk: elements [start, end) of the chunk."""

    param: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class _Group:
    """What elements must share to be updated by one fused call."""

    hyper: Hyper
    step: int


@dataclass(frozen=True, slots=True)
class _Run:
    """Elements [start, end) of the chunk, without a gap; inactive without a group."""

    group: _Group | None
    start: int
    end: int


class Scratch:
    """Working memory of an update (1.3 MB); updates that never run at the same time may share one."""

    def __init__(self) -> None:
        self.gradient = torch.empty(TILE_NUMEL, dtype=torch.float32, device="cpu")
        self.step = torch.zeros((), dtype=torch.float64, device="cpu")
        self._rows = torch.empty(4, GATHER_NUMEL, dtype=torch.float32, device="cpu")

    def rows(self, numel: int) -> Tensor:
        """Four rows of ``numel`` elements: param32, gradient, momentum, variance."""
        if numel > self._rows.shape[1]:
            self._rows = torch.empty(4, numel, dtype=torch.float32, device="cpu")
        return self._rows[:, :numel]


class ChunkUpdate:
    """Adam on one chunk; made once per chunk and used every step.

    Args:
        payload: the chunk in compute dtype. Holds grad16 before the update unless ``gradient`` is given, and param16
            after it. In fp32 it may be ``param32`` itself beside a ``gradient``: param16 and param32 are one then, and
            nothing is cast or tiled.
        param32, exp_avg, exp_avg_sq: the OS triple in float32.
        pieces: the parameters' elements in the chunk. What lies between them is neither read nor written.
        gradient: the gradient chunk, where the overlay is not legal. It is only read.
        scratch: working memory shared with other updates on the same worker.

    All tensors are contiguous host tensors with one dimension and the same number of elements.

    Raises:
        ValueError: when a tensor or a piece breaks these rules.
    """

    def __init__(
        self,
        payload: Tensor,
        param32: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        pieces: Sequence[Piece],
        *,
        gradient: Tensor | None = None,
        scratch: Scratch | None = None,
    ) -> None:
        self._payload = payload
        self._param32 = param32
        self._exp_avg = exp_avg
        self._exp_avg_sq = exp_avg_sq
        self._gradient = payload if gradient is None else gradient
        self._is_cast = payload.data_ptr() != param32.data_ptr() or payload.numel() == 0
        self._is_tiled = self._is_cast or self._gradient.dtype is not torch.float32
        self._pieces = tuple(sorted((p for p in pieces if p.start != p.end), key=lambda p: p.start))
        self._scratch = Scratch() if scratch is None else scratch
        _check_tensors(payload, self._gradient, (param32, exp_avg, exp_avg_sq))
        _check_pieces(self._pieces, payload.numel())
        if not self._is_cast and gradient is None:
            raise ValueError("where the payload is param32, the gradient has memory of its own")

    @torch.no_grad()
    def update(self, inputs: StepInputs) -> None:
        """Update the active parameters and write param16 of all.

        Raises:
            ValueError: when a step count is below 1; nothing has changed then.
        """
        unit = VECTOR_NUMEL * torch.get_num_threads()
        tile_numel = max((TILE_NUMEL if self._is_tiled else self._payload.numel()) // unit, 1) * unit
        gathered: dict[_Group, list[slice]] = {}
        for run in list(self._runs(inputs)):
            if run.group is None:
                self._cast(slice(run.start, run.end))
                continue
            self._start_moments(run.group, slice(run.start, run.end))
            numel = run.end - run.start
            middle = run.end - numel % unit if numel >= SMALL_NUMEL else run.start
            for start in range(run.start, middle, tile_numel):
                self._update_tile(run.group, slice(start, min(start + tile_numel, middle)))
            if middle < run.end:
                gathered.setdefault(run.group, []).append(slice(middle, run.end))
        for group, spans in gathered.items():
            for batch in _batches(spans, max(GATHER_NUMEL // unit, 1) * unit):
                self._update_gathered(group, batch, unit)

    @torch.no_grad()
    def restore(self) -> None:
        """Write param16 of all parameters from param32, over whatever the payload holds."""
        for run in self._runs(None):
            self._cast(slice(run.start, run.end))

    def _runs(self, inputs: StepInputs | None) -> Iterator[_Run]:
        """Ranges of touching pieces that can be treated alike, ascending; all are inactive without inputs."""
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

    def _cast(self, span: slice) -> None:
        if self._is_cast:
            self._payload[span].copy_(self._param32[span])

    def _start_moments(self, group: _Group, span: slice) -> None:
        if group.step == 1:
            self._exp_avg[span].zero_()
            self._exp_avg_sq[span].zero_()

    def _update_tile(self, group: _Group, span: slice) -> None:
        """Update in place; the length of ``span`` is a multiple of vector length times threads."""
        gradient = self._gradient[span]
        if gradient.dtype is not torch.float32:
            gradient = self._scratch.gradient[: gradient.numel()].copy_(gradient)
        self._fused(group, self._param32[span], gradient, self._exp_avg[span], self._exp_avg_sq[span])
        self._cast(span)

    def _update_gathered(self, group: _Group, spans: Sequence[slice], unit: int) -> None:
        """Update copies in padded scratch, and copy back."""
        sizes = [span.stop - span.start for span in spans]
        numel = sum(sizes)
        rows = self._scratch.rows(-(-numel // unit) * unit)
        rows[:, numel:].zero_()
        parts = [row[:numel].split(sizes) for row in rows]
        homes = (self._param32, self._gradient, self._exp_avg, self._exp_avg_sq)
        for part, home in zip(parts, homes, strict=True):
            foreach_copy_(part, [home[span] for span in spans])
        self._fused(group, *rows)
        for i, home in ((0, self._param32), (2, self._exp_avg), (3, self._exp_avg_sq), (0, self._payload)):
            foreach_copy_([home[span] for span in spans], parts[i])

    def _fused(self, group: _Group, param: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
        hyper = group.hyper
        kernel = fused_adamw_ if hyper.decoupled else fused_adam_
        kernel(
            [param],
            [gradient],
            [exp_avg],
            [exp_avg_sq],
            [],
            [self._scratch.step.fill_(group.step)],
            lr=hyper.lr,
            beta1=hyper.beta1,
            beta2=hyper.beta2,
            weight_decay=hyper.weight_decay,
            eps=hyper.eps,
            amsgrad=False,
            maximize=False,
        )


def _batches(spans: Sequence[slice], capacity: int) -> Iterator[list[slice]]:
    """``spans`` in order, in lists of at most ``capacity`` elements; a span is cut where a list is full."""
    batch: list[slice] = []
    room = capacity
    for span in spans:
        start = span.start
        while start < span.stop:
            end = min(span.stop, start + room)
            batch.append(slice(start, end))
            room -= end - start
            start = end
            if room == 0:
                yield batch
                batch, room = [], capacity
    if batch:
        yield batch


def _check_tensors(payload: Tensor, gradient: Tensor, triple: tuple[Tensor, Tensor, Tensor]) -> None:
    for tensor in (payload, gradient, *triple):
        if tensor.dim() != 1 or tensor.numel() != payload.numel() or not tensor.is_contiguous():
            raise ValueError(
                "a chunk's tensors are contiguous, have one dimension and the same number of elements; "
                f"found shape {tuple(tensor.shape)} beside {tuple(payload.shape)}"
            )
    if any(tensor.dtype is not torch.float32 for tensor in triple):
        raise ValueError(f"an OS triple is float32, found {[str(tensor.dtype) for tensor in triple]}")
    if not (payload.is_floating_point() and gradient.is_floating_point()):
        raise ValueError(f"payload and gradient are floating point, found {payload.dtype} and {gradient.dtype}")


def _check_pieces(pieces: Sequence[Piece], numel: int) -> None:
    end = 0
    for piece in pieces:
        if not end <= piece.start < piece.end <= numel:
            raise ValueError(f"{piece} overlaps another piece or leaves the chunk of {numel} elements")
        end = piece.end
