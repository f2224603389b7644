"""Checks before a forward, where ranks have slices of the same sequences (``cp``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from chunkc._torch_compat.collectives import ContextLine
from chunkc._torch_compat.core import pytree
from chunkc.distributed.agreement import Kind
from chunkc.distributed.mesh import RankMesh
from chunkc.distributed.process_group import Ranks
from chunkc.errors import CaptureError

_IGNORED_LABEL: Final = -100


def first_slice(mesh: RankMesh) -> ContextLine | None:
    """The first place along ``cp``, in a group that does not exist; None for a mesh without ``cp``."""
    return ContextLine("cp", mesh.num_context, 0) if mesh.num_context > 1 else None


def check_slices(
    ranks: Ranks, line: ContextLine, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Check that the inputs of a forward are slices of the same sequences, in the same sizes.

    Args:
        ranks: the ranks of the job.
        line: those that have slices of the same sequences.
        model: of transformers, whose losses are means over labels, or another one.
        args: positional inputs of the forward.
        kwargs: inputs by name.

    Raises:
        RankError: on all ranks, where sizes differ.
        CaptureError: where ``position_ids`` are not those of this rank's slice in one sequence, or
            ``decoder_input_ids`` were shifted within it; on all ranks, where slices have more or fewer labels.
    """
    positions = kwargs.get("position_ids")
    if isinstance(positions, torch.Tensor) and positions.dim():
        _check_positions(line, positions)
    _check_shifted(line, model, kwargs.get("decoder_input_ids"))
    tensors = [value for value in pytree.tree_leaves((args, dict(kwargs))) if isinstance(value, torch.Tensor)]
    shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
    _check_labels(line, ranks.agree(Kind.SLICES, lambda: [f"slices of {shapes}"], number=_num_labels(model, kwargs)))


def _check_positions(line: ContextLine, positions: torch.Tensor) -> None:
    length, place = positions.shape[-1], line.place
    wanted = torch.arange(place * length, (place + 1) * length, device=positions.device)
    if bool((positions != wanted).any()):
        raise CaptureError(
            f"cp divides sequences, and position_ids are not {place * length} to {(place + 1) * length - 1}, "
            f"those of slice {place + 1} of {line.size}: hand in positions of the whole sequence, "
            "sliced as it is; sequences that are packed into one would need a mask between them"
        )


def _check_shifted(line: ContextLine, model: nn.Module, tokens: Any) -> None:
    """Refuse a later slice of a decoder's tokens that begins as a whole sequence does."""
    start = getattr(getattr(model, "config", None), "decoder_start_token_id", None)
    if start is None or line.place == 0 or not isinstance(tokens, torch.Tensor) or tokens.dim() != 2:
        return
    if tokens.shape[1] > 1 and bool((tokens[:, 0] == start).all() & (tokens[:, 1] != start).any()):
        raise CaptureError(
            f"cp divides sequences, and decoder_input_ids of slice {line.place + 1} of {line.size} begin with {start}, "
            "with which a decoder's sequence begins: shift whole labels (model.prepare_decoder_input_ids_from_labels), "
            "then slice"
        )


def _num_labels(model: nn.Module, kwargs: Mapping[str, Any]) -> int:
    """Labels of this rank that a loss of transformers is the mean over; 0 where there is no such loss."""
    labels = kwargs.get("labels") if kwargs.get("shift_labels") is None else kwargs["shift_labels"]
    takes_mean = hasattr(getattr(model, "config", None), "model_type") and kwargs.get("num_items_in_batch") is None
    if not takes_mean or not isinstance(labels, torch.Tensor):
        return 0
    return int((labels != _IGNORED_LABEL).sum())


def _check_labels(line: ContextLine, nums: Sequence[int]) -> None:
    """Refuse means over slices that differ in their labels; ``nums``: of labels, by rank of the job."""
    for start in range(0, len(nums), line.size):  # neighbours have the slices of a sequence
        found = list(nums[start : start + line.size])
        if len(set(found)) > 1:
            raise CaptureError(
                f"cp divides sequences, the loss is a mean over the labels of a slice, and slices have {found} labels: "
                "their mean would be another one than that of the sequence. Hand in num_items_in_batch=, all labels "
                "divided by the number of slices, where the model takes it; else leave labels= away, and take the sum "
                "of losses of logits, divided by that"
            )


def one_slice_alone() -> CaptureError:
    """The refusal of a forward outside of training and evaluation, which would see one slice alone."""
    return CaptureError("cp divides sequences, and within chunkc.full_params a forward sees one slice: call it outside")


def unchecked() -> CaptureError:
    """The refusal of an evaluation before the first training forward, whose graph is checked."""
    return CaptureError(
        "cp divides sequences, and whether all of forward but attention works position by position is checked in the "
        "first training forward: train a step before the first evaluation"
    )
