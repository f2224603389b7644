"""Gradients that are clipped, scaled or skipped: what the step is to make of them as they stand.

Gradients in chunks are not touched for this. They have one pending factor, which ``param.grad`` shows and the step
applies: the inverse of a loss scale, the coefficient of clipping, or both. Their norm and whether all are finite come
from what the plan measured as they landed; where that does not describe them (somebody has written one, or there are
others beside them), they are read one by one, which waits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from chunkc.distributed.agreement import Kind, Lines
from chunkc.distributed.process_group import Ranks
from chunkc.errors import ChunkcError
from chunkc.ir.actions import Stream
from chunkc.ir.schedule import ParamInfo
from chunkc.runtime.devices.protocol import Device, Event
from chunkc.runtime.execution.grad_norm import GradNormTable, StepDecision
from chunkc.runtime.model.parameters import ModelMemory
from chunkc.runtime.update.loss_scale import LossScale, multiply


class ScaledGradients(ModelMemory):
    """See the module docstring.

    Attributes:
        wants_norms: whether gradients are to be measured as they land, by plans that say so, from the next call on.
        loss_scale: by which backward multiplies its tangents; None where none is needed.
        is_scaled_outside: whether the script has scaled a loss since the last step, so that ``loss_scale`` rests.
        outcome: of the latest step that may be skipped.
    """

    def __init__(
        self,
        infos: Sequence[ParamInfo],
        params: Sequence[nn.Parameter],
        device: Device,
        accumulate: int = 1,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(infos, params, device, accumulate, ranks)
        self.wants_norms = False
        self.loss_scale: LossScale | None = None
        self.is_scaled_outside = False
        self.outcome: StepDecision | None = None
        self._norm_table: GradNormTable | None = None  # of the plan that ran the latest backward

    def scale_by(self, loss_scale: LossScale) -> None:
        """Multiply tangents by ``loss_scale``, and skip steps that overflow, from now on."""
        self.loss_scale, self.wants_norms = loss_scale, True

    @property
    def own_scale(self) -> LossScale | None:
        """The scale that backward is to apply."""
        return None if self.is_scaled_outside else self.loss_scale

    def _note_landed(self, norm_table: GradNormTable | None, graded: frozenset[int], scale: LossScale | None) -> None:
        """Note that the gradients of ``graded`` have landed, multiplied by ``scale``.

        Keep what was measured if these gradients are all.
        """
        gradients = self.gradients
        if scale is not None:
            gradients.factor = gradients.unscaling = scale.inverse()
        self._norm_table = norm_table
        is_all = norm_table is not None and gradients.landed == graded and not gradients.apart
        gradients.measured = gradients.handed_out(graded) if is_all else None

    def _refuse_scaling_parts(self) -> None:
        """In a forward of several graphs a tangent may be scaled already, by the graph behind it, or not."""
        if self.own_scale is not None:
            raise ChunkcError(
                "built-in loss scaling needs a forward of one graph, but this one breaks into several (the log says "
                "where): scale the loss with chunkc.GradScaler, train in bfloat16, or remove the breaks"
            )

    def _check_hooks(self) -> None:
        hooked = [i for i, p in enumerate(self.params) if p._backward_hooks or p._post_accumulate_grad_hooks]
        if hooked:
            raise ChunkcError(
                f"{self.names(hooked)} have gradient hooks, which would never run: gradients land in chunks, not in "
                "autograd. Remove the hooks, or work on `param.grad` between backward() and step()"
            )

    def check_step(self, params: Mapping[int, nn.Parameter]) -> frozenset[int]:
        """Indexes of all parameters that have a gradient now; see ``OptimizerRuntime``."""
        self.settle()
        gradients = self.gradients
        present = [i for i, p in enumerate(self.params) if p.grad is not None]
        stale = [i for i in present if hasattr(self.params[i].grad, "_chunkc_index") and not gradients.is_handle(i)]
        if stale:
            raise ChunkcError(
                f"{self.names(stale)} hold gradients of an earlier backward, which are gone; assign gradients in "
                "place (`param.grad.copy_(g)`) or plain tensors"
            )
        lost = [i for i in present if gradients.is_handle(i) and not gradients.is_kept(i) and i not in gradients.zeroed]
        if lost and gradients.pending:
            raise ChunkcError(
                f"{self.names(lost)} hold gradients that an earlier step() consumed, beside new ones of others; call "
                "zero_grad() after each step()"
            )
        handed = [i for i in present if gradients.is_handle(i)]
        if handed and not gradients.pending:
            raise ChunkcError(
                "step() was already called for the gradients of the last backward; call zero_grad() and run forward "
                "and backward before the next step()"
            )
        untrained = [i for i in present if not self.is_trained(i)]
        if untrained:
            raise ChunkcError(
                f"{self.names(untrained)} hold gradients, but the forward of the compiled model does not train them, "
                "so they have no optimizer state; set their .grad to None, or use them in the forward"
            )
        return frozenset(present)

    def _is_foreign_step(self, discarded: Collection[int]) -> bool:
        """Tell whether another optimizer has stepped parameters whose gradients are ``discarded``.

        The first such step is logged.
        """
        found = self.foreign.found(discarded)
        self.foreign.forget()
        if found:
            self.foreign.tell(self.names(found))
        return bool(found)

    def _is_unscaled(self) -> bool:
        """Tell whether gradients in chunks need nothing but the loss scale undone, if it is applied here."""
        return self.gradients.factor is (None if self.own_scale is None else self.gradients.unscaling)

    def _prepare_to_add(self) -> None:
        """Bring gradients in chunks to the form to which one more micro-batch adds its own.

        All that was asked for is done to the gradients. They are multiplied by the loss scale, if it is applied here.
        """
        gradients, scale = self.gradients, self.own_scale
        if gradients.num_micro_batches == 0 or self._is_unscaled():
            return
        self.join()
        if scale is not None:
            gradients.factor = scale.scale if gradients.factor is None else gradients.factor * scale.scale
        self._apply_factor()

    def clip(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip all gradients by their global norm; see ``chunkc.clip_grad_norm_``."""
        with self.ranks.agreement_scope():
            present = self.check_step({})
        self._agree_on_gradients(present, f"clipping to {max_norm} by the {norm_type}-norm")
        self.wants_norms = True
        if not present:
            return torch.zeros((), dtype=torch.float32, device=self.device.torch_device)
        norm_table = self._measured(present)
        if norm_table is not None and norm_type == 2.0:
            norm, factor = self._on_compute(norm_table.total_norm, norm_table.ready), self.gradients.factor
            norm = norm if factor is None else norm * factor
        else:
            norms = [torch.linalg.vector_norm(g, norm_type) for g in self._exact(present) if g.numel()]
            found = torch.stack(norms) if norms else torch.zeros(1, device=self.device.torch_device)
            norm = torch.as_tensor(torch.linalg.vector_norm(found, norm_type)).to(torch.float32)
        self._multiply(present, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def unscale(self, inverse: torch.Tensor, scaler: Lines) -> torch.Tensor | None:
        """Multiply all gradients by ``inverse`` and have the step skipped where one is not finite.

        Return 1 where one is not finite, else 0; None where there are no gradients. ``scaler`` describes what all ranks
        must scale by alike.
        """
        if not self.is_scaled_outside:
            raise ChunkcError(
                "the gradients were not scaled by this script: call scaler.scale(loss).backward(), or leave scaling to "
                "the compiled model and call optimizer.step()"
            )
        with self.ranks.agreement_scope():
            present = self.check_step({})
        self._agree_on_gradients(present, "unscaling", scaler)
        self.wants_norms = True
        if not present:
            return None
        found = self.gradients.found = self._find_nonfinite(present)
        self._multiply(present, inverse.to(self.device.torch_device))
        return found

    def _agree_on_gradients(self, present: frozenset[int], what: str, more: Lines = tuple) -> None:
        """All ranks are about to do ``what`` to the same gradients, of all of them."""

        def lines() -> list[str]:
            way = "read one by one" if self._measured(present) is None else "measured"
            return [what, *more(), way, *map(self.name_of, sorted(present)), *self.assigned(sorted(present))]

        self.ranks.agree(Kind.GRADIENTS, lines, what)
        if self.reduce_gradients():
            self.ranks.agree(Kind.GRADIENTS, lines, what)

    def assigned(self, indexes: Iterable[int]) -> list[str]:
        """Of each parameter among ``indexes`` whose ``grad`` no backward has made, that it is so."""
        found = [i for i in indexes if self.params[i].grad is not None and not self.gradients.is_handle(i)]
        return [f"the gradient of {self.name_of(i)} was assigned" for i in found]

    def _find_nonfinite(self, present: frozenset[int]) -> torch.Tensor:
        """1 where a gradient of ``present`` is infinite or NaN, else 0: float32 [], on the device."""
        norm_table = self._measured(present)
        if norm_table is not None:
            return self._on_compute(norm_table.found_nonfinite, norm_table.ready)
        is_finite = all([bool(gradient.isfinite().all()) for gradient in self._exact(present)])  # all ranks read all
        return torch.tensor(float(not is_finite), dtype=torch.float32, device=self.device.torch_device)

    def _measured(self, present: frozenset[int]) -> GradNormTable | None:
        """Norms of the gradients of ``present``; None unless they are what the latest backward measured."""
        is_all = present == self.gradients.measured and all(self.gradients.is_handle(index) for index in present)
        return self._norm_table if is_all else None

    def _multiply(self, present: Iterable[int], factor: torch.Tensor) -> None:
        """Gradients in chunks later, by the step; plain tensors in ``param.grad`` now."""
        before = self.gradients.factor
        self.gradients.factor = factor if before is None else before * factor
        for index in present:
            grad = self.params[index].grad
            if grad is not None and not self.gradients.is_handle(index):
                multiply(grad.detach(), factor.to(grad.device))

    def _exact(self, present: Iterable[int]) -> Iterator[torch.Tensor]:
        """The gradients of ``present`` in float64 on the device, one after another.

        Who clips or unscales has not asked to see them: the wait for those in chunks counts as unasked.
        """
        device, gradients = self.device.torch_device, self.gradients
        if gradients.pending:
            self.device.synchronize()
        for index in sorted(present):
            grad = self.params[index].grad
            if grad is None:
                continue
            if not gradients.is_handle(index):
                yield self.averaged(grad.detach()).to(device, torch.float64)
            elif not gradients.is_kept(index):
                yield torch.zeros(1, dtype=torch.float64, device=device)  # zeroed after a step that consumed it
            else:
                self._require_gradient(index, gradients.stamp_of(index))
                whole = self._gradient(index).to(device, torch.float64)
                yield whole if gradients.factor is None else multiply(whole, gradients.factor)

    def _on_compute(self, read: Callable[[], torch.Tensor], waits: Sequence[Event]) -> torch.Tensor:
        """Return ``read()`` on the compute stream, behind what has been launched there and ``waits``."""
        found = list[torch.Tensor]()
        self.device.launch(Stream.COMPUTE, "read the norms", waits, lambda: found.append(read()))
        return found[0]
