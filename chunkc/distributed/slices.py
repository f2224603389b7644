"""Checks before a forward, where ranks have slices of the same sequences (``cp``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from chunkc._torch_compat.collectives import ContextLine
from chunkc._torch_compat.core import pytree
from chunkc.distributed.agreement import Kind
from chunkc.distributed.mesh import RankMesh
from chunkc.distributed.process_group import Ranks
from chunkc.errors import CaptureError


def first_slice(mesh: RankMesh) -> ContextLine | None:
    """The first place along ``cp``, in a group that does not exist; None for a mesh without ``cp``."""
    return ContextLine("cp", mesh.num_context, 0) if mesh.num_context > 1 else None


def check_slices(ranks: Ranks, line: ContextLine, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Check that the inputs of a forward are slices of the same sequences, in the same sizes.

    Args:
        ranks: the ranks of the job.
        line: those that have slices of the same sequences.
        args: positional inputs of the forward.
        kwargs: inputs by name.

    Raises:
        RankError: on all ranks, where sizes differ.
        CaptureError: where ``position_ids`` are not those of this rank's slice in one sequence.
    """
    positions = kwargs.get("position_ids")
    if isinstance(positions, torch.Tensor) and positions.dim():
        _check_positions(line, positions)
    tensors = [value for value in pytree.tree_leaves((args, dict(kwargs))) if isinstance(value, torch.Tensor)]
    ranks.agree(Kind.SLICES, lambda: [f"slices of {', '.join(str(list(tensor.shape)) for tensor in tensors)}"])


def _check_positions(line: ContextLine, positions: torch.Tensor) -> None:
    length, place = positions.shape[-1], line.place
    wanted = torch.arange(place * length, (place + 1) * length, device=positions.device)
    if bool((positions != wanted).any()):
        raise CaptureError(
            f"cp divides sequences, and position_ids are not {place * length} to {(place + 1) * length - 1}, "
            f"those of slice {place + 1} of {line.size}: hand in positions of the whole sequence, "
            "sliced as it is; sequences that are packed into one would need a mask between them"
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
