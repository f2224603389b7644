"""Calls that are refused: undeclared backwards, reads of lost gradients, any call after a broken step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, NoReturn, Protocol

from torch import nn

from chunkc.errors import ChunkcError
from chunkc.runtime.params.gradients import Gradients


class Undeclared(NamedTuple):
    """The reason why a backward is refused.

    ``loses_gradients``: the call is part of a backward that has landed gradients; those gradients go.
    """

    text: str
    loses_gradients: bool = False


class Trained(Protocol):
    """The attributes and methods of a model that the rules need."""

    accumulate: int
    gradients: Gradients

    @property
    def params(self) -> Sequence[nn.Parameter]: ...
    def names(self, indexes: Sequence[int]) -> str: ...


def refuse_undeclared(model: Trained, graded: Sequence[int], *, is_under_way: bool) -> Undeclared | None:
    """Why a backward that makes gradients of ``graded`` may not run where one is declared for each step."""
    gradients = model.gradients
    if is_under_way:
        return Undeclared(
            "one backward() reaches two forwards of the compiled model; summing their gradients is accumulation "
            "over micro-batches, which was not declared. Call backward() and step() for each loss, run both "
            "batches as one, or declare it with chunkc.compile(..., accumulate=N). The gradients of this backward "
            "are discarded",
            loses_gradients=True,
        )
    waiting = [i for i in graded if hasattr(model.params[i].grad, "_chunkc_index") and i not in gradients.zeroed]
    if waiting:
        return Undeclared(
            f"{model.names(waiting)} still hold gradients of an earlier backward (stepped or not); adding to them "
            "was not declared. Call zero_grad() before backward()"
        )
    return None


def refuse_more(model: Trained, graded: Sequence[int], *, is_under_way: bool) -> Undeclared | None:
    """Return why a backward may not run where several are declared, or None.

    Reasons: the backward is one more than declared, or adds to gradients that were stepped.
    """
    gradients = model.gradients
    gradients.drop_removed()
    stale = [i for i in graded if hasattr(model.params[i].grad, "_chunkc_index")]
    stale = [i for i in stale if not gradients.is_kept(i) and i not in gradients.zeroed]
    if stale:
        return Undeclared(
            f"{model.names(stale)} still hold gradients that step() has consumed; the next ones cannot be added to "
            "them. Call zero_grad() after each step()"
        )
    if gradients.num_micro_batches < model.accumulate:
        return None
    lost = ""
    if is_under_way:
        lost = ". This backward() reaches more forwards than are left: all gradients since then are discarded"
    return Undeclared(
        f"gradients of {model.accumulate} backwards were added up since the last step, as many as "
        f"chunkc.compile(..., accumulate={model.accumulate}) declares. Call optimizer.step() and zero_grad(), or "
        f"declare more{lost}",
        loses_gradients=is_under_way,
    )


def refuse_partial(model: Trained, missing: Sequence[int]) -> None:
    """Refuse a backward that does not ask for the gradients of ``missing``.

    Raises:
        ChunkcError: when there are any.
    """
    if missing:
        raise ChunkcError(
            f"this backward leaves out the gradients of {model.names(missing)}, as torch.autograd.grad and "
            "backward(inputs=...) do: a compiled backward makes all of them. Call loss.backward() and read "
            "`param.grad`; freeze parameters with requires_grad_(False) before chunkc.compile"
        )


def refuse_unplanned(model: Trained, stepped: Sequence[int]) -> NoReturn:
    """Refuse a step by gradients of ``stepped`` before a forward of the model has made the plan.

    Raises:
        ChunkcError: always.
    """
    raise ChunkcError(
        f"the gradients of {model.names(stepped)} come from parts of the model that were called by themselves, and "
        "no forward of the whole model has run, so that there is no plan to step by: run forward and backward of the "
        "model before the first step(); gradients that wait are added"
    )


def refuse_lost(gradients: Gradients, index: int, stamp: int, name: str, *, is_consumed: bool) -> None:
    """Refuse to read or write a gradient that no memory holds any more.

    A gradient that was zeroed is known without memory.

    Args:
        index: of the parameter, which is called ``name``.
        stamp: of the backward whose gradient is asked for.
        is_consumed: whether a step took the latest gradients.

    Raises:
        ChunkcError: when it is gone.
    """
    is_current = stamp == gradients.stamp_of(index)
    if is_current and (gradients.is_kept(index) or index in gradients.zeroed):
        return
    reason = "was consumed by step()" if is_consumed else "was discarded"
    if not is_current:
        reason = "of an earlier backward is gone"
    raise ChunkcError(
        f"the gradient of {name} {reason}: its memory holds the parameter again. Read gradients between backward() and "
        "step()"
    )


def refuse_broken(*, is_broken: bool) -> None:
    """Refuse a model whose parameters are of two steps.

    Raises:
        ChunkcError: when it is.
    """
    if is_broken:
        raise ChunkcError(
            "an update failed halfway through the last step(), so some parameters have taken it and others have "
            "not; load a checkpoint into a newly compiled model"
        )
