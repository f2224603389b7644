"""Gradients that are clipped, scaled or skipped: what the step is to make of them as they stand.

Gradients in chunks are not touched for this. They have one pending factor, which ``param.grad`` shows and the step
applies: the inverse of a loss scale, the coefficient of clipping, or both. Their norm and whether all are finite come
from what the plan measured as they landed; where that does not describe them (somebody has written one, or there are
others beside them), they are read one by one, which waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from chunkc.distributed.agreement import Kind, Lines
from chunkc.distributed.process_group import Ranks
from chunkc.distributed.stages import StageLine, check_unscaled, common_line
from chunkc.errors import ChunkcError
from chunkc.ir.actions import Stream
from chunkc.runtime.devices.protocol import Event
from chunkc.runtime.execution.grad_norm import GradNormTable
from chunkc.runtime.model.backward_rules import refuse_unsteppable
from chunkc.runtime.model.gradient_values import GradientValues
from chunkc.runtime.model.program_state import ProgramState
from chunkc.runtime.update.loss_scale import LossScale, multiply


class GradClipping:
    """Norms, scales and pending factors of one model's gradients; see the module docstring.

    Attributes:
        wants_norms: whether gradients are to be measured as they land, from the next call on.
        is_scaled_outside: whether the script has scaled a loss since the last step, so that ``loss_scale`` rests.
    """

    def __init__(self, values: GradientValues, state: ProgramState) -> None:
        self._values, self._state = values, state
        self._parameters, self._gradients = values.parameters, values.gradients
        self._device, self._ranks = state.device, state.ranks
        self.wants_norms = False
        self.loss_scale: LossScale | None = None
        self.is_scaled_outside = False

    def scale_by(self, loss_scale: LossScale) -> None:
        """Multiply tangents by ``loss_scale``, and skip steps that overflow, from now on."""
        self.loss_scale, self.wants_norms = loss_scale, True

    @property
    def own_scale(self) -> LossScale | None:
        """The scale that backward is to apply."""
        return None if self.is_scaled_outside else self.loss_scale

    def is_unscaled(self) -> bool:
        """Whether gradients in chunks need nothing but the loss scale undone, if it is applied here."""
        return self._gradients.factor is (None if self.own_scale is None else self._gradients.unscaling)

    def prepare_to_add(self) -> None:
        """Do to gradients in chunks all that is pending, and scale them as the next micro-batch's."""
        gradients, scale = self._gradients, self.own_scale
        if gradients.num_micro_batches == 0 or self.is_unscaled():
            return
        self._parameters.join()
        if scale is not None:
            gradients.factor = scale.scale if gradients.factor is None else gradients.factor * scale.scale
        self._values.apply_factor()

    def clip(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip all gradients by their global norm, once all stages have agreed to."""
        return self._state.transactions.run(lambda: _clip_by_one_norm([self], max_norm, norm_type))

    def agree_to_clip(self, max_norm: float, norm_type: float = 2.0) -> None:
        """Agree with all stages of a pipeline on how to clip; RankError on all ranks if not."""
        if self.line is not None:
            self._state.transactions.run(lambda: _agree_to_clip([self], max_norm, norm_type))

    @property
    def line(self) -> StageLine | None:
        """The ranks with this one's place in the other stages of a pipeline."""
        return self._ranks.line

    @property
    def of_job(self) -> Ranks:
        """The ranks of all stages."""
        return self._ranks.of_job

    def present(self) -> frozenset[int]:
        """The parameters with gradients; ChunkcError where one cannot be stepped."""
        self._state.settle()
        present, doubtful = self._gradients.present(self._parameters.trained)
        if doubtful:
            refuse_unsteppable(self._parameters, self._gradients, doubtful)
        return present

    def norm(self, max_norm: float, norm_type: float) -> tuple[frozenset[int], torch.Tensor]:
        """The parameters with gradients, which are about to be clipped, and the norm of these: float32 []."""
        return self._state.transactions.run(lambda: self._norm(max_norm, norm_type))

    def _norm(self, max_norm: float, norm_type: float) -> tuple[frozenset[int], torch.Tensor]:
        present = self._agree_on_gradients(_clip_line(max_norm, norm_type))
        if not present:
            return present, torch.zeros((), dtype=torch.float32, device=self._device.torch_device)
        table = self._measured(present)
        if table is not None and norm_type == 2.0:
            norm, factor = self._on_compute(table.total_norm, table.ready), self._gradients.factor
            norm = norm if factor is None else norm * factor
        else:
            counted = self._values.exact(present - self._ranks.uncounted)
            norms = [torch.linalg.vector_norm(g, norm_type) for g in counted if g.numel()]
            own = torch.zeros(1, dtype=torch.float64, device=self._device.torch_device)
            own = torch.linalg.vector_norm(torch.stack(norms) if norms else own, norm_type)
            if self._ranks.tensor_size > 1:
                own = torch.linalg.vector_norm(self._ranks.of_tensor_ranks(own), norm_type)
            norm = torch.as_tensor(own).to(torch.float32)
        return present, norm

    def over_stages(self, line: StageLine, norm: torch.Tensor, norm_type: float) -> torch.Tensor:
        """The norm of the gradients of all stages, of which this rank has ``norm``: float32 []."""
        own = norm.to(torch.float64)
        of_stages = self._state.transactions.run(lambda: self._on_compute(lambda: line.collect(own), ()))
        return torch.as_tensor(torch.linalg.vector_norm(of_stages, norm_type)).to(torch.float32)

    def multiply_by(self, present: frozenset[int], max_norm: float, norm: torch.Tensor) -> None:
        """Clip the gradients of ``present`` to ``max_norm`` by the ``norm`` of all."""
        if present:
            factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
            self._state.transactions.run(lambda: self._multiply(present, factor))

    def unscale(self, inverse: torch.Tensor, scaler: Lines) -> torch.Tensor | None:
        """Multiply all gradients by ``inverse``; 1 where one is not finite, else 0, None without any."""
        check_unscaled(self.line)
        if not self.is_scaled_outside:
            raise ChunkcError(
                "the gradients were not scaled by this script: call scaler.scale(loss).backward(), or leave scaling to "
                "the compiled model and call optimizer.step()"
            )
        present = self._agree_on_gradients("unscaling", scaler)
        if not present:
            return None
        nonfinite = self._gradients.found = self.find_nonfinite(present)
        self._multiply(present, inverse.to(self._device.torch_device))
        return nonfinite

    def find_nonfinite(self, present: frozenset[int]) -> torch.Tensor:
        """1 where a gradient of ``present`` is infinite or NaN, else 0: float32 [], on the device."""
        table = self._measured(present)
        if table is not None:
            return self._on_compute(table.found_nonfinite, table.ready)
        is_finite = all([bool(gradient.isfinite().all()) for gradient in self._values.exact(present)])  # ranks read all
        found = torch.tensor(float(not is_finite), dtype=torch.float32, device=self._device.torch_device)
        return self._ranks.of_tensor_ranks(found).amax(0)

    def assigned(self, indexes: Iterable[int]) -> list[str]:
        """Of each parameter among ``indexes`` whose ``grad`` no backward has made, that it is so."""
        params, gradients = self._parameters.params, self._gradients
        plain = [i for i in indexes if params[i].grad is not None and not gradients.is_handle(i)]
        return [f"the gradient of {self._parameters.name_of(i)} was assigned" for i in plain]

    def _agree_on_gradients(self, what: str, more: Lines = tuple) -> frozenset[int]:
        """All ranks are about to do ``what`` to the same gradients; return whose there are."""
        with self._ranks.agreement_scope():
            present = self.present()

        def lines() -> list[str]:
            way = "read one by one" if self._measured(present) is None else "measured"
            names = map(self._parameters.name_of, sorted(present))
            return [what, *more(), way, *names, *self.assigned(sorted(present))]

        self._ranks.agree(Kind.GRADIENTS, lines, what)
        if self._state.reduce_gradients():
            self._ranks.agree(Kind.GRADIENTS, lines, what)
        self.wants_norms = True
        return present

    def _measured(self, present: frozenset[int]) -> GradNormTable | None:
        """Norms of the gradients of ``present``; None unless the latest backward measured just those."""
        is_all = present == self._gradients.measured and all(self._gradients.is_handle(index) for index in present)
        return self._state.norm_table if is_all else None

    def _multiply(self, present: Iterable[int], factor: torch.Tensor) -> None:
        """Gradients in chunks later, by the step; plain tensors in ``param.grad`` now."""
        before = self._gradients.factor
        self._gradients.factor = factor if before is None else before * factor
        for index in present:
            grad = self._parameters.params[index].grad
            if grad is not None and not self._gradients.is_handle(index):
                multiply(grad.detach(), factor.to(grad.device))

    def _on_compute(self, read: Callable[[], torch.Tensor], waits: Sequence[Event]) -> torch.Tensor:
        results = list[torch.Tensor]()
        self._device.launch(Stream.COMPUTE, "read the norms", waits, lambda: results.append(read()))
        return results[0]


def clip_together(clippings: Sequence[GradClipping], max_norm: float, norm_type: float) -> torch.Tensor:
    """Clip the gradients of the models of this process by one norm, and of all stages that these are of.

    Raises:
        ChunkcError: for models of which some are stages of a pipeline, that are not all of this process's, or
            that are given twice.
    """
    if len(clippings) == 1:
        clippings[0].agree_to_clip(max_norm, norm_type)
        return clippings[0].clip(max_norm, norm_type)
    in_order = sorted(clippings, key=lambda clipping: clipping.line.number if clipping.line else 0)
    _agree_to_clip(in_order, max_norm, norm_type)
    return _clip_by_one_norm(in_order, max_norm, norm_type)


def _agree_to_clip(clippings: Sequence[GradClipping], max_norm: float, norm_type: float) -> None:
    """Agree with all stages on how to clip; models of no pipeline agree with their gradients."""
    ranks = clippings[0].of_job
    with ranks.agreement_scope():
        if len(set(clippings)) < len(clippings):
            raise ChunkcError("a model was given twice: clip_grad_norm_ takes each of a process's models once")
        line = common_line([clipping.line for clipping in clippings])
        if line is not None:
            for clipping in clippings:
                clipping.present()
    if line is not None:
        ranks.agree(Kind.CLIP, lambda: [_clip_line(max_norm, norm_type)], "the gradients of all stages")


def _clip_line(max_norm: float, norm_type: float) -> str:
    return f"clipping to {float(max_norm)} by the {float(norm_type)}-norm"


def _clip_by_one_norm(clippings: Sequence[GradClipping], max_norm: float, norm_type: float) -> torch.Tensor:
    line = clippings[0].line
    found = [clipping.norm(max_norm, norm_type) for clipping in clippings]
    norm = found[0][1]
    if len(found) > 1:
        norm = torch.as_tensor(torch.linalg.vector_norm(torch.stack([own for _, own in found]), norm_type))
    if line is not None:
        norm = clippings[0].over_stages(line, norm, norm_type)
    for clipping, (present, _) in zip(clippings, found, strict=True):
        clipping.multiply_by(present, max_norm, norm)
    return norm
