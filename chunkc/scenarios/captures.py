"""Captures of models given as data, for any share of layers that keep their activations.

Where all layers of a model are alike, the schedule of a deep model follows from captures of few layers
(`chunkc.capture.layers.deep_captures`). Other models are captured as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import nn

from chunkc._torch_compat.fake_job import first_line
from chunkc.capture.budgets import BudgetSchedules
from chunkc.capture.layers.deep_captures import CapturedAhead, DeepCaptures
from chunkc.capture.layers.periodic import NUM_OUTER, NotPeriodicError
from chunkc.capture.partition import num_kept
from chunkc.compiler.plan_ahead import capture_ahead
from chunkc.compiler.segment_compiler import Backend
from chunkc.compiler.validation import compute_dtype, param_infos, unique_params
from chunkc.distributed.mesh import TP, RankMesh
from chunkc.distributed.slices import first_slice
from chunkc.hardware import Hardware
from chunkc.ir.schedule import ParamInfo, Schedule
from chunkc.passes.rematerialise import KEEP_ALL
from chunkc.progress import stage
from chunkc.runtime.params.tensor_views import views_of
from chunkc.scenarios.models import Transformer, divided_module, parallelise
from chunkc.scenarios.slicing import sliced_ahead

logger = logging.getLogger("chunkc")


@dataclass(frozen=True, slots=True)
class Subject:
    """Subject of a capture: a model in training, on a machine of some dtype and compute capability.

    ``batch`` sequences of ``sequence`` tokens; ``dtype``: compute dtype, or ``auto``; ``backend``: what would compile
    the segments. ``num_tensor`` ranks compute a forward together: the first ones of a job, which may be a fake one.
    ``num_slices`` have slices of the same sequences.
    """

    model: Transformer
    batch: int
    sequence: int
    dtype: torch.dtype | str
    backend: Backend
    hw: Hardware
    num_tensor: int = 1
    num_slices: int = 1

    @property
    def key(self) -> tuple[object, ...]:
        """Equal where captures are."""
        ranks = (self.num_tensor, self.num_slices)
        machine = (self.hw.compute_dtype, self.hw.compute_capability)
        return (self.model.capture_key, self.batch, self.sequence, self.dtype, self.backend, *ranks, *machine)

    @property
    def num_layers(self) -> int | None:
        return self.model.num_layers

    def num_kept(self, keep: float) -> int | None:
        """Layers that keep their activations, two of each kind at least; None where their number is unknown."""
        if self.num_layers is None:
            return None
        found = num_kept(keep, self.num_layers)
        if found in (0, self.num_layers) or self.num_layers <= 2 * NUM_OUTER:
            return found
        return min(max(found, NUM_OUTER), self.num_layers - NUM_OUTER)

    def infos(self) -> list[ParamInfo]:
        """The parameters of the whole model, as a rank has them."""
        with self._built(self.model) as model:
            return param_infos(model, compute_dtype(self.dtype, list(unique_params(model)), self.hw))

    @contextmanager
    def _built(self, transformer: Transformer) -> Iterator[nn.Module]:
        """``transformer`` with the parts that a rank has of its parameters."""
        model, num = transformer.build(), self.num_tensor
        if num > 1:
            parallelise(divided_module(model), transformer.label, first_line(num, TP))
        ranks = tuple(range(self.num_slices * num))
        mesh = RankMesh(1, self.num_slices, num, ranks, num_context=self.num_slices)
        with sliced_ahead(model, mesh), views_of(model, mesh).lent():
            yield model

    def capture(self, num_layers: int | None, shares: Sequence[float]) -> list[CapturedAhead]:
        """Capture the model with ``num_layers`` layers, partitioned for each of ``shares``; None: as it is."""
        stage("building the model")
        transformer = self.model if num_layers is None else self.model.with_depth(num_layers)
        inputs = transformer.inputs(self.batch, self.sequence, self.num_slices)
        estimates = dict[float, tuple[Schedule, ...]]()

        def choose(schedules: BudgetSchedules) -> tuple[float, str]:
            estimates.update((keep, schedules.estimates(keep)) for keep in shares[:-1])
            return shares[-1], f"a share {shares[-1]:g} of the layers keeps its activations"

        chooser = None if list(shares) == [KEEP_ALL] else choose
        with self._built(transformer) as model:
            dtype = compute_dtype(self.dtype, list(unique_params(model)), self.hw)
            captured = capture_ahead(
                *(model, dtype, _as_computed(inputs, model, dtype), self.backend, chooser),
                gpu=self.hw.compute_capability,
                context=first_slice(RankMesh(1, self.num_slices, 1, (0,), num_context=self.num_slices)),
            )
        estimates[shares[-1]] = captured.estimates
        return [CapturedAhead(estimates.get(keep, captured.estimates), captured.stages) for keep in shares]


def _as_computed(
    inputs: Mapping[str, torch.Tensor], model: nn.Module, dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    """``inputs`` with hidden states in the dtype in which another stage would have computed them."""
    dtype = dtype or next(param.dtype for param in model.parameters())
    return {
        name: value.detach().to(dtype).requires_grad_() if value.is_floating_point() else value
        for name, value in inputs.items()
    }


@dataclass(slots=True)
class Captures:
    """Captures, kept for the next question."""

    _captured: dict[tuple[object, ...], CapturedAhead] = field(default_factory=dict)
    _deep: dict[tuple[object, ...], DeepCaptures] = field(default_factory=dict)

    def of(self, subject: Subject, keep: float) -> CapturedAhead:
        """The capture with a share ``keep`` of the layers, the last ones, that keep their activations.

        Raises:
            ChunkcError: when the model cannot be built or captured.
        """
        key = _key(subject, keep)
        if key not in self._captured:
            self._captured[key] = self._capture(subject, keep)
        return self._captured[key]

    def has(self, subject: Subject, keep: float) -> bool:
        return _key(subject, keep) in self._captured

    def _capture(self, subject: Subject, keep: float) -> CapturedAhead:
        num_layers, num_kept = subject.num_layers, subject.num_kept(keep)
        if num_layers is None or num_kept is None:
            return subject.capture(None, [keep])[0]
        deep = self._deep.setdefault(subject.key, DeepCaptures(subject.capture, num_layers, cache(subject.infos)))
        try:
            return deep.of(num_kept)
        except NotPeriodicError as error:
            logger.info("%s is captured as it is: %s", subject.model.label, error)
            return subject.capture(None, [num_kept / num_layers])[0]


def _key(subject: Subject, keep: float) -> tuple[object, ...]:
    num_kept = subject.num_kept(keep)
    return (*subject.key, keep if num_kept is None else num_kept)
