"""Stages of a pipeline: the ranks that train each, and norms of gradients that go between stages.

Of four ranks under ``pp=2,dp_shard=2``:

    ranks      0 1   2 3           train the parameters of one stage, or of several where schedules interleave
    lines      0 and 2, 1 and 3    have the same place in all stages: they exchange norms of gradients

Activations and their gradients are sent by ``torch.distributed.pipelining``. Each stage is a compiled model of its own
with an optimizer of its own; only the norm by which gradients are clipped is one of all stages together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch

from chunkc._torch_compat.distributed import Group, Store, all_gather, end_group, new_group
from chunkc.distributed.mesh import RankMesh
from chunkc.errors import ChunkcError, RankError


@dataclass(frozen=True, slots=True)
class StagePlace:
    """The place of a stage's ranks along ``pp``, and the number of its model among those of its ranks.

    Both count from 1, models in the order of their compilation.
    """

    place: int
    num_places: int
    model: int

    def __str__(self) -> str:
        later = f", model {self.model} of its ranks" if self.model > 1 else ""
        return f"stage {self.place} of {self.num_places} of a pipeline{later}"


def named_stage(stage: StagePlace | None) -> str:
    return "a model that is no stage of a pipeline" if stage is None else str(stage)


class StageLine:
    """The ranks of a job that have this one's place in the other stages; all make theirs at the same time.

    ``rank``: of the job. Several models of one process may be stages over the same mesh: each counts itself, and
    ``number`` is that of its model, the same on all ranks of the line.
    """

    def __init__(
        self,
        mesh: RankMesh,
        rank: int,
        number: int,
        backend: str,
        device: torch.device,
        store: Store,
        timeout: timedelta,
    ) -> None:
        self.num_stages, self.number = mesh.num_stages, number
        self.mesh_name = mesh.name
        self._place, self._model = mesh.stages.index(mesh.ranks) + 1, 0
        self._store, self._key = store, f"chunkc/stages/{mesh.name}/{rank}"
        self._group: Group | None = new_group(backend, timeout, device, mesh.stage_lines)
        self._is_counted = False

    def count(self) -> None:
        """Count this stage among `num_models`; called once, when its model is compiled."""
        self._model = int(self._store.add(self._key, 1))
        self._is_counted = True

    @property
    def stage(self) -> StagePlace:
        """The stage that the model of this line is, from `count` on."""
        return StagePlace(self._place, self.num_stages, self._model)

    @property
    def num_models(self) -> int:
        """Models of this process that are stages over the same mesh."""
        return int(self._store.add(self._key, 0))

    def collect(self, value: torch.Tensor) -> torch.Tensor:
        """``value`` of the ranks of all stages: [num_stages], the same on all of them.

        Args:
            value: [], on the device of the group.

        Raises:
            RankError: when another stage has ended, or does not come within the job's timeout.
        """
        rows = torch.empty(self.num_stages, dtype=value.dtype, device=value.device)
        if self._group is None:
            raise RankError("the compiled stage was deleted, and its groups with it")
        try:
            all_gather(self._group, rows, value.reshape(1).contiguous())
        except RuntimeError as error:
            raise RankError(
                "the stages of a pipeline clip their gradients by one norm, and another stage has ended, failed, or "
                f"did not clip in this step: call chunkc.clip_grad_norm_ on every rank. torch says: {error}"
            ) from error
        return rows

    def close(self) -> None:
        """Exchange nothing any more; idempotent.

        A GPU's group ends with the job, since its end is a collective.
        """
        group, self._group = self._group, None
        if group is None:
            return
        self.leave()
        if group.name() == "gloo":
            end_group(group)

    def leave(self) -> None:
        if not self._is_counted:
            return
        try:
            self._store.add(self._key, -1)
        except RuntimeError:  # the store has gone with the rank that held it
            return


def common_line(lines: Sequence[StageLine | None]) -> StageLine | None:
    """The first line of models that are clipped together; None where they are stages of no pipeline.

    Raises:
        ChunkcError: where some are and others are not, or where stages of this process are left out.
    """
    first = lines[0]
    if any((line and line.mesh_name) != (first and first.mesh_name) for line in lines):
        raise ChunkcError("models that are clipped by one norm are stages over one mesh, all of them or none")
    if first is not None and first.num_models != len(lines):
        raise ChunkcError(
            f"this process has {first.num_models} stages over the mesh, and {len(lines)} of them are to be clipped by "
            "the norm of all: call chunkc.clip_grad_norm_([first_stage, second_stage], max_norm) before the steps, "
            "and leave max_grad_norm= of the optimizers away"
        )
    return first


def check_unscaled(pipeline: RankMesh | StageLine | None) -> None:
    """Refuse, by ChunkcError, a loss scale in a stage: others would not skip the steps that it skips."""
    if pipeline is not None and pipeline.num_stages > 1:
        raise ChunkcError(
            "stages of a pipeline cannot scale gradients of fp16: a stage that overflows would skip a step that others "
            "take. Train in bfloat16 (dtype=torch.bfloat16) or fp32"
        )
