"""Calls that are refused: undeclared backwards, reads of lost gradients, any call after a broken step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from chunkc.errors import ChunkcError
from chunkc.runtime.model.parameters import Parameters
from chunkc.runtime.params.gradients import Gradients
from chunkc.runtime.update.loss_scale import LossScale


class Undeclared(NamedTuple):
    """Why a backward is refused, and whether the gradients go that it has landed so far."""

    text: str
    loses_gradients: bool = False


def refuse_undeclared(
    parameters: Parameters, gradients: Gradients, graded: Sequence[int], *, is_under_way: bool
) -> Undeclared | None:
    """Why a backward over ``graded`` may not run where one is declared for each step."""
    if is_under_way:
        return Undeclared(
            "one backward() reaches two forwards of the compiled model; summing their gradients is accumulation "
            "over micro-batches, which was not declared. Call backward() and step() for each loss, run both "
            "batches as one, or declare it with chunkc.compile(..., accumulate=N). The gradients of this backward "
            "are discarded",
            loses_gradients=True,
        )
    waiting = [i for i in graded if hasattr(parameters.params[i].grad, "chunkc_index") and i not in gradients.zeroed]
    if waiting:
        return Undeclared(
            f"{parameters.names(waiting)} still hold gradients of an earlier backward (stepped or not); adding to them "
            "was not declared. Call zero_grad() before backward()"
        )
    return None


def refuse_more(
    parameters: Parameters, gradients: Gradients, graded: Sequence[int], *, is_under_way: bool
) -> Undeclared | None:
    """Why a backward may not run where several are declared: one too many, or onto stepped gradients."""
    gradients.drop_removed()
    stale = [i for i in graded if hasattr(parameters.params[i].grad, "chunkc_index")]
    stale = [i for i in stale if not gradients.is_kept(i) and i not in gradients.zeroed]
    if stale:
        return Undeclared(
            f"{parameters.names(stale)} still hold gradients that step() has consumed; the next ones cannot be added "
            "to them. Call zero_grad() after each step(), before any further backward, also one that only passes "
            "through this model, as a generator's does through its discriminator"
        )
    if gradients.num_micro_batches < gradients.accumulate:
        return None
    lost = ""
    if is_under_way:
        lost = ". This backward() reaches more forwards than are left: all gradients since then are discarded"
    return Undeclared(
        f"gradients of {gradients.accumulate} backwards were added up since the last step, as many as "
        f"chunkc.compile(..., accumulate={gradients.accumulate}) declares. Call optimizer.step() and zero_grad(), or "
        f"declare more{lost}",
        loses_gradients=is_under_way,
    )


def refuse_partial(parameters: Parameters, missing: Sequence[int]) -> NoReturn:
    """Refuse, by ChunkcError, a backward that does not ask for the gradients of ``missing``."""
    raise ChunkcError(
        f"this backward leaves out the gradients of {parameters.names(missing)}, as torch.autograd.grad and "
        "backward(inputs=...) do: a compiled backward makes all of them. Call loss.backward() and read "
        "`param.grad`; freeze parameters with requires_grad_(False) before chunkc.compile. In a pipeline, give "
        "PipelineStage its input_args and output_args, and take a schedule that does not split backward (1F1B, GPipe)"
    )


def refuse_unplanned(parameters: Parameters, stepped: Sequence[int]) -> NoReturn:
    """Refuse, by ChunkcError, a step before a forward of the model has made the plan."""
    raise ChunkcError(
        f"the gradients of {parameters.names(stepped)} come from parts of the model that were called by themselves, "
        "and no forward of the whole model has run, so that there is no plan to step by: run forward and backward of "
        "the model before the first step(); gradients that wait are added"
    )


def refuse_lost(gradients: Gradients, index: int, stamp: int, name: str) -> None:
    """Refuse, by ChunkcError, access to a gradient of backward ``stamp`` that no memory holds any more."""
    is_current = stamp == gradients.stamp_of(index)
    if is_current and (gradients.is_kept(index) or index in gradients.zeroed):
        return
    reason = "was consumed by step()" if gradients.is_consumed else "was discarded"
    if not is_current:
        reason = "of an earlier backward is gone"
    raise ChunkcError(
        f"the gradient of {name} {reason}: its memory holds the parameter again. Read gradients between backward() and "
        "step()"
    )


def refuse_broken() -> NoReturn:
    """Refuse, by ChunkcError, a model whose parameters are of two steps."""
    raise ChunkcError(
        "an update failed halfway through the last step(), so some parameters have taken it and others have "
        "not; load a checkpoint into a newly compiled model"
    )


def refuse_scaling_parts(own_scale: LossScale | None) -> None:
    """Refuse, by ChunkcError, built-in loss scaling where several graphs may scale one tangent twice."""
    if own_scale is not None:
        raise ChunkcError(
            "built-in loss scaling needs a forward of one graph, but this one breaks into several (the log says "
            "where): scale the loss with chunkc.GradScaler, train in bfloat16, or remove the breaks"
        )


def refuse_hooks(parameters: Parameters) -> NoReturn:
    """Refuse, by ChunkcError, gradient hooks on parameters."""
    hooked = [i for i, p in enumerate(parameters.params) if p._backward_hooks or p._post_accumulate_grad_hooks]
    raise ChunkcError(
        f"{parameters.names(hooked)} have gradient hooks, which would never run: gradients land in chunks, not in "
        "autograd. Remove the hooks, or work on `param.grad` between backward() and step()"
    )


def refuse_unsteppable(parameters: Parameters, gradients: Gradients, doubtful: Sequence[int]) -> None:
    """Refuse, by ChunkcError, `Gradients.present`'s ``doubtful`` gradients that cannot be stepped."""
    params, handles = parameters.params, [i for i in doubtful if gradients.is_handle(i)]
    stale = [i for i in doubtful if hasattr(params[i].grad, "chunkc_index") and i not in handles]
    if stale:
        raise ChunkcError(
            f"{parameters.names(stale)} hold gradients of an earlier backward, which are gone; assign gradients in "
            "place (`param.grad.copy_(g)`) or plain tensors"
        )
    lost = [i for i in handles if not gradients.is_kept(i) and i not in gradients.zeroed]
    if lost and gradients.pending:
        raise ChunkcError(
            f"{parameters.names(lost)} hold gradients that an earlier step() consumed, beside new ones of others; call "
            "zero_grad() after each step()"
        )
    if not gradients.pending and handles:
        raise ChunkcError(
            "step() was already called for the gradients of the last backward; call zero_grad() and run forward "
            "and backward before the next step()"
        )
    untrained = [i for i in doubtful if i not in parameters.trained]
    if untrained:
        raise ChunkcError(
            f"{parameters.names(untrained)} hold gradients, but the forward of the compiled model does not train them, "
            "so they have no optimizer state; set their .grad to None, or use them in the forward"
        )
