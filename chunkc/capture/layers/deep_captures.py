"""Schedules of deep models from captures of few layers, for any share that keeps its activations.

Where all layers of a model are alike, the schedule of a deep one follows from captures of few layers
(`chunkc.capture.layers.periodic`): of one kind of layer from two, of layers that are computed again in front of kept
ones from four, of which two models have two each. So neither more layers nor another share cost a capture.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from torch import nn

from chunkc.capture.budgets import BudgetChooser, BudgetSchedules, GraphChooser
from chunkc.capture.graphs import Captured, lowest_peak
from chunkc.capture.layers.periodic import (
    BASE,
    MIXTURES,
    NUM_OUTER,
    NotPeriodicError,
    mixed_schedule,
    periodic_schedule,
)
from chunkc.capture.layers.repeated_layers import RepeatedLayers
from chunkc.capture.partition import num_kept, outermost_layer
from chunkc.errors import CaptureError
from chunkc.ir.plan import StageRecord
from chunkc.ir.schedule import ParamInfo, Schedule
from chunkc.progress import within

logger = logging.getLogger("chunkc")

LEAST_LAYERS: Final = 48
"""Layers of a module from which few are captured in place of all: mixtures of two kinds are captures of 19."""

CaptureLayers = Callable[[int, Sequence[float]], "Sequence[CapturedAhead]"]
"""Captures a model with so many layers, partitioned once for each share of them that keeps its activations."""


@dataclass(frozen=True, slots=True)
class CapturedAhead:
    """A schedule by each estimate of its live bytes, and what its capture did."""

    estimates: tuple[Schedule, ...]
    stages: tuple[StageRecord, ...]

    @property
    def schedule(self) -> Schedule:
        """The one that is taken."""
        return lowest_peak(self.estimates)


@dataclass(slots=True)
class DeepCaptures:
    """Captures of a model of ``num_layers`` layers that are alike; ``infos``: of all its parameters."""

    capture: CaptureLayers
    num_layers: int
    infos: Callable[[], Sequence[ParamInfo]]
    _of_one_kind: dict[bool, tuple[CapturedAhead, CapturedAhead]] = field(default_factory=dict)
    _of_two_kinds: dict[tuple[int, int], CapturedAhead] = field(default_factory=dict)

    def of(self, num_kept: int) -> CapturedAhead:
        """The capture where the last ``num_kept`` layers keep their activations.

        Raises:
            NotPeriodicError: when it does not follow from captures of fewer layers.
            ChunkcError: when those cannot be captured.
        """
        num_again = self.num_layers - num_kept
        if num_kept and num_again:
            if self.num_layers <= 2 * (BASE + 1) or min(num_kept, num_again) < NUM_OUTER:
                raise NotPeriodicError(f"{num_again} layers computed again and {num_kept} kept are too few of a kind")
            return self._mixture(num_again, num_kept)
        if self.num_layers <= BASE + 1:
            raise NotPeriodicError(f"{self.num_layers} layers are no more than those of the captures")
        return self._alike(is_kept=num_kept > 0)

    def _alike(self, *, is_kept: bool) -> CapturedAhead:
        if not self._of_one_kind:  # one trace gives both kinds
            pairs = zip(*(self._with_depth(depth, [0.0, 1.0]) for depth in (BASE, BASE + 1)), strict=True)
            self._of_one_kind = dict(zip((False, True), pairs, strict=True))
        few, more = self._of_one_kind[is_kept]
        began_s = time.perf_counter()
        infos, by_estimate = self.infos(), zip(few.estimates, more.estimates, strict=True)
        estimates = tuple(periodic_schedule(*pair, self.num_layers, infos) for pair in by_estimate)
        note = f"{self.num_layers} layers from captures of {BASE} and {BASE + 1}"
        return CapturedAhead(estimates, (*few.stages, *more.stages, _record(began_s, note)))

    def _mixture(self, num_again: int, num_kept: int) -> CapturedAhead:
        if not self._of_two_kinds:
            self._of_two_kinds = self._four_mixtures()
        four = self._of_two_kinds
        began_s = time.perf_counter()
        infos, kinds = self.infos(), list(zip(*(captured.estimates for captured in four.values()), strict=True))
        by_kind = (dict(zip(four, kind, strict=True)) for kind in kinds)
        estimates = tuple(mixed_schedule(captures, num_again, num_kept, infos) for captures in by_kind)
        note = f"{num_again} layers computed again and {num_kept} kept, from {len(four)} captures of few of each"
        stages = (record for captured in four.values() for record in captured.stages)
        return CapturedAhead(estimates, (*dict.fromkeys(stages), _record(began_s, note)))

    def _four_mixtures(self) -> dict[tuple[int, int], CapturedAhead]:
        """Captures by how many layers are computed again and kept."""
        found = dict[tuple[int, int], CapturedAhead]()
        for depth in sorted({sum(counts) for counts in MIXTURES}):
            kept = sorted(kept for again, kept in MIXTURES if again + kept == depth)
            captured = self._with_depth(depth, [num / depth for num in kept])
            found |= {(depth - num, num): one for num, one in zip(kept, captured, strict=True)}
        return found

    def _with_depth(self, depth: int, shares: Sequence[float]) -> Sequence[CapturedAhead]:
        with within(f"{depth} layers"):
            return self.capture(depth, shares)


def _record(began_s: float, note: str) -> StageRecord:
    return StageRecord("periodic", 1e3 * (time.perf_counter() - began_s), note)


def captured_by_layers(
    model: nn.Module,
    capture: Callable[[GraphChooser | None], Captured],
    choose: BudgetChooser | None,
    infos: Sequence[ParamInfo],
    least: int = LEAST_LAYERS,
) -> CapturedAhead | None:
    """The iteration of a deep module from captures of few layers; None where all must be captured.

    Args:
        capture: captures the model as it is at that moment.
        choose: chooses the activation budget; None keeps all.
        infos: of all parameters of the model, as its schedule has them.
        least: layers below which the model is captured as it is.
    """
    layers = RepeatedLayers.of(model, least)
    if layers is None:
        return None
    try:
        return _ModuleCaptures(layers, capture, choose, infos).chosen()
    except (NotPeriodicError, CaptureError) as error:
        logger.info("%s is captured with all its layers: %s", type(model).__name__, error)
        return None


@dataclass(slots=True)
class _ModuleCaptures:
    """Captures of one module with few of its ``layers``; others as of `captured_by_layers`.

    ``is_asked``: whether a capture asked for a budget, which one without layers to recompute does not.
    """

    layers: RepeatedLayers
    capture: Callable[[GraphChooser | None], Captured]
    choose: BudgetChooser | None
    infos: Sequence[ParamInfo]
    is_asked: bool = False

    def chosen(self) -> CapturedAhead:
        """The iteration with the budget that ``choose`` takes, asked as in a capture of the whole model."""
        num_layers = self.layers.num_layers
        deep = DeepCaptures(self.shallow, num_layers, lambda: self.infos)
        captured = deep.of(num_layers)
        if self.choose is None or not self.is_asked:
            return captured
        began_s = time.perf_counter()
        budget, note = self.choose(_Schedules(deep))
        record = StageRecord("rematerialise", 1e3 * (time.perf_counter() - began_s), note)
        captured = deep.of(num_kept(budget, num_layers))
        return CapturedAhead(captured.estimates, (*captured.stages, record))

    def shallow(self, num_layers: int, shares: Sequence[float]) -> Sequence[CapturedAhead]:
        """Capture ``num_layers`` of the layers, once for each share of them that keeps its activations."""
        estimates = dict[float, tuple[Schedule, ...]]()

        def choose(schedules: BudgetSchedules) -> tuple[float, str]:
            self.is_asked = True
            estimates.update((keep, schedules.estimates(keep)) for keep in shares[:-1])
            return shares[-1], f"a share {shares[-1]:g} of the layers keeps its activations"

        with self.layers.shortened(num_layers):
            captured = self.capture(None if self.choose is None else choose)
        found = {outermost_layer(op.layer) for op in captured.schedule.forward.operators} - {""}
        if len(found) != num_layers:
            raise NotPeriodicError(f"{len(found)} modules have numbers where the model has {num_layers} layers")
        estimates[shares[-1]] = captured.estimates
        return [CapturedAhead(estimates.get(keep, captured.estimates), captured.stages) for keep in shares]


@dataclass(frozen=True, slots=True)
class _Schedules:
    """Schedules of a deep model by activation budget, which cost no capture."""

    deep: DeepCaptures

    def __call__(self, budget: float) -> Schedule:
        return self.deep.of(num_kept(budget, self.deep.num_layers)).schedule

    def forget(self, budget: float) -> None:
        """Nothing is kept for one budget alone."""
