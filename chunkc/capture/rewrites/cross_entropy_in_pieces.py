"""Cross-entropy of a linear layer's results, without a tensor of tokens x vocabulary in fp32.

    forward, by rows      logits of some tokens ─ maximum m and log-sum s of each row ─ loss of each row
    backward, by columns  logits of some tokens' classes again ─ p = exp(logits - m - s)
                          gradient g = (p - one-hot) * scale, rounded ─┬─ rows of the weight's gradient: gᵀ hidden
                                                                       └─ added in fp32: g weight

Rows of a softmax are independent, so forward has the values of the whole computation. A row of the weight's gradient is
one product over all tokens, as in the whole computation; only the gradient of ``hidden`` is a sum over pieces, each
rounded to its dtype and added in fp32, as Liger's kernel adds that of the weight (Hsu et al., "Liger Kernel", 2024,
section 3.2; recomputing logits from saved row statistics: Wijmans et al., "Cut Your Losses", 2024, section 4).
The scale, with a loss scale in it, multiplies before anything is rounded to 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional

Tensor = torch.Tensor
Cuts = Sequence[int]


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    ignore_index: int,
    reduction: str,
    loss_dtype: torch.dtype,
    row_cuts: Cuts,
    class_cuts: Cuts,
    returns_logits: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the loss of ``linear(hidden, weight, bias)`` and, if asked for, these logits.

    Args:
        hidden: [..., width] in the dtype of ``weight`` [classes, width] and ``bias`` [classes].
        labels: int64, one for each row of ``hidden``, in the range of classes or ``ignore_index``.
        ignore_index: label of rows without a loss.
        reduction: "mean" over rows with a loss, "sum", or "none" for a loss of each row.
        loss_dtype: of the loss, which is computed in fp32.
        row_cuts: borders of forward's pieces among rows.
        class_cuts: borders of backward's pieces among classes.
        returns_logits: whether logits [..., classes] are a result; backward then reads them.

    """
    labels = labels.flatten()
    has_loss = labels != ignore_index
    targets = torch.where(has_loss, labels, 0)
    rows = hidden.reshape(-1, hidden.shape[-1])
    operands = (rows, weight, bias, targets)
    losses, logits = _RowLosses.apply(*operands, row_cuts, class_cuts, returns_logits)  # type: ignore[no-untyped-call]
    losses = torch.where(has_loss, losses, 0.0)
    if reduction != "none":
        losses = losses.sum()
    if reduction == "mean":
        losses = losses / has_loss.sum()
    return losses.to(loss_dtype), logits.view(*hidden.shape[:-1], -1) if returns_logits else None


def row_numbers(shape: Sequence[int], steps: Sequence[tuple[str, tuple[Any, ...]]], device: torch.device) -> Tensor:
    """Return which rows are left, in their order, of logits [*shape, classes] after slices and reshapes.

    ``steps`` are ("select", an index) or ("shape", a shape), whose last dimension stands for the classes.
    """
    numbers = torch.arange(math.prod(shape), device=device).view(*shape, 1)
    for kind, value in steps:
        numbers = numbers[value] if kind == "select" else numbers.reshape(value)
    return numbers.flatten()


def spread_labels(labels: Tensor, rows: Tensor, num_rows: int, ignore_index: int) -> Tensor:
    """Return labels of ``num_rows`` rows: those of ``rows``, and ``ignore_index`` for all others."""
    return labels.new_full((num_rows,), ignore_index).scatter(0, rows, labels)


class _RowLosses(torch.autograd.Function):
    """Losses [rows] in fp32 of rows with ``targets``, and logits [rows, classes] or None."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        row_cuts: Cuts,
        class_cuts: Cuts,
        returns_logits: bool,
    ) -> tuple[Tensor, Tensor | None]:
        logits = functional.linear(hidden, weight, bias) if returns_logits else None
        pieces = []
        for begin, end in pairwise(row_cuts):
            some = functional.linear(hidden[begin:end], weight, bias) if logits is None else logits[begin:end]
            pieces.append(_row_statistics(some, targets[begin:end]))
        losses, maxima, log_sums = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        ctx.save_for_backward(hidden, weight, bias, targets, maxima, log_sums, logits)
        ctx.class_cuts = class_cuts
        ctx.set_materialize_grads(False)
        return losses, logits

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        hidden, weight, *_ = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden: Tensor | None = None
        weight_rows, bias_parts = list[Tensor](), list[Tensor]()
        for piece, gradient in _gradients_of_logits(ctx, *gradients):
            if wants_weight:
                weight_rows.append(gradient.t() @ hidden)
            if wants_bias:
                bias_parts.append(gradient.sum(0))
            if wants_hidden:
                part = (gradient @ weight[piece]).to(torch.float32)
                grad_hidden = part if grad_hidden is None else grad_hidden + part
        grad_weight = torch.cat(weight_rows) if wants_weight else None
        grad_bias = torch.cat(bias_parts) if wants_bias else None
        grad_hidden = None if grad_hidden is None else grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _row_statistics(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss [rows], maximum [rows, 1] and logarithm of the sum of exponentials below it [rows, 1], in fp32."""
    values = logits.to(torch.float32)
    maxima = values.amax(1, keepdim=True)
    shifted = values - maxima
    log_sums = shifted.exp().sum(1, keepdim=True).log()
    losses = log_sums - shifted.gather(1, targets[:, None])
    return losses.squeeze(1), maxima, log_sums


def _gradients_of_logits(
    ctx: Any, grad_losses: Tensor | None, grad_logits: Tensor | None
) -> Iterator[tuple[slice, Tensor]]:
    """Yield, for each piece of classes, the gradient [rows, classes of the piece] in the logits' dtype."""
    hidden, weight, bias, targets, maxima, log_sums, logits = ctx.saved_tensors
    for begin, end in pairwise(ctx.class_cuts):
        piece = slice(begin, end)
        gradient = None if grad_logits is None else grad_logits[:, piece]
        if grad_losses is not None:
            if logits is None:
                some = functional.linear(hidden, weight[piece], None if bias is None else bias[piece])
            else:
                some = logits[:, piece]
            chances = (some.to(torch.float32) - maxima - log_sums).exp()
            is_target = targets[:, None] == torch.arange(begin, end, device=targets.device)
            of_losses = torch.where(is_target, chances - 1, chances) * grad_losses[:, None]
            gradient = of_losses if gradient is None else of_losses + gradient
        if gradient is not None:
            yield piece, gradient.to(hidden.dtype)
